"""Weights from elsewhere into a module, wherever it is in its life, of which each rank reads what it keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from ds_lightning.checkpoint import keys
from ds_lightning.checkpoint.matching import Match, Rename, match
from ds_lightning.checkpoint.weight_files import open_weights
from ds_lightning.checkpoint.weights import shown
from ds_lightning.comm.agreement import Agreement
from ds_lightning.errors import CheckpointError, ConfigError
from ds_lightning.topology import Topology
from ds_lightning.zero import access
from ds_lightning.zero.init import UnderWay, under_way
from ds_lightning.zero.logical import flat_range, logical, settle

_Local = TypeVar("_Local")
_Report = TypeVar("_Report")
_PIECE = 1 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_pretrained` did.

    Attributes:
        names: of the tensors that were loaded.
        missing: names of the module that the source lacks; they keep their values.
        unexpected: names that the source has for nothing.
        unfit: names of tensors that have another shape or kind in the source; they keep their values.
    """

    names: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unfit: tuple[str, ...]


def load_pretrained(
    module: nn.Module,
    source: str | Path,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    prefix: str | None = None,
    key: str | None = None,
) -> Loaded:
    """Load weights into a module or a part of one. No rank reads more than it keeps, or holds the model whole.

    Inside `configure_model`, after `strategy.setup` (in `on_fit_start`, between epochs, ...) and in a bare process, at
    every stage. In the first two it is collective: call it on every rank; if it fails on one, it raises on all. In
    `LightningModule.setup`, before the strategy has the module, every rank loads by itself.

    Values are converted to the module's dtype on the way; masters get what is stored, not what 16 bit leave of it.
    Tensors that the module ties need one name in the source; of two, the one that the module registers first counts.
    Nothing is unpickled but plain data.

    Args:
        module: what gets the weights.
        source: a folder of Hugging Face's (`model.safetensors`, `pytorch_model.bin`, or several files and their
            index), one of these files, or any checkpoint: a Lightning or torch file, a sharded folder of ours,
            Lightning's or `torch.distributed.checkpoint`'s, or DeepSpeed's.
        strict: names and shapes must fit. Otherwise what fits is loaded, and the rest is told.
        rename: from names in the source to names in the module; None leaves a tensor out. A function, or a table of
            what names begin with: `{"transformer.": "model.", "score.": None}`. Without it models of transformers
            rename as their `from_pretrained` does.
        prefix: what is in front of the module's names in the source, such as "model." for the network in a Lightning
            checkpoint; other names are left out. "" takes names as they are; None finds it: base models and models
            with heads load each other's files, as with `from_pretrained`.
        key: where in a checkpoint the weights are, such as "ema.state_dict"; None: where they usually are.

    Returns:
        What was loaded and what was not; the same on every rank.

    Raises:
        CheckpointError: when the source cannot be read, or does not fit; all that is wrong is named, and nothing has
            changed. Also when a file breaks off later, after the module has changed.
        ConfigError: inside a step, while the module shows other values than those that are trained, or when it is on
            the meta device.
        TopologyError: when some rank does not call it.
    """
    place = _Place.of(module)
    if place.agreement is not None:
        place.agreement.rendezvous("load_pretrained", "Call it on every rank, not only where is_global_zero.")
    with torch.device("cpu"):  # `configure_model` has the device of the run as the default
        matched, digests = place.together(lambda: _open(module, source, strict, rename, prefix, key))
        if len(set(digests)) > 1:
            raise CheckpointError(f"{source} is not the same on all ranks: names, shapes or dtypes of tensors differ.")
        _, told = place.together(lambda: (None, _fill(module, source, strict, matched, place)))
    for line in [*matched.notes, *sorted({line for lines in told for line in lines})]:
        _tell(f"{source}: {line}")
    if not strict:
        for what, names in (("lacks", matched.missing), ("also holds", matched.unexpected)):
            if names:
                _tell(f"{source} {what} {len(names)} of the names of {type(module).__name__}: {shown(names)}")
        for name, reason in matched.unfit.items():
            _tell(f"{source}: {name} is left out: {reason}")
    return Loaded(tuple(matched.values), tuple(matched.missing), tuple(matched.unexpected), tuple(matched.unfit))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module is in its life.

    Attributes:
        agreement: of the ranks that have the module together; None where each has its own.
        loading: `load_state_dict` inside reads what this rank keeps.
        share: this rank's number, and of how many.
    """

    agreement: Agreement | None
    loading: Callable[[], AbstractContextManager[None]]
    share: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, module: nn.Module) -> _Place:
        """Find out."""
        engine = next((e for e in map(access.engine_of, module.parameters()) if e is not None), None)
        if engine is not None:
            if engine.passes.depth or engine.values.showing:
                raise ConfigError(
                    "load_pretrained inside a step, or while the module shows other values (averages). Load between "
                    "steps, outside of `swapped()`."
                )
            return cls(engine.agreement, engine.state_dicts.loading, _share(engine.topology))
        building = under_way()
        if building is not None:
            return cls(Agreement(building.topology), lambda: _into_parts(building), _share(building.topology))
        return cls(None, nullcontext)

    def together(self, work: Callable[[], tuple[_Local, _Report]]) -> tuple[_Local, Sequence[_Report]]:
        """What `work` returns here, and what it reports on each rank. An error on one rank is one on all."""
        result, problem = None, None
        try:
            result = work()
        except Exception as error:  # the others wait to hear of it
            problem = error
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        texts = [text] if self.agreement is None else self.agreement.everyone(text)
        if problem is not None:
            raise problem
        for rank, found in enumerate(texts):
            if found is not None:
                raise CheckpointError(f"Weights could not be loaded on rank {rank}. {found}")
        assert result is not None
        return result[0], [result[1]] if self.agreement is None else self.agreement.everyone(result[1])


def _share(topology: Topology) -> tuple[int, int]:
    return topology.rank, topology.world_size


@contextmanager
def _into_parts(building: UnderWay) -> Iterator[None]:
    """See [Note: loading into parts]."""
    if building.construction is None:
        yield
        return
    building.construction.cut()
    with building.construction.building():
        yield


def _open(
    module: nn.Module, source: str | Path, strict: bool, rename: Rename | None, prefix: str | None, key: str | None
) -> tuple[Match, str]:
    """What there is for a module, and a digest of the source."""
    found = open_weights(source, key, _tell)
    hollow = [name for name, tensor in keys.saved_tensors(module).items() if tensor.is_meta]
    if hollow:
        raise ConfigError(
            f"{shown(hollow)} of {type(module).__name__} are on the meta device, where nothing can be loaded. Make the "
            "module without torch.device('meta'): in configure_model at stage 3 it is cut while it is built."
        )
    result = match(module, found, rename, prefix)
    problems = result.problems()
    if problems and (strict or not result.values):
        shape = "\n  ".join(problems)
        advice = "Give `rename` or `prefix` where names differ, or strict=False to load what fits and keep the rest."
        if not result.values:
            there, here = (shown(sorted(names)) for names in (found, keys.saved_tensors(module)))
            advice = f"No name is in both. There they are {there}; here {here}. Give `rename`, or another source."
        raise CheckpointError(
            f"{source} does not fit {type(module).__name__}; nothing was loaded:\n  {shape}\n{advice}"
        )
    outline = sorted((name, str(value.dtype), *value.shape) for name, value in found.items() if torch.is_tensor(value))
    return result, hashlib.sha256(repr(outline).encode()).hexdigest()


def _fill(module: nn.Module, source: str | Path, strict: bool, matched: Match, place: _Place) -> list[str]:
    """Load, and tell what is odd about the values."""
    own = keys.saved_tensors(module)
    lost: set[str] = set()
    values = {name: _watched(value, own.get(name), name, lost) for name, value in matched.values.items()}
    try:
        with place.loading():
            module.load_state_dict(values, strict=strict and not keys.loads_as_usual(module))
        settle(module)
        told = [
            f"{other} differs from {first}, with which {type(module).__name__} ties it; {first} counts"
            for first, other, value in matched.twins
            if _differ(matched.values[first], value, *place.share)
        ]
    except (CheckpointError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} was not loaded to its end, but some values are in the module: {error}"
        ) from error
    return told + [f"values of {name} are too large for float16 and became infinite" for name in lost]


@dataclass(frozen=True, slots=True)
class _Watched:
    """A tensor that will be float16, and is not yet."""

    inner: torch.Tensor
    name: str
    lost: set[str]

    @property
    def shape(self) -> torch.Size:
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`."""
        values = flat_range(self.inner, start, stop)
        if bool((values.to(torch.float16).isinf() & values.isfinite()).any()):
            self.lost.add(self.name)
        return values


def _watched(value: Any, own: torch.Tensor | None, name: str, lost: set[str]) -> Any:
    narrows = own is not None and own.dtype == torch.float16 and torch.is_tensor(value) and value.dtype != own.dtype
    return logical(_Watched(value, name, lost)) if narrows else value


def _differ(left: torch.Tensor, right: torch.Tensor, rank: int, world_size: int) -> bool:
    """Whether two tensors of one shape differ in this rank's share of them."""
    if left is right:
        return False
    numel = left.numel()
    first, end = numel * rank // world_size, numel * (rank + 1) // world_size
    pieces = ((start, min(start + _PIECE, end)) for start in range(first, end, _PIECE))
    return any(not torch.equal(flat_range(left, *p), flat_range(right, *p).to(left.dtype)) for p in pieces)


def _tell(message: str) -> None:
    rank_zero_info(f"ds_lightning: {message}")
