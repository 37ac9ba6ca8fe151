"""What the flops profiler counts: published numbers, closed formulas, and torch's own counter."""

import io
import json
from contextlib import redirect_stdout

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_lightning.profile import FlopsProfiler, get_model_profile, report, table
from ds_lightning.profile.units import flops_text, number_text, seconds_text


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 120, 5), nn.Tanh()),
        )
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))

    def forward(self, images):
        return torch.softmax(self.classifier(self.features(images).flatten(1)), dim=1)


class Block(nn.Module):
    """A pre-norm block of a transformer, causal or not."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, causal, recompute=False, words=11, width=8, layers=2, heads=2):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.body = nn.Sequential(Residual(4), Residual(4))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, images):
        return self.head(self.pool(self.body(self.stem(images))).flatten(1))


class Experts(nn.Module):
    """Every token goes to the best of its experts."""

    def __init__(self, width=6, experts=3):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out[chosen == index] = expert(x[chosen == index])
        return out


def profiled(model, *inputs, backward=True, **kwargs):
    profiler = FlopsProfiler(model)
    profiler.start_profile(**kwargs)
    result = model(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    if backward:
        result.sum().backward()
    profiler.stop_profile()
    return profiler


def tokens(batch=3, length=5):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(0))


def transformer_macs(batch=3, length=5, words=11, width=8, layers=2):
    rows = batch * length
    block = rows * (3 + 1 + 4 + 4) * width * width + 2 * batch * length * length * width
    return layers * block + rows * width * words


def test_lenet_has_the_published_numbers():
    assert get_model_profile(LeNet(), (1024, 1, 32, 32), as_string=False, print_profile=False) == (
        866_076_672,
        426_516_480,
        61_706,
    )


@pytest.mark.parametrize("causal", [True, False], ids=["gpt", "bert"])
def test_transformers_follow_the_formula(causal):
    batch, length, width, layers = 3, 5, 8, 2
    total = profiled(Transformer(causal), tokens()).tree.total()
    rows = batch * length
    others = layers * (2 * 5 * rows * width + 2 * rows * width + 4 * rows * width)  # norms, residuals, gelu
    assert total.forward_macs == transformer_macs()
    assert total.forward_flops == 2 * transformer_macs() + others
    products = 2 * 2 * transformer_macs() + 2 * layers * batch * length * length * width  # scores are computed again
    # The input of the first block needs a gradient: it goes on into the embedding.
    again = layers * (2 * 10 * rows * width + 4 * rows * width)
    accumulated = total.backward_flops - products - again  # additions where two gradients meet
    assert 0 <= accumulated <= 4 * layers * rows * width


def test_a_resnet_follows_the_formula():
    batch, side = 2, 8
    total = profiled(ResNet(), torch.randn(batch, 3, 2 * side, 2 * side)).tree.total()
    area = batch * side * side
    macs = area * 3 * 4 * 9 + 4 * area * 4 * 4 * 9 + batch * 4 * 5
    elements = 4 * area
    others = 4 * 5 * elements + 2 * 2 * elements + 2 * elements + elements  # norms, relus, residuals, pool
    counters = 4  # each batch norm counts its batches
    assert total.forward_macs == macs
    assert total.forward_flops == 2 * macs + others + counters


def test_experts_count_the_tokens_they_get():
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    assert profiled(Experts(), x).tree.total().forward_macs == 10 * 6 * 3 + 10 * 6 * 6


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("kind", "per_element", "gates"), [("RNN", 1, 1), ("GRU", 7, 3), ("LSTM", 10, 4)])
def test_recurrent_layers_follow_the_formula(kind, per_element, gates, bias):
    layer = getattr(nn, kind)(10, 20, num_layers=2, bidirectional=True, bias=bias)
    total = profiled(layer, torch.randn(5, 3, 10)).tree.total()
    rows = 5 * 3
    macs = rows * 2 * gates * 20 * ((10 + 20) + (40 + 20))
    assert total.forward_macs == macs
    assert total.forward_flops == 2 * macs + rows * 4 * per_element * 20


@pytest.mark.parametrize(("kind", "per_element", "gates"), [("RNN", 1, 1), ("GRU", 7, 3), ("LSTM", 10, 4)])
def test_recurrent_cells_follow_the_formula(kind, per_element, gates):
    cell = getattr(nn, f"{kind}Cell")(10, 20)
    total = profiled(cell, torch.randn(3, 10)).tree.total()
    assert total.forward_flops == 2 * 3 * gates * 20 * 30 + 3 * per_element * 20


CONVOLUTIONS = {
    "same": (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9), 6 * 4 * 3 * 9),
    "valid": (nn.Conv1d(4, 6, 3, padding="valid"), (2, 4, 9), 6 * 4 * 3 * 7),
    "number": (nn.Conv2d(4, 6, 3, padding=1, stride=2), (2, 4, 8, 8), 6 * 4 * 9 * 16),
    "groups": (nn.Conv2d(4, 6, (3, 1), padding=(1, 0), groups=2), (2, 4, 8, 8), 6 * 2 * 3 * 64),
    "dilated": (nn.Conv3d(2, 3, 2, dilation=2), (2, 2, 5, 5, 5), 3 * 2 * 8 * 27),
    "transposed": (nn.ConvTranspose2d(8, 16, 3, groups=2), (2, 8, 5, 5), 8 * 8 * 9 * 25),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_follow_the_formula(case):
    layer, shape, macs = CONVOLUTIONS[case]
    x = torch.randn(shape)
    total = profiled(layer, x).tree.total()
    assert total.forward_macs == 2 * macs
    assert total.forward_flops == 4 * macs + layer(x).numel()


EXPRESSIONS = {
    "matmul": lambda a, b: torch.matmul(a, b),
    "at": lambda a, b: a @ b,
    "mm": lambda a, b: torch.mm(a[0], b[0]).expand(2, -1, -1),
    "bmm": lambda a, b: torch.bmm(a, b),
    "baddbmm": lambda a, b: torch.baddbmm(torch.zeros(1), a, b),
    "addmm": lambda a, b: torch.addmm(torch.zeros(1), a[0], b[0]),
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
}


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_however_a_product_is_written_it_counts(case):
    class Product(nn.Module):
        def forward(self, a, b):
            return EXPRESSIONS[case](a, b)

    pairs = 1 if case in ("mm", "addmm") else 2
    profiler = profiled(Product(), torch.randn(2, 3, 4), torch.randn(2, 4, 5), backward=False)
    assert profiler.get_total_flops() == 2 * pairs * 3 * 4 * 5


@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (nn.ReLU6(), (2, 3), 6),
        (nn.PReLU(), (2, 3), 6),
        (nn.LogSoftmax(1), (2, 3), 6),
        (nn.MaxPool1d(2), (2, 3, 4), 24),
        (nn.AdaptiveAvgPool2d(1), (2, 3, 4, 4), 96),
        (nn.AdaptiveAvgPool2d(2), (2, 3, 4, 4), 96),
        (nn.Upsample(scale_factor=2), (2, 3, 4, 4), 384),
        (nn.Upsample(size=(5, 6), mode="bilinear"), (2, 3, 4, 4), 180),
        (nn.LayerNorm(4), (2, 4), 40),
        (nn.LayerNorm(4, elementwise_affine=False), (2, 4), 32),
        (nn.GroupNorm(2, 4), (2, 4, 3), 120),
        (nn.BatchNorm1d(4).eval(), (3, 4), 24),
        (nn.BatchNorm1d(4, affine=False).eval(), (3, 4), 12),
        (nn.Dropout(0.0), (2, 3), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_elementwise_layers_count_by_element(layer, shape, flops):
    assert profiled(layer, torch.randn(shape), backward=False).get_total_flops() == flops


def test_products_equal_those_of_torchs_counter():
    model, x = Transformer(causal=False), tokens()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # torch does not count the other on a CPU
        total = profiled(model, x).tree.total()
        with FlopCounterMode(display=False) as counter:
            model(x)
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
    assert 2 * total.forward_macs == forward
    rows, width, layers = 15, 8, 2
    elementwise = layers * (2 * 10 * rows * width + 4 * rows * width)
    rest = total.backward_flops - (counter.get_total_flops() - forward) - elementwise
    assert 0 <= rest < 0.2 * total.backward_flops  # softmax, scaling, and sums of gradients


def test_an_encoder_of_torch_counts_in_evaluation_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    _, macs, _ = get_model_profile(encoder, (3, 5, 8), as_string=False, print_profile=False)
    assert macs == 2 * (15 * (4 * 64 + 2 * 128) + 2 * 3 * 25 * 8)


def test_recomputation_is_counted_apart_and_in_its_modules():
    x = tokens()
    plain, again = (profiled(Transformer(causal=True, recompute=flag), x).tree for flag in (False, True))
    assert plain.total().recomputed_flops == 0
    assert again.total().forward_flops == plain.total().forward_flops
    blocks = next(child for child in again.children if child.kind == "ModuleList")
    last = 2 * (2 * 15 * 32 * 8 + 15 * 8)  # torch stops before the last layer and the residual behind it
    assert again.total().recomputed_flops == blocks.total().recomputed_flops == blocks.total().forward_flops - last
    for one, other in zip(plain.walk(), again.walk(), strict=True):
        assert one.own.backward_flops == other.own.backward_flops, one.name


def test_backward_is_counted_in_the_module_it_belongs_to():
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 6)), nn.Linear(6, 2))
    found = {node.name: node.own for node in profiled(model, torch.randn(3, 4)).tree.walk()}
    assert found["0"].backward_flops == 2 * 3 * 4 * 5  # the input needs no gradient
    assert found["1.0"].backward_flops == 15
    assert found["1.1"].backward_flops == 2 * 2 * 3 * 5 * 6
    assert found["2"].backward_flops == 2 * 2 * 3 * 6 * 2
    assert all(own.backward_seconds > 0 for own in found.values())


def test_a_shared_layer_counts_each_call_and_has_its_parameters_once():
    layer = nn.Linear(4, 4)
    tree = profiled(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(2, 4)).tree
    assert tree.parameters == 20
    assert tree.children[0].own.calls == 2
    assert tree.total().forward_macs == 2 * 2 * 16


def test_sessions_do_not_add_up_and_leave_nothing_behind():
    model, x = Transformer(causal=True), tokens()
    functions = [torch.bmm, torch.matmul, F.linear, torch.Tensor.__matmul__, F.scaled_dot_product_attention]
    counts = [get_model_profile(model, args=[x], as_string=False, print_profile=False) for _ in range(3)]
    assert len(set(counts)) == 1
    assert model.training
    calls = []
    handle = model.head.register_forward_hook(lambda *_: calls.append(1))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(TypeError):
        model(x, x)
    with pytest.raises(RuntimeError, match="begun already"):
        profiler.start_profile()
    profiler.end_profile()
    with pytest.raises(RuntimeError, match="Nothing was profiled"):
        _ = profiler.tree
    now = [torch.bmm, torch.matmul, F.linear, torch.Tensor.__matmul__, F.scaled_dot_product_attention]
    assert functions == now
    assert torch.backends.mha.get_fastpath_enabled()
    model(x)
    assert calls == [1]
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_ignored_modules_count_nothing():
    model = Transformer(causal=True)
    whole = profiled(model, tokens()).get_total_macs()
    rest = profiled(model, tokens(), ignore_list=[Block]).get_total_macs()
    assert rest == 15 * 8 * 11 < whole


def test_get_model_profile_refuses_what_it_cannot_call():
    for wrong in ([1, 2], "abc"):
        with pytest.raises(ValueError, match="tuple"):
            get_model_profile(nn.ReLU(), wrong)
    with pytest.raises(ValueError, match="nothing to call"):
        get_model_profile(nn.ReLU())


def test_a_report_is_text_json_or_tables(tmp_path):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    profiler = profiled(model, torch.randn(3, 4))
    written = tmp_path / "made" / "profile.txt"
    profiler.print_model_profile(7, output_file=written)
    text = written.read_text()
    assert "Profile summary at step 7" in text
    assert "fwd MACs per rank:" in text
    assert "(2): Linear(" in text
    assert "12 = " in text  # parameters of the last layer
    profiler.print_model_profile(detailed=False, output_file=tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["model"]["forward_macs"] == 3 * (20 + 10)
    assert [child["class"] for child in data["model"]["children"]] == ["Linear", "ReLU", "Linear"]
    out = io.StringIO()
    with redirect_stdout(out):
        profiler.print_model_profile(module_depth=1, top_modules=2)
        profiler.print_model_aggregated_profile()
    assert "Linear: 37, ReLU: 0" in out.getvalue()
    console = Console(file=io.StringIO(), width=160)
    table.show(profiler.tree, report.Settings(), console)
    assert "Linear" in console.file.getvalue()


def test_numbers_are_shown_with_units():
    assert number_text(1.5e9) == "1.5 B"
    assert number_text(61_706) == "61.71 K"
    assert flops_text(866_076_672) == "866.08 MFLOPs"
    assert seconds_text(0.0125) == "12.5 ms"
    assert seconds_text(0.0) == "0 s"
