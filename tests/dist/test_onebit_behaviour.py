"""What the 1-bit optimizers send, and how they behave where the equations say nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from tests.dist import onebit_reference as reference
from tests.dist.harness import full_values, make_engine
from tests.dist.test_onebit import PHASES, cells_of, make, one_step
from tests.pool import run_ranks

KINDS = list(PHASES)


class Wide(reference.Vectors):
    """Large enough for scales not to count."""

    SIZES = (1, 7, 30_001, 64, 9_000, 12_345, 8, 17, 5_000)


def check_bytes(kind, threshold):
    world = dist.get_world_size()
    module = Wide(torch.float32)
    optimizer = getattr(dsl.optim, kind)(module.groups(), **PHASES[kind])
    engine = make_engine(module, [optimizer], 0, threshold=threshold)
    full, compressed = {}, {}
    for step in range(34):
        engine.ledger.clear()
        local = optimizer.local_gradients
        one_step(engine, optimizer, step)
        (compressed if local else full)[step] = {k: (e.calls, e.bytes_sent) for k, e in engine.ledger.entries.items()}
    numel = sum(b.unit.numel for b in engine.units.values() if b.unit.trainable)
    assert sum(bytes_sent for _, bytes_sent in full[0].values()) == 2 * (world - 1) * numel * 4 // world
    # Parts of parameters per chunk, of those that have a gradient in this step; the widest message decides.
    present = {n for rank in range(world) for n in module.gradients(rank, 33)}
    chunks = [0] * world
    for buffers in engine.units.values():
        for slot in buffers.unit.slots:
            for server in range(world):
                start, stop = max(slot.start, server * buffers.unit.chunk), min(slot.stop, buffers.owned[1])
                stop = min(slot.stop, (server + 1) * buffers.unit.chunk)
                chunks[server] += slot.name in present and stop > start
    units = [b.unit for b in engine.units.values() if any(s.name in present for s in b.unit.slots)]
    signs = sum(unit.numel for unit in units) // world // 8
    row = -(-(4 * max(chunks) + signs) // 4) * 4
    if kind != "ZeroOneAdam":
        wanted = {"all_to_all": (1, (world - 1) * row), "all_gather": (1, (world - 1) * row)}
        assert compressed[33] == wanted
        assert 2 * (world - 1) * row * 25 <= 2 * (world - 1) * numel * 4 / world
    else:
        local_steps = [step for step, found in compressed.items() if not found]
        assert local_steps, "no step without communication"
        assert all(step >= PHASES[kind]["var_freeze_step"] for step in local_steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "threshold"), [(2, 0), (3, 100_000)])
def test_bytes_are_those_of_the_theory(kind, world, threshold):
    run_ranks(check_bytes, world, kind, threshold)


def check_stage_1_bytes():
    module, optimizer, engine = make("OneBitAdam", torch.float32, stage=1)
    for step in range(14):
        engine.ledger.clear()
        one_step(engine, optimizer, step)
    touched = len(engine.optimizers[0].touched_units())
    assert engine.ledger.entries["all_to_all"].calls == 1
    assert engine.ledger.entries["all_gather"].calls == 1 + touched  # the means, and new parameters
    assert "reduce_scatter" not in engine.ledger.entries
    block = next(iter(engine.optimizers[0]._blocks.values()))
    assert block.elements["exp_avg_sq"].numel() == block.elements["server_error"].numel() == block.unit.chunk
    assert block.elements["exp_avg"].numel() == block.elements["worker_error"].numel() == block.unit.numel


def test_stage_1_shards_the_variance_and_gathers_parameters():
    run_ranks(check_stage_1_bytes, 2)


def check_mask(kind):
    module = reference.Vectors(torch.float64)
    matrix, rest = module.matrix, [p for n, p in module.named_parameters() if n != "matrix"]
    mask = torch.ones(3, 5)
    mask[1] = 0
    groups = [{"params": [matrix], "exp_avg_mask": mask}, {"params": rest}]
    optimizer = getattr(dsl.optim, kind)(groups, **PHASES[kind])
    engine = make_engine(module, [optimizer], 0)
    for step in range(22):
        one_step(engine, optimizer, step)
    momentum = dsl.full_optimizer_state(matrix, "exp_avg")
    assert not momentum[1].any()
    assert momentum[0].any()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["exp_avg_mask"] is mask
    assert "exp_avg_mask" not in optimizer.param_groups[1]
    with pytest.raises(ConfigError, match="exp_avg_mask of group 0 has 15 elements"):
        type(optimizer)([{"params": rest, "exp_avg_mask": mask}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_multiplies_what_was_averaged_and_stays(kind):
    run_ranks(check_mask, 2, kind)


class Rows(nn.Module):
    """An embedding of which some rows never come, and a parameter that comes late."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 3)
        self.out = nn.Linear(3, 1)
        self.late = nn.Parameter(torch.ones(2))

    def forward(self, rank, step, micro=0):
        x = self.out(self.table(torch.tensor([rank, 2, 3 + step % 2]))).square().mean()
        return x + self.late.sum() if step >= 40 else x


def check_rows(kind):
    module = Rows()
    before = module.table.weight.detach().clone()
    optimizer = getattr(dsl.optim, kind)(module.parameters(), **PHASES[kind])
    engine = make_engine(module, [optimizer], 0)
    for step in range(40):
        one_step(engine, optimizer, step)
    engine.settle()
    after = full_values(engine)["table.weight"]
    assert torch.equal(after[6:], before[6:]), "rows that never came have moved"
    assert (after[:5] != before[:5]).any(dim=1).all()
    assert (after - before).abs().max() < 2
    with pytest.raises(ConfigError, match="late: the first gradient comes in step 41"):
        one_step(engine, optimizer, 40)
    engine.give_up_step()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_any_gradient_stay_and_late_parameters_are_refused(kind):
    run_ranks(check_rows, 2, kind)


