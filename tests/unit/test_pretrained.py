"""Weights from files and folders of all kinds into plain modules: what fits is loaded, what does not is named."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed import checkpoint as dcp
from torchmetrics import MeanMetric

import ds_lightning as dsl
from ds_lightning.checkpoint import safetensors_file
from ds_lightning.checkpoint.sharded import ShardedWrite
from ds_lightning.checkpoint.snapshot import Snapshot
from ds_lightning.errors import CheckpointError, ConfigError
from ds_lightning.topology import Topology
from ds_lightning.zero.logical import flat_range
from tests.lightning.runs import listening

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"


class Net(nn.Module):
    """A tied pair, a buffer in the state and one that is not."""

    def __init__(self, tie=True, width=4):
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 5, bias=False)
        if tie:
            self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Whole(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.net = Net(tie)
        self.extra = nn.Linear(2, 2)


def net(seed, **options):
    torch.manual_seed(seed)
    made = Net(**options)
    made.count += seed
    return made


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(module, expected):
    found = module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def index(folder, places, name="model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def in_two(folder, values, suffix, save):
    places = {name: f"part-{i % 2}{suffix}" for i, name in enumerate(values)}
    for file in set(places.values()):
        save({name: values[name] for name in values if places[name] == file}, folder / file)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    index(folder, places, f"{stem}{suffix}.index.json")


def untied(module):
    return {name: value for name, value in weights(module).items() if name != "head.weight"}


def write(kind, folder, module):
    """One form in which weights come; returns the path to give."""
    values = weights(module)
    if kind == "safetensors file":
        save_model(module, str(folder / "w.safetensors"))
        return folder / "w.safetensors"
    if kind == "safetensors folder":
        save_file(untied(module), folder / "model.safetensors")
    elif kind == "safetensors shards":
        in_two(folder, untied(module), ".safetensors", save_file)
    elif kind == "index":
        in_two(folder, untied(module), ".safetensors", save_file)
        return folder / "model.safetensors.index.json"
    elif kind == "diffusers folder":
        save_file(untied(module), folder / "diffusion_pytorch_model.safetensors")
    elif kind == "bin folder":
        torch.save(values, folder / "pytorch_model.bin")
    elif kind == "bin shards":
        in_two(folder, untied(module), ".bin", torch.save)
    elif kind == "ckpt":
        torch.save({"state_dict": values, "optimizer_states": []}, folder / "a.ckpt")
        return folder / "a.ckpt"
    elif kind == "sharded":
        ranks = Topology.single()
        ShardedWrite({"state_dict": values}, folder / "a.ckpt", Snapshot(ranks), ranks, lambda: None).run()
        return folder / "a.ckpt"
    elif kind == "dcp":
        dcp.save(values, checkpoint_id=folder / "dcp")
        return folder / "dcp"
    return folder


KINDS = [
    *("safetensors file", "safetensors folder", "safetensors shards", "index", "diffusers folder"),
    *("bin folder", "bin shards", "ckpt", "sharded", "dcp"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
def test_every_kind_of_source_gives_every_bit(tmp_path, kind):
    source = net(1)
    module = net(2)
    loaded = dsl.load_pretrained(module, write(kind, tmp_path, source))
    same(module, weights(source))
    assert module.head.weight is module.embedding.weight
    assert (loaded.missing, loaded.unexpected, loaded.unfit) == ((), (), ())


def test_stored_ties_reach_a_module_that_does_not_tie(tmp_path):
    save_model(net(1), str(tmp_path / "w.safetensors"))  # notes in the header that head.weight is embedding.weight
    module = net(2, tie=False)
    dsl.load_pretrained(module, tmp_path / "w.safetensors")
    same(module, weights(net(1)))


def test_of_two_names_of_a_tie_the_first_counts_and_a_difference_is_told(tmp_path):
    values = weights(net(1))
    values["head.weight"] = values["head.weight"] + 1
    save_file(values, tmp_path / "model.safetensors")
    module = net(2)
    with listening() as messages:
        dsl.load_pretrained(module, tmp_path)
    assert torch.equal(module.head.weight, values["embedding.weight"])
    assert any("head.weight differs from embedding.weight" in message for message in messages)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_either_name_of_a_tie_is_enough(tmp_path, name):
    values = weights(net(1))
    save_file(
        {**untied(net(1)), name: values[name]} if name[0] == "e" else _only_head(values), tmp_path / "a.safetensors"
    )
    module = net(2)
    dsl.load_pretrained(module, tmp_path / "a.safetensors")
    same(module, values)


def _only_head(values):
    return {name: value for name, value in values.items() if name != "embedding.weight"}


def test_values_are_converted_as_torch_converts_them(tmp_path):
    values = {name: v.bfloat16() if v.is_floating_point() else v.int() for name, v in untied(net(1)).items()}
    save_file(values, tmp_path / "model.safetensors")
    module = net(2)
    dsl.load_pretrained(module, tmp_path)
    assert all(
        torch.equal(module.state_dict()[name], v.to(module.state_dict()[name].dtype)) for name, v in values.items()
    )
    half = net(3).half()
    values["layers.0.bias"] = torch.tensor([1.0, 7e4, -7e4, float("inf")])
    values["layers.1.bias"] = torch.tensor([1.0, 65504.0, 65519.0, float("inf")])  # rounds to the largest
    save_file(values, tmp_path / "model.safetensors")
    with listening() as messages:
        dsl.load_pretrained(half, tmp_path)
    told = [message for message in messages if "too large for float16" in message]
    assert len(told) == 1
    assert "layers.0.bias" in told[0]


# Names ------------------------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_changes(tmp_path):
    values = untied(net(1))
    values["layers.0.weight"] = torch.zeros(4, 3)
    values["layers.1.bias"] = torch.zeros(4, dtype=torch.int8)
    values["layers.1.weight"] = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    values["more"] = values.pop("layers.0.bias")
    save_file(values, tmp_path / "model.safetensors")
    module = net(2)
    before = weights(module)
    with pytest.raises(CheckpointError) as caught:
        dsl.load_pretrained(module, tmp_path)
    text = str(caught.value)
    for line in (
        "layers.0.weight: (4, 3) in the source, (4, 4) in the module",
        "layers.1.bias: torch.int8 in the source, torch.float32 in the module",
        "layers.1.weight: torch.float8_e4m3fn in the source, torch.float32 in the module; scales",
        "layers.0.bias: missing in the source",
        "more: not in the module",
        "strict=False",
    ):
        assert line in text
    same(module, before)
    with listening() as messages:
        loaded = dsl.load_pretrained(module, tmp_path, strict=False)
    assert loaded.missing == ("layers.0.bias",)
    assert loaded.unexpected == ("more",)
    assert set(loaded.unfit) == {"layers.0.weight", "layers.1.bias", "layers.1.weight"}
    assert set(loaded.names) == {"embedding.weight", "count"}
    same(
        module,
        {
            **before,
            **{name: values["embedding.weight"] for name in ("embedding.weight", "head.weight")},
            "count": values["count"],
        },
    )
    for name in ("layers.0.bias", "more", "layers.0.weight", "layers.1.bias", "layers.1.weight"):
        assert any(name in message for message in messages)


def test_a_module_without_memory_is_refused(tmp_path):
    save_file(untied(net(1)), tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ConfigError, match=r"embedding.weight, .* of Net are on the meta device"):
        dsl.load_pretrained(module, tmp_path)


def test_another_model_is_an_error_even_if_not_strict(tmp_path):
    save_file({"a.b": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="No name is in both"):
        dsl.load_pretrained(net(1), tmp_path, strict=False)


@pytest.mark.parametrize(
    "rename",
    [
        {"x.": "", "x.layers.": "layers.", "optimizer.": None},
        lambda name: None if name.startswith("optimizer.") else name.removeprefix("x."),
    ],
    ids=["table", "function"],
)
def test_names_are_changed_on_the_way(tmp_path, rename):
    values = {f"x.{name}": value for name, value in untied(net(1)).items()}
    save_file({**values, "optimizer.step": torch.ones(1)}, tmp_path / "model.safetensors")
    module = net(2)
    dsl.load_pretrained(module, tmp_path, rename=rename)
    same(module, weights(net(1)))


def test_two_names_for_one_place_are_an_error(tmp_path):
    save_file({"a.x": torch.ones(1), "b.x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a.x and b.x would both be x"):
        dsl.load_pretrained(net(1), tmp_path, rename=lambda name: name[2:])


def test_a_network_and_what_holds_it_load_each_other(tmp_path):
    torch.manual_seed(1)
    whole = Whole()
    torch.save({"state_dict": whole.state_dict()}, tmp_path / "whole.ckpt")
    with listening() as messages:
        module = net(2)
        dsl.load_pretrained(module, tmp_path / "whole.ckpt")
    same(module, weights(whole.net))
    assert any("'net' there" in message and "extra.weight" in message for message in messages)
    module = net(2)
    dsl.load_pretrained(module, tmp_path / "whole.ckpt", prefix="net.")
    same(module, weights(whole.net))
    with pytest.raises(CheckpointError, match=r"no name begins with it. Names begin with: extra., net."):
        dsl.load_pretrained(module, tmp_path / "whole.ckpt", prefix="model.")
    save_file(untied(whole.net), tmp_path / "model.safetensors")
    torch.manual_seed(3)
    other = Whole()
    extra = weights(other.extra)
    with pytest.raises(CheckpointError, match=r"extra.weight: missing"):
        dsl.load_pretrained(other, tmp_path)
    assert dsl.load_pretrained(other, tmp_path, strict=False).missing == ("extra.weight", "extra.bias")
    same(other.net, weights(whole.net))
    same(other.extra, extra)


def test_twins_in_a_module_are_not_guessed(tmp_path):
    save_file(untied(net(1)), tmp_path / "model.safetensors")
    pair = nn.ModuleDict({"q": net(1), "k": net(2)})
    with pytest.raises(CheckpointError, match="No name is in both"):
        dsl.load_pretrained(pair, tmp_path)
    dsl.load_pretrained(pair["k"], tmp_path)
    same(pair["k"], weights(net(1)))


def test_a_key_leads_into_a_checkpoint(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": weights(net(1)), "ema": {"state_dict": weights(net(5))}}, path)
    module = net(2)
    dsl.load_pretrained(module, path, key="ema.state_dict")
    same(module, weights(net(5)))
    with pytest.raises(
        CheckpointError,
        match=r"key='emma.state_dict': .* no named tensors there. did you mean .ema.state_dict",
    ):
        dsl.load_pretrained(module, path, key="emma.state_dict")
    torch.save({"net": weights(net(6))}, path)
    dsl.load_pretrained(module, path, key="net")
    same(module, weights(net(6)))
    save_file(untied(net(1)), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="nothing but weights"):
        dsl.load_pretrained(module, tmp_path, key="net")


# Files ------------------------------------------------------------------------------------------------------------

DTYPES = [*safetensors_file._NAMES]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6), st.data())
def test_ranges_are_those_of_what_the_library_wrote(tmp_path_factory, kinds, data):
    path = tmp_path_factory.mktemp("x") / "a.safetensors"
    numbers = (torch.arange(64) % 2, torch.randn(64))
    values = {
        f"t{i}": numbers[dtype.is_floating_point or dtype.is_complex][: torch.Size(shape).numel()]
        .to(dtype)
        .reshape(shape)
        .clone()
        for i, (dtype, shape) in enumerate(kinds)
    }
    save_file(values, path, {"format": "pt"})
    found, metadata = safetensors_file.read(path)
    assert metadata == {"format": "pt"}
    assert found.keys() == values.keys()
    for name, value in values.items():
        start = data.draw(st.integers(0, value.numel()))
        stop = data.draw(st.integers(start, value.numel()))
        part = flat_range(found[name], start, stop)
        assert (found[name].shape, found[name].dtype, part.dtype) == (value.shape, value.dtype, value.dtype)
        expected = value.reshape(-1)[start:stop]
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BROKEN = {
    "empty": b"",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n",
    "header cut": raw({"a": entry(0, 4, [1])}, length=4000),
    "header huge": raw(b"{}", length=1 << 63),
    "data cut": raw({"a": entry(0, 8, [2])}, bytes(7)),
    "data behind": raw({"a": entry(0, 8, [2])}, bytes(9)),
    "gap": raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)),
    "overlap": raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "size": raw({"a": entry(0, 8, [3])}, bytes(8)),
    "backwards": raw({"a": entry(8, 0, [2])}, bytes(8)),
    "negative": raw({"a": entry(0, 8, [-1, -2])}, bytes(8)),
    "bool": raw({"a": entry(0, 4, [True])}, bytes(4)),
    "vast": raw({"a": entry(0, 0, [1 << 61, 1 << 61, 0, 1 << 61])}),
    "dtype": raw({"a": entry(0, 4, [1], "F4")}, bytes(4)),
    "dtype kind": raw({"a": entry(0, 4, [1], ["F32"])}, bytes(4)),
    "entry": raw({"a": [0, 4]}, bytes(4)),
    "keys": raw({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "list": raw([1, 2]),
    "no json": raw(b"{'a': 1}"),
    "no text": raw(b"{\xff\xfe}"),
    "deep": raw(b"[" * 100_000 + b"]" * 100_000),
    "twice": raw(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":'
        + b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "metadata": raw({"__metadata__": 4}),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_broken_files_are_refused(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is not a complete safetensors file: .* Fetch it again"
    ):
        dsl.load_pretrained(net(1), tmp_path)


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(untied(net(1)), path)
    found, _ = safetensors_file.read(path)
    path.write_bytes(path.read_bytes()[:-80])
    with pytest.raises(CheckpointError, match="ends too early"):
        [flat_range(tensor, 0, tensor.numel()) for tensor in found.values()]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "../../secret.safetensors"}, r"names \.\./\.\./secret.safetensors: files of an index lie beside it"),
        ({"a": "/etc/passwd"}, "files of an index lie beside it"),
        ({"a": "sub/part.safetensors"}, "files of an index lie beside it"),
        ({"a": "..\\part.safetensors"}, "files of an index lie beside it"),
        ({"a": ".."}, "files of an index lie beside it"),
        (
            {"a": "gone-1.safetensors", "b": "gone-2.safetensors"},
            r"names gone-1.safetensors, gone-2.safetensors, which",
        ),
        ({"nothing": "part.safetensors"}, "part.safetensors holds nothing, but it does not"),
        ({}, "no weight_map"),
        ({"a": 4}, "no weight_map"),
        ([1], "no weight_map"),
    ],
    ids=["up", "absolute", "folder", "backslash", "dots", "gone", "without", "empty", "number", "list"],
)
def test_an_index_that_cannot_be_right_is_refused(tmp_path, places, message):
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path.parent / "secret.safetensors")
    index(tmp_path, places)
    with pytest.raises(CheckpointError, match=message):
        dsl.load_pretrained(net(1), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="no index of weights"):
        dsl.load_pretrained(net(1), tmp_path)


def test_links_as_in_the_cache_of_the_hub_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    in_two(blobs, untied(net(1)), ".safetensors", save_file)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    module = net(2)
    dsl.load_pretrained(module, snapshot)
    same(module, weights(net(1)))


class Evil:
    def __reduce__(self):
        return print, ("evil",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.ckpt"])
def test_nothing_is_unpickled_but_plain_data(tmp_path, capfd, name):
    torch.save({"state_dict": weights(net(1)), "evil": Evil()}, tmp_path / name)
    with pytest.raises(CheckpointError, match="objects that are not plain data"):
        dsl.load_pretrained(net(2), tmp_path / name)
    assert "evil" not in capfd.readouterr().out


def test_what_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape("snapshot_download('meta-llama/Llama-3.2-1B')")):
        dsl.load_pretrained(net(1), "meta-llama/Llama-3.2-1B")
    with pytest.raises(CheckpointError, match=r"a.safetensors does not exist"):
        dsl.load_pretrained(net(1), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        dsl.load_pretrained(net(1), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="local files"):
        dsl.load_pretrained(net(1), "s3://bucket/model.safetensors")
    (tmp_path / "tf_model.h5").write_text("")
    with pytest.raises(CheckpointError, match=r"no weights that are known here.* It has tf_model.h5"):
        dsl.load_pretrained(net(1), tmp_path)
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        dsl.load_pretrained(net(1), tmp_path / "a.pt", key="x")


# Modules ----------------------------------------------------------------------------------------------------------


class Theirs(Net):
    """With the tables that models of transformers have."""

    _keys_to_ignore_on_load_missing = (r"^layers\.\d+\.bias$",)
    _keys_to_ignore_on_load_unexpected = (r"^old\.",)
    _checkpoint_conversion_mapping = {r"^vision\.(\d+)": r"layers.\1", r"^text": "embedding"}  # noqa: RUF012


@pytest.mark.parametrize("inside", [False, True])
def test_tables_of_transformers_are_followed(tmp_path, inside):
    values = {
        "text.weight": torch.ones(5, 4),
        "vision.0.weight": torch.ones(4, 4),
        "layers.1.weight": torch.ones(4, 4),
        "count": torch.ones(2, dtype=torch.int64),
        "old.thing": torch.ones(1),
        "scratch": torch.ones(2),
    }
    save_file(values, tmp_path / "model.safetensors")
    theirs = Theirs()
    with listening() as messages:
        loaded = dsl.load_pretrained(nn.ModuleDict({"model": theirs}) if inside else theirs, tmp_path)
    assert len(loaded.names) == 4
    assert all((theirs.state_dict()[name] == 1).all() for name in loaded.names if not inside)
    assert any("the module computes these itself" in message and "scratch" in message for message in messages)
    with pytest.raises(CheckpointError, match=r"vision.0.weight: not in the module"):
        dsl.load_pretrained(theirs, tmp_path, rename={})


class Renaming(nn.Module):
    """Takes its own old names, and has a format of its own in it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.mean = MeanMetric()
        self.mean.persistent(True)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")


