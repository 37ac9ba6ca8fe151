"""Random generators: their states at a moment, and named ones for model-parallel regions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ds_lightning.errors import ConfigError

MODEL_PARALLEL = "model-parallel-rng"
"""The generator that differs between ranks of a model-parallel group."""


class RandomStates:
    """States of the CPU's generator, of CUDA devices' and of named ones.

    Args:
        devices: where the code runs that draws; the current CUDA device is always among them.
        tracker: named generators.
    """

    __slots__ = ("_cpu", "_cuda", "_named", "_tracker")

    def __init__(self, devices: Iterable[torch.device], tracker: RandomStateTracker | None = None) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda: dict[int, torch.Tensor] = {}
        if torch.cuda.is_initialized():
            current = torch.cuda.current_device()
            indices = {current} | {current if d.index is None else d.index for d in devices if d.type == "cuda"}
            self._cuda = {index: torch.cuda.get_rng_state(index) for index in sorted(indices)}
        self._tracker = tracker
        self._named = tracker.get_states() if tracker is not None else {}

    def put_back(self) -> None:
        """Let all of them go on from here."""
        torch.set_rng_state(self._cpu)
        for index, state in self._cuda.items():
            torch.cuda.set_rng_state(state, index)
        if self._tracker is not None:
            self._tracker.set_states(self._named)


class RandomStateTracker:
    """Named random generators, of which one at a time takes the place of the device's default.

    Tensor-parallel regions draw dropout masks that differ between ranks, the rest of the model draws equal ones.
    Without CUDA the CPU's generator is meant.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all generators."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of all states by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all states."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Make a generator.

        Raises:
            ConfigError: for a name or a seed that is taken.
        """
        if seed in self._seeds:
            raise ConfigError(f"Seed {seed} belongs to another random generator already; take another one.")
        if name in self._states:
            raise ConfigError(f"There is a random generator '{name}' already; call reset() first.")
        before = _state()
        _seed(seed)
        self._seeds.add(seed)
        self._states[name] = _state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named generator inside.

        Raises:
            ConfigError: when there is none of this name.
        """
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none yet"
            raise ConfigError(f"There is no random generator '{name}' (known: {known}); add(name, seed) makes one.")
        before = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(before)


def seed_device(seed: int) -> None:
    """Seed the default generator of the current CUDA device, without CUDA the CPU's."""
    _seed(seed)


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
