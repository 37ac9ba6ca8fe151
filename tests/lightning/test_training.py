"""Automatic optimization under a Trainer with real ranks: every stage does what DDP does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import ds_lightning as dsl
from tests.lightning import common
from tests.lightning.common import Net, adamw, assert_alike, assert_same, data, fit, parity, run, weights, zero
from tests.pool import fresh_ranks, run_ranks

UNUSED = "ddp_find_unused_parameters_true"
STEPS_OF_AN_EPOCH = common.SAMPLES // 2 // 2


class Hooked(Net):
    """Writes down every hook, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.said: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.said.append(f"on_train_batch_start {batch_idx}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.said.append(f"on_train_batch_end {batch_idx}")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.said.append("on_before_zero_grad")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.said.append("optimizer_zero_grad")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_before_backward(self, loss: Tensor) -> None:
        self.said.append("on_before_backward")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.said.append("backward")
        super().backward(loss, *args, **kwargs)

    def on_after_backward(self) -> None:
        self.said.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.said.append("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.said.append("configure_gradient_clipping")
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.said.append("optimizer_step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.said.append("optimizer_step is over")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.said.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def on_validation_start(self) -> None:
        self.said.append("on_validation_start")

    def on_validation_end(self) -> None:
        self.said.append("on_validation_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.said.append(f"validation_step {batch_idx}")
        super().validation_step(batch, batch_idx)


def stepped(module: nn.Module) -> Any:
    """SGD and a schedule that moves after every optimizer step."""
    optimizer = common.sgd(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# Accumulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "optimize"),
    [
        (1, common.sgd),
        (4, common.sgd),
        (2, adamw),
        *(
            pytest.param(window, optimize, marks=pytest.mark.full)
            for window, optimize in ((2, common.sgd), (7, common.sgd), (1, adamw), (4, adamw), (7, adamw))
        ),
    ],
)
def test_accumulated_gradients_are_divided_once_also_in_a_short_last_window(window, optimize):
    (first, _) = run_ranks(
        parity, 2, functools.partial(Net, optimize), accumulate_grad_batches=window, max_epochs=2, timeout=60
    )
    assert first["steps"] == 2 * -(-STEPS_OF_AN_EPOCH // window)


def test_three_ranks_and_one_rank_train_as_ddp_does():
    loader = functools.partial(data, 18, 2)
    run_ranks(parity, 3, functools.partial(Net, adamw), accumulate_grad_batches=2, loader=loader, timeout=60)
    run_ranks(parity, 1, functools.partial(Net, adamw), accumulate_grad_batches=2, loader=loader, timeout=60)


@pytest.mark.parametrize("threshold", [20, 100_000], ids=["some are resident", "the default"])
def test_resident_parameters_change_nothing_at_stage_3(threshold):
    config = common.gathering(threshold=threshold)
    run_ranks(parity, 2, functools.partial(Net, adamw), stages=(3,), config=config, accumulate_grad_batches=2)


def one_batch_of_four() -> None:
    ratio = {}
    for kind in ("ddp", *common.STAGES):
        whole = run(functools.partial(Net, plain_sgd), kind, loader=functools.partial(data, 16, 8))
        parts = run(
            functools.partial(Net, plain_sgd),
            kind,
            loader=functools.partial(data_in_parts, 16),
            accumulate_grad_batches=4,
        )
        assert whole["steps"] == parts["steps"] == 1
        ratio[kind] = common.distance(parts["weights"], whole["weights"])
    assert max(ratio.values()) < 1e-6, ratio


def plain_sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


quick_sgd = functools.partial(plain_sgd, lr=2.0)


def data_in_parts(samples: int) -> DataLoader:
    return data(samples, 2)


def test_four_micro_batches_are_one_batch_four_times_as_large():
    run_ranks(one_batch_of_four, 2)


class Logged(Net):
    """Writes down what it returned, and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[float] = []
        self.kept: list[tuple[Tensor, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.kept.append((loss, loss.item()))
        self.said.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        assert all(tensor.item() == value for tensor, value in self.kept), "a loss was changed in place"


@pytest.mark.parametrize("window", [1, 8])
def test_the_logged_loss_is_the_loss_whatever_the_window(window):
    (first, _) = run_ranks(parity, 2, Logged, accumulate_grad_batches=window)
    assert len(first["said"]) == STEPS_OF_AN_EPOCH


def changing_windows() -> list[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 3})]


def test_gradient_accumulation_scheduler_changes_the_window_between_epochs():
    (first, _) = run_ranks(parity, 2, Hooked, callbacks=changing_windows, max_epochs=2)
    assert first["steps"] == 5 + 2
    assert first["said"].count("on_before_optimizer_step") == 7


class Validated(Hooked):
    """Validates in the middle of windows."""

    def val_dataloader(self) -> DataLoader:
        return data(12, 2)


def test_validation_inside_a_window_changes_nothing():
    arguments = {"accumulate_grad_batches": 4, "loader": functools.partial(data, 40, 2)}
    quiet = run_ranks(parity, 2, Hooked, **arguments, stages=(2, 3))[0]
    loud = run_ranks(parity, 2, Validated, **arguments, val_check_interval=3)[0]
    assert "on_validation_start" in loud["said"]
    assert_same(loud["weights"], quiet["weights"], "validation", 0.0)


class Branches(Net):
    """Uses one block in some micro-batches only: `used` says in which, by rank and batch."""

    def __init__(self, used: Callable[[int, int], bool], optimize: Any = None) -> None:
        super().__init__(optimize)
        self.used = used

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.blocks[0](self.embed(x))
        if self.used(self.global_rank, batch_idx):
            x = self.blocks[1](x)
        return nn.functional.mse_loss(self.head(x) * self.gain, y)


def second_only(rank: int, batch_idx: int) -> bool:
    return batch_idx % 3 == 1


def never(rank: int, batch_idx: int) -> bool:
    return False


def every_other_step(rank: int, batch_idx: int) -> bool:
    return batch_idx % 2 == 0


def on_rank_0(rank: int, batch_idx: int) -> bool:
    return rank == 0


@pytest.mark.parametrize("optimize", [common.sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    ("used", "window"),
    [(second_only, 3), (never, 1), (every_other_step, 1)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_branch_that_is_used_in_some_micro_batches_trains_as_under_ddp(used, window, optimize):
    make = functools.partial(Branches, used, optimize)
    run_ranks(parity, 2, make, reference=UNUSED, accumulate_grad_batches=window)


def test_a_branch_that_one_rank_uses_trains_as_under_ddp_where_parameters_are_whole():
    make = functools.partial(Branches, on_rank_0, adamw)
    run_ranks(parity, 2, make, reference=UNUSED, stages=(0, 1, 2))


def skip_a_block_on_one_rank() -> str:
    strategy = zero(3, timeout=timedelta(seconds=4))
    try:
        fit(Branches(on_rank_0), strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_that_take_different_branches_at_stage_3_train_or_end_in_words():
    outcomes = fresh_ranks(skip_a_block_on_one_rank, 2, timeout=40)
    said = [outcome.result or outcome.error for outcome in outcomes]
    assert not any(outcome.timed_out for outcome in outcomes), said
    if all(text == "nothing" for text in said):
        return
    assert any("blocks.1" in text and "TopologyError" in text for text in said), said


# Hooks and clipping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_hooks_are_called_as_often_and_in_the_order_of_ddp(window):
    (first, _) = run_ranks(
        parity,
        2,
        functools.partial(Validated, stepped),
        accumulate_grad_batches=window,
        gradient_clip_val=0.5,
        val_check_interval=2,
    )
    assert first["said"].count("lr_scheduler_step") == first["steps"]


def test_ten_batches_in_windows_of_four_are_three_steps():
    (first, _) = run_ranks(parity, 2, Hooked, accumulate_grad_batches=4, loader=functools.partial(data, 40, 2))
    for hook in ("optimizer_step", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad"):
        assert first["said"].count(hook) == 3, hook


class StepCounts(Callback):
    """Writes down the optimizer's step count beside the Trainer's."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        step = dsl.full_optimizer_state(pl_module.head.weight, "step")
        self.seen.append((0 if step is None else int(step), trainer.global_step))


def step_counts() -> None:
    for stage in common.STAGES:
        counts = StepCounts()
        fit(Net(adamw), zero(stage), accumulate_grad_batches=2, callbacks=[counts])
        assert counts.seen == [(0, 0), (1, 1), (1, 1), (2, 2), (3, 3)], (stage, counts.seen)


def test_the_optimizers_step_count_is_the_global_step():
    run_ranks(step_counts, 2)


class Normed(Net):
    """Writes down the norm of the gradients before clipping."""

    def __init__(self, optimize: Any = None) -> None:
        super().__init__(optimize)
        self.said: list[float] = []
        self.previous: float | None = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.said.append(dsl.grad_norms(self)["grad_2.0_norm_total"])
        self.previous = self.said[-1]

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, dsl.ZeroStrategy) and self.previous is not None:
            assert isinstance(strategy.last_grad_norm, float)
            assert_alike(strategy.last_grad_norm, self.previous, "last_grad_norm")


class ClippedTwice(Normed):
    """Clips by value and then by norm, in a hook of its own."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.trainer.precision_plugin.clip_gradients(optimizer, 0.05, pl.utilities.GradClipAlgorithmType.VALUE)
        self.trainer.precision_plugin.clip_gradients(optimizer, 0.05, pl.utilities.GradClipAlgorithmType.NORM)
        self.trainer.precision_plugin.clip_gradients(optimizer, 0.01, pl.utilities.GradClipAlgorithmType.NORM)


class ClippedLate(Normed):
    """Clips from the second epoch on, with its own value."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.current_epoch:
            self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (functools.partial(Normed, plain_sgd), {}),
        (functools.partial(Normed, quick_sgd), {"gradient_clip_val": 0.01}),
        (functools.partial(Normed, plain_sgd), {"gradient_clip_val": 1e6}),
        (functools.partial(Normed, quick_sgd), {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}),
        (functools.partial(Normed, plain_sgd), {"gradient_clip_val": 0.03, "gradient_clip_algorithm": "value"}),
        (functools.partial(ClippedTwice, quick_sgd), {}),
        (functools.partial(ClippedLate, plain_sgd), {"max_epochs": 2}),
    ],
    ids=["none", "norm", "norm above", "norm in windows", "value", "both, in the hook", "late, in the hook"],
)
def test_gradients_are_clipped_as_under_ddp_and_the_norm_before_is_reported(make, arguments):
    run_ranks(parity, 2, make, **arguments)


class Groups(Net):
    """Three groups with settings of their own; one of them rests."""

    def __init__(self) -> None:
        super().__init__(grouped)


def grouped(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": list(module.embed.parameters()), "lr": 0.0},
            {"params": list(module.blocks.parameters()), "lr": 0.02, "weight_decay": 0.5},
            {"params": [*module.head.parameters(), module.gain], "lr": 0.01, "weight_decay": 0.0},
        ]
    )


@pytest.mark.parametrize("config", [None, {"zero_optimization": {"sub_group_size": 40}}], ids=["default", "sub-groups"])
def test_each_group_keeps_its_own_settings(config):
    run_ranks(parity, 2, Groups, config=config, max_epochs=2)


class Norms(Net):
    """Writes down all gradient norms, in both places where users log them."""

    def __init__(self, norm_type: float) -> None:
        super().__init__(adamw)
        self.norm_type = norm_type
        self.said: list[dict[str, float]] = []

    def _note(self) -> None:
        if isinstance(self.trainer.strategy, dsl.ZeroStrategy):
            self.said.append(dsl.grad_norms(self, self.norm_type))
            part = dsl.grad_norms(self.head, self.norm_type)
        else:
            self.said.append(grad_norm(self, self.norm_type))
            part = grad_norm(self.head, self.norm_type)
        self.said.append(part)
        self.said[-2] = {key: float(value) for key, value in self.said[-2].items()}
        self.said[-1] = {key: float(value) for key, value in self.said[-1].items()}

    def on_after_backward(self) -> None:
        self._note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note()


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
def test_grad_norms_are_those_of_lightning_under_ddp(norm_type):
    run_ranks(parity, 2, functools.partial(Norms, norm_type), gradient_clip_val=0.1)


class ZeroGrad(Net):
    """Zeroes gradients its own way."""

    def __init__(self, set_to_none: bool) -> None:
        super().__init__(adamw)
        self.set_to_none = set_to_none

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_works_with_and_without_set_to_none(set_to_none):
    run_ranks(parity, 2, functools.partial(ZeroGrad, set_to_none), accumulate_grad_batches=2)


# Modules -------------------------------------------------------------------------------------------------------------


class Noisy(Net):
    """Batch norm, dropout and buffers that the forward changes, alike or not on different ranks."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.blocks = nn.Sequential(
            nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 7), nn.BatchNorm1d(7)
        )
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.mean()
        return self.head(self.blocks(self.embed(x))) * self.gain + self.offset + 0.01 * self.seen.sum()


def test_batch_norm_dropout_buffers_and_direct_parameters_follow_ddp():
    run_ranks(parity, 2, Noisy, max_epochs=4, loader=functools.partial(data, 48, 4), tolerance=5e-6)


class Frozen(Net):
    """Half of the layers need no gradient."""

    def __init__(self, in_optimizer: bool) -> None:
        super().__init__(adamw if in_optimizer else trainable_only)
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


def trainable_only(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_frozen_parameters_rest_in_an_optimizer_or_outside(in_optimizer):
    run_ranks(parity, 2, functools.partial(Frozen, in_optimizer))


class Regularized(Net):
    """Its loss looks at weights outside their modules' forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.1 * self.blocks[1].up.weight.norm() + 0.1 * self.head.weight.abs().sum()


class Tied(Net):
    """The head is the embedding, transposed."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.embed = nn.Linear(common.FEATURES, 7, bias=False)
        self.back = nn.Linear(7, common.FEATURES, bias=False)
        self.copy = nn.Linear(common.FEATURES, 7, bias=False)
        self.copy.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        return self.head(self.copy(self.back(x)))


class Images(Net):
    """Convolutions in channels-last order, whose gradients are not contiguous."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.convs = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 5, 1))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, None, :, None].expand(-1, -1, -1, 5).contiguous(memory_format=torch.channels_last)
        return super().forward(self.convs(image).mean((1, 2)))


class Recomputed(Net):
    """Activation checkpointing of the second block, called twice."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(adamw)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        for _ in range(1 if self.use_reentrant else 2):
            x = checkpoint(self.blocks[1], x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Recurrent(Net):
    """A recurrent layer and an embedding table."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.table = nn.Embedding(11, 4)
        self.rnn = nn.GRU(4, 7, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.rnn(self.table((x * 2).long() % 11))
        return self.head(state[0]) * self.gain


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (functools.partial(Regularized, plain_sgd), "ddp"),
        (Tied, UNUSED),
        (Images, "ddp"),
        (functools.partial(Recomputed, False), UNUSED),
        (functools.partial(Recomputed, True), "single"),
        (Recurrent, UNUSED),
    ],
    ids=["weights in the loss", "tied", "channels last", "recomputed", "recomputed, reentrant", "recurrent"],
)
def test_unusual_modules_train_as_under_ddp(make, reference):
    if reference == "single":  # DDP does not support this; the same module without checkpointing does
        run_ranks(as_without_checkpointing, 2)
        return
    run_ranks(parity, 2, make, reference=reference)