def check_meeting(kind):
    """Whatever shows values makes ranks equal, and a mean of gradients is shown in compressed steps too."""
    module, optimizer, engine = make(kind, torch.float64)
    for step in range(35):
        one_step(engine, optimizer, step)
    wanted = sum(module.gradients(rank, 34)["matrix"].double() for rank in range(dist.get_world_size()))
    torch.testing.assert_close(dsl.full_grad(module.matrix), wanted / dist.get_world_size())
    norms = dsl.grad_norms(module)
    torch.testing.assert_close(norms["grad_2.0_norm/matrix"], float(wanted.norm()) / dist.get_world_size())
    own = module.gradients(dist.get_rank(), 34)
    squares = torch.tensor(sum(float(g.double().square().sum()) for g in own.values()), dtype=torch.float64)
    dist.all_reduce(squares)
    expected = float(squares / dist.get_world_size()) ** 0.5
    assert engine.norms.last() == pytest.approx(expected, rel=1e-12), "the root of the mean square of local norms"
    differs = kind == "ZeroOneAdam"
    assert _ranks_differ(module.matrix.detach()) == differs
    with dsl.gathered(module):
        assert not _ranks_differ(module.matrix.detach())
    one_step(engine, optimizer, 35)
    one_step(engine, optimizer, 36)
    assert not _ranks_differ(dsl.full_param(module.matrix))
    assert not _ranks_differ(dsl.full_optimizer_state(module.matrix, "worker_error"))


def _ranks_differ(value):
    ranks = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, value.contiguous())
    return any(not torch.equal(ranks[0], other) for other in ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_shows_values_shows_those_of_all_ranks(kind):
    run_ranks(check_meeting, 3, kind)


def check_plain(kind):
    """Without an engine, on one rank: the same numbers, and a state that loads."""
    module, optimizer, engine = make(kind, torch.float32)
    plain = reference.Vectors(torch.float32)
    alone = getattr(dsl.optim, kind)(plain.groups(), **PHASES[kind])
    for step in range(30):
        one_step(engine, optimizer, step)
        if step == 21:
            alone.load_state_dict(alone.state_dict())
            optimizer.load_state_dict(optimizer.state_dict())
        alone.zero_grad()
        plain(0, step).backward()
        alone.step()
    for name, value in full_values(engine).items():
        torch.testing.assert_close(dict(plain.named_parameters())[name].detach(), value, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_process_needs_no_engine(kind):
    run_ranks(check_plain, 1, kind)


def check_plain_refused():
    net = nn.Linear(2, 2)
    optimizer = dsl.optim.OneBitAdam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match="exchanges momenta between ranks through ZeroStrategy"):
        optimizer.step()
    two = [dsl.optim.OneBitAdam([net.weight]), torch.optim.SGD([net.bias], lr=0.1)]
    with pytest.raises(ConfigError, match="must be the only optimizer"):
        make_engine(net, two, 0)


def test_several_ranks_need_the_strategy_and_no_other_optimizer():
    run_ranks(check_plain_refused, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_hyper_parameters_are_checked(kind):
    cls, params = getattr(dsl.optim, kind), [nn.Parameter(torch.ones(2))]
    for name in ("nccl", "gloo", "mpi", "hccl", "compressed"):
        cls(params, comm_backend_name=name, cuda_aware=True)
    for wrong in ({"comm_backend_name": "tcp"}, {"amsgrad": True}):
        with pytest.raises(ConfigError):
            cls(params, **wrong)
    first = "var_freeze_step" if kind == "ZeroOneAdam" else "freeze_step"
    for wrong in ({first: 0}, {"lr": -1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match="."):
            cls(params, **wrong)


def test_the_list_of_coefficients_is_a_copy():
    p = nn.Parameter(torch.ones(3))
    optimizer = dsl.optim.OneBitLamb([p], freeze_step=2)
    for _ in range(4):
        p.grad = torch.full((3,), 0.5)
        optimizer.step()
        found = optimizer.get_lamb_coeffs()
        kept = list(found)
        found.clear()
        assert optimizer.get_lamb_coeffs() == kept != []


def check_new_parameter(kind):
    """A parameter joins in the warm-up; the states of the others stay."""
    module = reference.Vectors(torch.float64)
    late = module.rare
    optimizer = getattr(dsl.optim, kind)([p for p in module.parameters() if p is not late], **PHASES[kind])
    engine = make_engine(module, [optimizer], 0)
    for step in range(8):
        one_step(engine, optimizer, step)
    keys = ("exp_avg", "exp_avg_sq", "lamb_coeff_freeze")
    before = {key: dsl.full_optimizer_state(module.matrix, key) for key in keys}
    optimizer.add_param_group({"params": [late], "lr": 1e-3})
    assert optimizer.param_groups[1]["step"] == 8
    engine.follow_groups()
    for key, value in before.items():
        torch.testing.assert_close(dsl.full_optimizer_state(module.matrix, key), value, rtol=0, atol=0)
    start = late.detach().clone()
    for step in range(8, 30):
        one_step(engine, optimizer, step)
    assert not torch.equal(dsl.full_param(late), start)
    assert not _ranks_differ(dsl.full_param(late))


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_joins_while_the_variance_is_learnt(kind):
    run_ranks(check_new_parameter, 2, kind)


def test_cells_cover_every_element():
    run_ranks(check_cells, 3)


def check_cells():
    module, _, engine = make("OneBitAdam", torch.float32)
    for name, p in module.named_parameters():
        assert sum(b - a for a, b in cells_of(engine)[name]) == p.numel()
