"""What the Lightning tests share: a Trainer inside the ranks of `tests.pool`, small models, and how to compare runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ds_lightning as dsl
from tests.lightning.runs import PoolEnvironment

STAGES = (0, 1, 2, 3)
SAMPLES = 20
FEATURES = 5

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def gathering(config: Mapping[str, Any] | None = None, threshold: int = 0) -> dict[str, Any]:
    """A configuration in which stage 3 really releases small parameters."""
    zero = {"stage3_param_persistence_threshold": threshold}
    found = dict(config or {})
    found["zero_optimization"] = {**zero, **found.get("zero_optimization", {})}
    return found


def zero(stage: int, config: Mapping[str, Any] | None = None, **arguments: Any) -> dsl.ZeroStrategy:
    """A strategy of this stage whose small parameters are gathered as large ones are."""
    return dsl.ZeroStrategy(stage=stage, config=gathering(config), **arguments)


def strategy_of(kind: int | str, config: Mapping[str, Any] | None = None) -> Any:
    """A stage's strategy, or a reference of Lightning's by name."""
    return zero(kind, config) if isinstance(kind, int) else kind


def make_trainer(strategy: Any, plugins: Sequence[Any] = (), **arguments: Any) -> pl.Trainer:
    """A Trainer of all ranks of the pool, that writes and prints nothing."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.Trainer(strategy=strategy, plugins=[PoolEnvironment(), *plugins], **{**settings, **arguments})


def fit(module: pl.LightningModule, strategy: Any, loader: Any = None, **arguments: Any) -> pl.Trainer:
    """Fit, and return the Trainer."""
    trainer = make_trainer(strategy, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data() if loader is None else loader)
    return trainer


def data(samples: int = SAMPLES, batch_size: int = 2, features: int = FEATURES) -> DataLoader:
    """The same regression data on every rank; Lightning splits it."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, features, generator=generator)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


class Block(nn.Module):
    """A residual block of odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Blocks, a head, and a parameter and a buffer of its own; the same weights for the same seed.

    Args:
        optimize: makes what `configure_optimizers` returns, from the module.
    """

    def __init__(self, optimize: Callable[[Any], Any] | None = None, width: int = 7, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("offset", torch.tensor([0.25]))
        self.optimize = optimize or sgd

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain + self.offset

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).to(y.dtype), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.optimize(self)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Scale-sensitive: a gradient of the wrong size shows at once."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Full master values of all parameters, and buffers. Collective."""
    found = {name: dsl.full_param(parameter).double() for name, parameter in module.named_parameters()}
    return found | {name: buffer.detach().clone().double() for name, buffer in module.named_buffers()}


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two sets of weights, relative to the second's norm."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    difference = sum(float((left[name] - right[name]).square().sum()) for name in right)
    return (difference / sum(float(value.square().sum()) for value in right.values())) ** 0.5


def assert_same(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], what: str = "", tolerance: float = 1e-6
) -> None:
    """Equal as far as the order of fp32 sums allows (the tolerance of the parity matrix)."""
    found = distance(left, right)
    worst = max(right, key=lambda name: float((left[name] - right[name]).abs().max()) if right[name].numel() else 0.0)
    assert found <= tolerance, f"{what}: distance {found:.3g}, worst in {worst}: {left[worst]} {right[worst]}"
    assert all(value.isfinite().all() for value in right.values()), f"{what}: the reference is not finite"


def assert_moved(module: nn.Module, before: Mapping[str, Tensor], names: Sequence[str] | None = None) -> None:
    """These weights are not what they were."""
    after = weights(module)
    for name in names if names is not None else before:
        assert not torch.equal(after[name], before[name]), f"{name} did not move"


def run(
    make: Callable[[], pl.LightningModule], kind: int | str, config: Any = None, **arguments: Any
) -> dict[str, Any]:
    """Train a new module; its weights, and whatever it wrote into `module.said`. `callbacks` is a function."""
    dist.barrier()
    torch.manual_seed(11 + dist.get_rank())
    callbacks = arguments.pop("callbacks", list)
    loader = arguments.pop("loader", data)
    module = make()
    trainer = fit(module, strategy_of(kind, config), loader(), callbacks=callbacks(), **arguments)
    return {
        "weights": weights(module),
        "said": getattr(module, "said", None),
        "steps": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }


def parity(
    make: Callable[[], pl.LightningModule],
    reference: str = "ddp",
    stages: Sequence[int] = STAGES,
    config: Any = None,
    tolerance: float = 1e-6,
    **arguments: Any,
) -> dict[str, Any]:
    """Every stage does what the reference does, in each rank. Returns what the reference did."""
    before = weights(make())
    expected = run(make, reference, **arguments)
    assert distance(expected["weights"], before) > 1e-3, "the reference hardly trained"
    for stage in stages:
        found = run(make, stage, config, **arguments)
        what = f"stage {stage}"
        assert_same(found["weights"], expected["weights"], what, tolerance)
        assert found["steps"] == expected["steps"], what
        assert found["lr"] == expected["lr"], what
        assert_alike(found["said"], expected["said"], what)
        assert_alike(found["metrics"], expected["metrics"], what)
    return expected


def assert_alike(left: Any, right: Any, what: str = "", tolerance: float = 1e-5) -> None:
    """Equal containers; floats equal up to rounding."""
    if isinstance(right, float):
        assert isinstance(left, float), (what, left, right)
        close = left == right or abs(left - right) <= tolerance * max(abs(left), abs(right))
        assert close or (left != left and right != right), f"{what}: {left} is not {right}"
    elif isinstance(right, Mapping):
        assert list(left) == list(right), f"{what}: {list(left)} are not {list(right)}"
        for key in right:
            assert_alike(left[key], right[key], f"{what} {key}", tolerance)
    elif isinstance(right, list | tuple):
        assert len(left) == len(right), f"{what}: {left} is not {right}"
        for place, (mine, theirs) in enumerate(zip(left, right, strict=True)):
            assert_alike(mine, theirs, f"{what}[{place}]", tolerance)
    else:
        assert left == right, f"{what}: {left} is not {right}"
