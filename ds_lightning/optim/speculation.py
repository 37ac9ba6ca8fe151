"""Steps on the host that begin while backward goes on (SuperOffload, arXiv:2509.21271).

[Note: speculation] As soon as a unit's last gradient of a step is in host memory, one worker thread computes the step
that comes, before anybody knows whether gradients overflow, are clipped or are changed by a hook. It guesses that
nothing of this happens. It only reads what is trained: results go to spare memory, so there is nothing to undo, and
nobody can see a value that does not hold. At `optimizer.step` a guess stands if everything that it read is what the
step would read: the same tensors, in the same versions, and equal hyper-parameters. Then the unit takes the results,
and what it had before becomes the spare memory; no value is copied but those of parameters that compute elsewhere or in
16 bits. Otherwise the unit steps as it does without speculation.

What is written in place counts a tensor's version up, so a write that races with the worker spoils only a guess that is
not taken. Writes through `.data` do not count, as they do not for autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor

from ds_lightning.errors import DsLightningError, TopologyError
from ds_lightning.offload.policy import OffloadPolicy
from ds_lightning.optim.native import NativeOptimizer, Slices
from ds_lightning.optim.sharded import Run, ShardedOptimizer, per_element
from ds_lightning.zero.gradients import UnitGradients

ON = "zero_optimization.offload_optimizer.super_offload"

States = list[dict[str, Any]]
"""The states of runs, in their order."""


@dataclass(slots=True)
class _Spare:
    """Memory for the results of one unit.

    Attributes:
        master: for master values, `[chunk]`.
        states: for states with one value per element.
    """

    master: Tensor
    states: States


@dataclass(slots=True)
class _Guess:
    """One unit's step, under way or done.

    Attributes:
        gradients: of the unit.
        runs: all runs of the unit.
        groups: the hyper-parameters, by index of the group.
        factor: of gradients.
        read: everything it reads.
        versions: of `read`, at its start.
        done: the states after it; the master values are in the spare memory.
    """

    gradients: UnitGradients
    runs: list[Run]
    groups: dict[int, dict[str, Any]]
    factor: float
    read: list[Tensor]
    versions: list[int]
    done: Future[States]


class Speculation:
    """Owns the worker, what it computes, and the spare memory for that.

    Args:
        sharded: the optimizer, for which `obstacle` finds nothing.
        units: how many units have spare memory, each as much as its master values and moments; others step as they do
            without speculation. Those whose gradients arrive first have it.
        cores: share of torch's threads for the worker, of `(0, 1]`.
        timeout: seconds to wait for the worker.

    Attributes:
        factor: of gradients in the next steps, as far as it is known during backward: one over the loss scale.
        stood: guesses that were taken.
        undone: guesses that were not.
    """

    def __init__(self, sharded: ShardedOptimizer, units: int, cores: float, timeout: float) -> None:
        self.factor = 1.0
        self.stood = 0
        self.undone = 0
        self._sharded = sharded
        self._optimizer = cast(NativeOptimizer, sharded.optimizer)
        self._units = units
        self._cores = cores
        self._timeout = timeout
        self._guesses: dict[int, _Guess] = {}
        self._spares: dict[int, _Spare] = {}
        self._partial: set[int] = set()  # units of which some parameters had no gradient in the last step
        self._known: list[Run] = []  # the runs that `_by_unit` was made of
        self._by_unit: dict[int, list[Run]] = {}
        self._worker: ThreadPoolExecutor | None = None

    @staticmethod
    def obstacle(optimizers: Sequence[ShardedOptimizer], narrow: bool) -> str:
        """Why these optimizers cannot step early; nothing if they can.

        Args:
            optimizers: of a model.
            narrow: whether master values have 16 bits.
        """
        if narrow:
            return "master values have 16 bits"
        if len(optimizers) != 1:
            return f"there are {len(optimizers)} optimizers"
        optimizer, kind = optimizers[0].optimizer, type(optimizers[0].optimizer)
        name = kind.__name__
        if not isinstance(optimizer, NativeOptimizer):
            return f"{name} is not an optimizer of ds_lightning.optim"
        if not optimizers[0].elementwise or optimizers[0].in_parts or optimizer.codec is not None:
            return f"{name} does not treat each element by itself, or encodes its states"
        for method in ("step", "_step_groups"):
            if unwrap(getattr(kind, method)) is not unwrap(getattr(NativeOptimizer, method)):
                return f"{name} has a step of its own"
        return ""

    @staticmethod
    def serves(gradients: UnitGradients) -> bool:
        """Whether a unit's step can begin early: it is done on the host, on values that do not compute just then."""
        home = gradients.home
        if home is None or not home.steps_apart or home.swap is not None or gradients.whole:
            return False
        return not gradients.buffers.aliased and gradients.kept == gradients.unit.master_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of spare memory."""
        return sum(
            spare.master.nbytes + sum(value.nbytes for state in spare.states for value in state.values())
            for spare in self._spares.values()
        )

    # Backward -------------------------------------------------------------------------------------------------------

    def landed(self, gradients: UnitGradients) -> None:
        """A unit's reduced gradient is, or on a GPU will soon be, in host memory: begin its step."""
        index = gradients.unit.index
        self._drop(index)
        if index in self._partial or gradients.apart or not self.serves(gradients):
            return
        if index not in self._spares and len(self._spares) >= self._units:
            return
        runs = self._runs_of(gradients)
        if not runs or not all(self._optimizer.state.get(run.parameter) for run in runs):
            return  # the first step makes the states
        read = self._reads(gradients, runs)
        groups = {run.group: _hyper_parameters(self._optimizer.param_groups[run.group]) for run in runs}
        versions = [tensor._version for tensor in read]
        states = [dict(self._optimizer.state[run.parameter]) for run in runs]
        views = [run.gradient for run in runs]
        event = None
        if gradients.buffers.full.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(gradients.buffers.full.device))
        spare, factor = self._spare(gradients, runs, states), self.factor

        def work() -> States:
            if event is not None:
                event.synchronize()
            return self._compute(gradients, runs, states, views, groups, factor, spare)

        done = self._start().submit(work)
        self._guesses[index] = _Guess(gradients, runs, groups, factor, read, versions, done)

    def _start(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "ds_lightning.speculation")
            here = torch.get_num_threads()
            self._worker.submit(torch.set_num_threads, max(int(here * self._cores), 1)).result(self._timeout)
            torch.set_num_threads(here)  # the number is the thread's own, but also that of threads which come later
        return self._worker

    def _runs_of(self, gradients: UnitGradients) -> list[Run]:
        if self._known is not self._sharded.runs:
            self._known, self._by_unit = self._sharded.runs, {}
            for run in self._known:
                self._by_unit.setdefault(run.gradients.unit.index, []).append(run)
        return self._by_unit.get(gradients.unit.index, [])

    def _reads(self, gradients: UnitGradients, runs: Sequence[Run]) -> list[Tensor]:
        """Everything that a step on these runs reads."""
        found = [gradients.buffers.master] if gradients.grad is None else [gradients.grad, gradients.buffers.master]
        for run in runs:
            state = self._optimizer.state.get(run.parameter, {})
            found += [value for value in state.values() if torch.is_tensor(value)]
        return found

    def _spare(self, gradients: UnitGradients, runs: Sequence[Run], states: Sequence[Mapping[str, Any]]) -> _Spare:
        """The spare memory of a unit, made where there is none, or where states have come, gone or changed."""
        index, master = gradients.unit.index, gradients.buffers.master
        spare = self._spares.get(index)
        if spare is None:
            assert gradients.home is not None
            spare = self._spares[index] = _Spare(gradients.home.tensor(master.numel(), master.dtype), [])
        wanted = [_of_elements(run, state) for run, state in zip(runs, states, strict=True)]
        if [_outline(state) for state in spare.states] != [_outline(state) for state in wanted]:
            with torch.inference_mode(False):
                spare.states = [{key: torch.empty_like(value) for key, value in state.items()} for state in wanted]
        return spare

    @torch.no_grad()
    def _compute(
        self,
        gradients: UnitGradients,
        runs: Sequence[Run],
        states: Sequence[Mapping[str, Any]],
        views: Sequence[Tensor],
        groups: Mapping[int, dict[str, Any]],
        factor: float,
        spare: _Spare,
    ) -> States:
        """In the worker: the states after a step; the master values after it go to the spare memory."""
        start = gradients.buffers.start
        spare.master.copy_(gradients.buffers.master)
        results: States = []
        for state, memory in zip(states, spare.states, strict=True):
            result = {key: copy.deepcopy(value) for key, value in state.items() if key not in memory}
            result.update({key: target.copy_(state[key]) for key, target in memory.items()})
            results.append(result)
        for index, group in groups.items():
            places = [place for place, run in enumerate(runs) if run.group == index]
            params = [spare.master[runs[k].start - start : runs[k].stop - start] for k in places]
            slices = Slices(params, [views[k] for k in places], [results[k] for k in places], [])
            self._optimizer.step_aside(group, slices, factor)
        return results

    # Step -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def unscaling(self, factor: float) -> Iterator[None]:
        """Gradients are multiplied by `factor` inside. Guesses that did so on the way stand; waits for these."""
        for index, guess in list(self._guesses.items()):
            if guess.factor != factor or not self._same(guess):
                self._drop(index)
            elif guess.done.cancel():
                del self._guesses[index]
            else:
                self._wait(guess)
                guess.factor = 1.0
        yield
        for guess in self._guesses.values():
            guess.versions[0] = guess.read[0]._version

    def take(self, runs: Sequence[Run]) -> bool:
        """In a step: these runs, all that step in a unit, take what was guessed. Does not copy values to parameters.

        Returns:
            Whether they did; otherwise they have not had their step.
        """
        gradients = runs[0].gradients
        index = gradients.unit.index
        whole = {id(run) for run in runs} == {id(run) for run in self._runs_of(gradients)}
        if whole:
            self._partial.discard(index)
        else:
            self._partial.add(index)
        guess = self._guesses.get(index)
        if guess is None:
            return False
        stands = whole and guess.factor == 1.0 and guess.runs == self._runs_of(gradients) and self._same(guess)
        if not stands:
            self._drop(index)
            return False
        del self._guesses[index]
        if guess.done.cancel():
            return False  # it is the turn of others: this thread is quicker
        self._exchange(guess, self._wait(guess))
        self.stood += 1
        return True

    def _same(self, guess: _Guess) -> bool:
        """Whether a step now would read what the guess has read."""
        now = self._reads(guess.gradients, guess.runs)
        if len(now) != len(guess.read) or guess.gradients.apart or not guess.gradients.valid:
            return False
        if any(
            mine is not other or mine._version != version
            for mine, other, version in zip(now, guess.read, guess.versions, strict=True)
        ):
            return False
        groups = self._optimizer.param_groups
        return all(_equal(known, _hyper_parameters(groups[index])) for index, known in guess.groups.items())

    def _wait(self, guess: _Guess) -> States:
        try:
            return guess.done.result(self._timeout)
        except NotDone:
            raise TopologyError(
                f"The early step on {guess.gradients.unit.name} was not done within {self._timeout:g} s. Set {ON} to "
                "false, or raise the timeout."
            ) from None
        except Exception as error:
            raise DsLightningError(
                f"The early step on {guess.gradients.unit.name} failed: {error!r}. Set {ON} to false to step after "
                "backward."
            ) from error

    def _exchange(self, guess: _Guess, results: States) -> None:
        """The unit takes the results; what it had before is spare."""
        buffers, spare = guess.gradients.buffers, self._spares[guess.gradients.unit.index]
        buffers.master, spare.master = spare.master, buffers.master
        for place, (run, result) in enumerate(zip(guess.runs, results, strict=True)):
            run.parameter.data = buffers.master[run.start - buffers.start : run.stop - buffers.start]
            state = self._optimizer.state[run.parameter]
            spare.states[place] = _of_elements(run, state)
            state.update(result)

    # End ------------------------------------------------------------------------------------------------------------

    def _drop(self, index: int) -> None:
        guess = self._guesses.pop(index, None)
        if guess is not None:
            guess.done.cancel()  # if it runs already, nobody comes for its results
            self.undone += 1

    def drop(self) -> None:
        """A step is over, or gradients have gone."""
        for index in list(self._guesses):
            self._drop(index)

    def remove(self, index: int) -> None:
        """A unit is gone."""
        self._drop(index)
        self._spares.pop(index, None)
        self._partial.discard(index)
        self._known = []

    def close(self, wait: bool = True) -> None:
        """End the worker and give the memory back.

        Args:
            wait: until the thread has ended; otherwise it ends with what it does just now.
        """
        self.drop()
        self._units = 0
        self._spares.clear()
        self._known, self._by_unit = [], {}
        if self._worker is not None:
            self._worker.shutdown(wait=wait, cancel_futures=True)
            self._worker = None