def as_without_checkpointing() -> None:
    expected = run(Once, UNUSED)
    for stage in common.STAGES:
        found = run(functools.partial(Recomputed, True), stage)
        assert_same(found["weights"], expected["weights"], f"stage {stage}")


class Once(Recomputed):
    """The same without checkpointing."""

    def __init__(self) -> None:
        super().__init__(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))


def test_detect_anomaly_is_allowed():
    run_ranks(parity, 2, functools.partial(Net, adamw), detect_anomaly=True, accumulate_grad_batches=2)


class Skipping(Net):
    """A closure of its own: calls it, then steps without one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Warming(Net):
    """Sets the learning rate by hand before the step, as Lightning's manual describes."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 4) * 0.1


@pytest.mark.parametrize("make", [Skipping, Warming])
def test_an_optimizer_step_of_the_user_works(make):
    run_ranks(parity, 2, make, accumulate_grad_batches=2)


# Compilation ---------------------------------------------------------------------------------------------------------


class CompiledPart(Net):
    """A compiled sub-module: parameter names say so."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")


def compiled() -> None:
    expected = run(functools.partial(Net, adamw), "ddp")["weights"]
    for stage in common.STAGES:
        module = Net(adamw)
        torch.manual_seed(11 + dist.get_rank())
        fit(torch.compile(module, backend="eager"), zero(stage))
        assert_same(weights(module), expected, f"compiled whole, stage {stage}")
        found = run(CompiledPart, stage)["weights"]
        plain = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
        assert plain.keys() != found.keys()
        assert_same(plain, expected, f"compiled in part, stage {stage}")


def test_compiled_modules_train_as_plain_ones():
    run_ranks(compiled, 2, timeout=100)


# Data ----------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Without a length; every rank reads its own half."""

    def __iter__(self) -> Any:
        x, y = data().dataset.tensors
        yield from zip(x[dist.get_rank() :: 2], y[dist.get_rank() :: 2], strict=True)