def test_modules_that_load_in_their_own_way_do_so(tmp_path):
    before = Renaming()
    before.mean.update(torch.tensor(3.0))
    values = {**before.state_dict(), "kernel": torch.ones(3)}
    del values["weight"]
    torch.save(values, tmp_path / "a.pt")
    module = Renaming()
    dsl.load_pretrained(module, tmp_path / "a.pt")
    assert (module.weight == 1).all()
    assert module.mean.mean_value == 3
    torch.save({"kernel": torch.ones(4)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="size mismatch for weight"):
        dsl.load_pretrained(module, tmp_path / "a.pt")


def test_compiled_parts_have_the_names_that_they_had(tmp_path):
    save_file(untied(net(1)), tmp_path / "model.safetensors")
    module = net(2)
    module.layers[0] = torch.compile(module.layers[0])
    dsl.load_pretrained(module, tmp_path)
    assert torch.equal(module.layers[0]._orig_mod.weight, net(1).layers[0].weight)


class Tree(nn.Module):
    """Parameters under given names."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            *path, local = name.split(".")
            owner = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            owner.register_parameter(local, nn.Parameter(torch.zeros(value.shape, dtype=dtype), requires_grad=False))


@pytest.mark.parametrize("name", ["stage2_bf16", "stage3_fp32"])
def test_checkpoints_of_deepspeed_are_sources_too(name):
    reference = torch.load(DEEPSPEED / name / "reference.pt", weights_only=True)
    expected = {**reference["weights"], **reference["buffers"]}
    module = Tree(expected)
    dsl.load_pretrained(module, DEEPSPEED / name)
    for key, value in module.state_dict().items():
        assert torch.equal(value, expected[key].to(value.dtype)), key