def speculation(
    policy: OffloadPolicy,
    optimizers: Sequence[ShardedOptimizer],
    units: Iterable[UnitGradients],
    narrow: bool,
    timeout: float,
    tell: Callable[[str], None] | None,
) -> Speculation | None:
    """What begins steps early, where that is asked for and possible.

    Args:
        policy: says whether and how.
        optimizers: of the model.
        units: of the model, that are trained.
        narrow: whether master values have 16 bits.
        timeout: as in `Speculation`.
        tell: tells the user why it is not possible.
    """
    if not policy.speculative or not optimizers:
        return None
    obstacle = Speculation.obstacle(optimizers, narrow)
    if not obstacle and not any(map(Speculation.serves, units)):
        obstacle = "no unit has master values in host memory that are not the parameters that compute"
    if not obstacle:
        return Speculation(optimizers[0], policy.buffer_count, policy.cores, timeout)
    if tell is not None:
        tell(f"{ON} changes nothing: {obstacle}.")
    return None


def _of_elements(run: Run, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What of the state of a run has one value per element."""
    return {key: value for key, value in state.items() if per_element(value, run.shape)}


def _outline(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (value.shape, value.dtype) for key, value in state.items()}


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        bool(torch.equal(value, right[key]))
        if torch.is_tensor(value) and torch.is_tensor(right[key])
        else type(value) is type(right[key]) and bool(value == right[key])
        for key, value in left.items()
    )