class Batches(IterableDataset):
    """Makes batches itself."""

    def __iter__(self) -> Any:
        x, y = data().dataset.tensors
        for start in range(dist.get_rank() * 2, 20, 4):
            yield x[start : start + 2], y[start : start + 2]


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "plain": data,
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "batch_size=None": lambda: DataLoader(Batches(), batch_size=None),
    "batch_sampler": lambda: DataLoader(
        data().dataset, batch_sampler=BatchSampler(SequentialSampler(data().dataset), 2, True)
    ),
    "two of them": lambda: {"a": data(), "b": data(10, 1)},
    "drop_last": lambda: DataLoader(TensorDataset(*data().dataset.tensors), batch_size=3, drop_last=True),
}


class Counted(Net):
    """Counts how often its loader is asked for."""

    def __init__(self, loader: str) -> None:
        super().__init__(adamw)
        self.loader = loader
        self.said = {"train_dataloader": 0}

    def train_dataloader(self) -> Any:
        self.said["train_dataloader"] += 1
        return LOADERS[self.loader]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            return self.loss(batch["a"]) + self.loss(batch["b"])
        return self.loss(batch)


def train_by_own_loader(loader: str) -> None:
    arguments = {
        "use_distributed_sampler": loader != "batch_sampler",
        "loader": lambda: None,
        "accumulate_grad_batches": 2,
    }
    expected = run_own(Counted(loader), "ddp", **arguments)
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    for stage in (0, 3):
        for chosen in (None, config):
            found = run_own(Counted(loader), zero(stage, chosen), **arguments)
            assert_same(found[0], expected[0], f"stage {stage}")
            assert found[1] == expected[1] == {"train_dataloader": 1}


def run_own(module: Any, strategy: Any, **arguments: Any) -> Any:
    arguments.pop("loader")
    trainer = common.make_trainer(strategy, **arguments)
    trainer.fit(module)
    return weights(module), module.said


@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_of_every_kind_work_and_are_made_once(loader):
    run_ranks(train_by_own_loader, 2, loader)
