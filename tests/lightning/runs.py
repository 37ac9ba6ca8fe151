"""Trainers in the ranks of the pool, and a small model with everything a checkpoint must carry."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric

import ds_lightning as dsl
from ds_lightning.precision.loss_scale import LossScaleOptions

WORDS = 13
WIDTH = 6
LENGTH = 5
SHARD_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class PoolEnvironment(ClusterEnvironment):
    """The process group in which the pool has started this rank."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Words(Dataset):
    """Sequences of tokens, the same on every rank and in every run."""

    def __init__(self, size: int = 24, seed: int = 5) -> None:
        self.data = torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(pl.LightningModule):
    """Odd sizes, a tied pair, frozen and unused layers, buffers, a metric, 0-dim and bare parameters, two groups."""

    def __init__(self, optimizer: str = "adamw", seed: int = 1, lr: float = 0.01, optimizers: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.unused = nn.Linear(3, 5)
            self.head = nn.Linear(WIDTH, WORDS)
        with torch.no_grad():  # numbers of 16 bits, so that no precision rounds what is frozen
            self.frozen.weight.mul_(128).round_().div_(128)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.mean_loss = MeanMetric()
        self.mean_loss.persistent(True)
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain) * self.temperature

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1]).float()
        return F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.loss(tokens)
        self.losses.append(loss.item())
        self.seen += 1
        self.mean_loss.update(loss.detach())
        return loss

    def validation_step(self, tokens: torch.Tensor, index: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(tokens), sync_dist=True)

    def test_step(self, tokens: torch.Tensor, index: int) -> None:
        self.log("test_loss", self.loss(tokens), sync_dist=True)

    def predict_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return self(tokens)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        others = [p for p in self.parameters() if p.ndim <= 1 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": self.hparams["lr"] / 2}]
        optimizer = make_optimizer(self.hparams["optimizer"], groups, self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OddState(torch.optim.Optimizer):
    """Element-wise, with states of every kind: tensors, 0-dim tensors, int, float, None, str and a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        velocity=torch.zeros_like(p), count=0, rate=0.5, nothing=None, kind="odd", history=[1, 2]
                    )
                    state["step"] = torch.tensor(0.0)
                state["count"] += 1
                state["step"] += 1
                state["rate"] *= 0.9
                state["velocity"].mul_(state["rate"]).add_(p.grad)
                p.sub_(state["velocity"], alpha=group["lr"])
        return result


def make_optimizer(name: str, groups: Any, lr: float) -> torch.optim.Optimizer:
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=lr),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=lr, initial_accumulator_value=0.1),
        "sgd": lambda: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        "plain-sgd": lambda: torch.optim.SGD(groups, lr=lr),
        "odd": lambda: OddState(groups, lr=lr),
        "lamb": lambda: dsl.optim.Lamb(groups, lr=lr),
        "muon": lambda: dsl.optim.Muon([{**g, "use_muon": not k} for k, g in enumerate(groups)], lr=lr),
    }
    return made[name]()


def zero(stage: int, config: dict[str, Any] | None = None, **options: Any) -> dsl.ZeroStrategy:
    """A strategy that leaves no parameter resident, however small."""
    merged = {**SHARD_EVERYTHING, **(config or {})}
    return dsl.ZeroStrategy(stage=stage, config=merged, **options)


def strategy_of(kind: Any, **options: Any) -> Any:
    """`0` to `3` for the stages, "ddp", or "single" for one device."""
    if kind == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    return "auto" if kind == "single" else zero(kind, **options)


def trainer(kind: Any, precision: str = "32-true", *, steps: int = 2, **options: Any) -> pl.Trainer:
    """A quiet Trainer over all ranks of the pool, or over this process alone for "single"."""
    alone = kind == "single"
    plugins = options.pop("plugins", [])
    given = {} if precision == "16-mixed" else {"precision": precision}
    if precision == "16-mixed":  # Lightning would turn it into bf16 on CPU
        plugins = [*plugins, dsl.ZeroPrecision("16-mixed", LossScaleOptions(initial_scale_power=8))]
    strategy = kind if isinstance(kind, pl.strategies.Strategy) else strategy_of(kind, **options.pop("zero", {}))
    defaults: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=1 if alone else dist.get_world_size(),
        strategy=strategy,
        plugins=plugins if alone else [PoolEnvironment(), *plugins],
        **{**defaults, **given, **options},
    )


def loader(batch: int = 2, size: int = 24, seed: int = 5) -> DataLoader:
    """This rank's part, in order: Lightning's own sampler would shuffle, differently for each world size."""
    words = Words(size, seed)
    if not dist.is_initialized():
        return DataLoader(words, batch)
    return DataLoader(words, batch, sampler=DistributedSampler(words, shuffle=False))


class AtTrainStart(Callback):
    """Calls a function once a run is restored and ready."""

    def __init__(self, call: Callable[[pl.Trainer, pl.LightningModule], Any]) -> None:
        self.call = call
        self.result: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.result = self.call(trainer, pl_module)


@contextmanager
def listening() -> Iterator[list[str]]:
    """What Lightning and we tell on rank 0 meanwhile, whatever other tests have done to the log."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    messages: list[str] = []
    log, handler = rank_zero.log, Keep()
    level, disabled = log.level, log.disabled
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.disabled = False
    try:
        yield messages
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.disabled = disabled


def full_weights(model: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Full values by name, on every rank."""
    return {name: dsl.full_param(p) for name, p in model.named_parameters(remove_duplicate=False)}


def same(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nested values differ; tensors bit by bit."""
    if torch.is_tensor(left) and torch.is_tensor(right):
        equal = left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
        return [] if equal else [f"{path}: {left.dtype} {tuple(left.shape)} {left!r:.80} {right!r:.80}"]
    if isinstance(left, dict) and isinstance(right, dict):
        found = [f"{path}.{key}: only in one" for key in left.keys() ^ right.keys()]
        return found + [
            line for key in left.keys() & right.keys() for line in same(left[key], right[key], f"{path}.{key}")
        ]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return [line for i, (a, b) in enumerate(zip(left, right, strict=True)) for line in same(a, b, f"{path}[{i}]")]
    return [] if left == right and type(left) is type(right) else [f"{path}: {left!r:.80} {right!r:.80}"]


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all weights, relative to their norm."""
    assert left.keys() == right.keys()
    flat = [torch.cat([v.double().reshape(-1) for v in side]) for side in (left.values(), [right[k] for k in left])]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


def short_timeout() -> timedelta:
    """For collectives of runs that are meant to fail."""
    return timedelta(seconds=10)


def everywhere(values: Iterable[Any]) -> Any:
    """The one value that all ranks returned."""
    first, *others = values
    assert all(not same(first, other) for other in others), "ranks differ"
    return first
