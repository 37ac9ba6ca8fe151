"""Steps on units whose states do not live on the device: unit by unit, tile by tile, where the states are.

[Note: a step in parts] An optimizer's `step` knows nothing of tiles. It runs once for each, with groups that hold what
is in memory just then; what torch and Lightning hang around a step runs once. While a tile steps, the next one is read
and the last one written (`pipeline_read`, `pipeline_write`), and the parameters of units that are done already travel
to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ds_lightning.comm.collectives import Pending
from ds_lightning.offload.homes import Homes, UnitHome
from ds_lightning.offload.swap import BufferPool
from ds_lightning.offload.tiles import GRADIENT, MASTER, SHARD
from ds_lightning.ops.aio import Transfer
from ds_lightning.ops.blocks import Blocks
from ds_lightning.optim.elementwise import plain_step
from ds_lightning.optim.narrow import NarrowMasters
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.parts import Parts
from ds_lightning.optim.sharded import Run, ShardedOptimizer
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.residency import ResidencyManager


@dataclass(slots=True)
class _Tile:
    """What is stepped on at once, of one unit.

    Attributes:
        gradients: of the unit.
        number: of the tile in the unit's file; 0 where nothing is on disk.
        runs: in the tile, with a gradient.
        buffer: staging buffer, once it is being read.
        reads: transfers into it.
    """

    gradients: UnitGradients
    number: int
    runs: list[Run]
    buffer: torch.Tensor | None = None
    reads: list[Transfer] = field(default_factory=list)

    @property
    def home(self) -> UnitHome:
        assert self.gradients.home is not None
        return self.gradients.home


class StepsApart:
    """Runs optimizers on offloaded units.

    Args:
        homes: where units live.
        residency: publishes what was stepped on.
        narrow: steps on masters of 16 bits; None where there are none.

    Attributes:
        take: gives runs of one unit a step that is done already, and says whether it did.
    """

    def __init__(self, homes: Homes, residency: ResidencyManager, narrow: NarrowMasters | None = None) -> None:
        self.take: Callable[[Sequence[Run]], bool] = _never
        self._homes = homes
        self._residency = residency
        self._narrow = narrow

    def step(self, sharded: ShardedOptimizer, runs: Sequence[Run], publishing: list[Pending]) -> None:
        """Step on `runs` and begin to publish their units. Collective; in a step of `sharded`.

        Args:
            sharded: the optimizer.
            runs: what it steps on.
            publishing: gets what is to be waited for before parameters are used, also where a step fails.
        """
        tiles = list(_tiles(runs))
        try:
            self._step_all(sharded, tiles, publishing)
        except BaseException:
            for tile in tiles:
                if tile.buffer is not None:
                    tile.buffer = None
                    self._records.lose()
            raise

    def _step_all(self, sharded: ShardedOptimizer, tiles: Sequence[_Tile], publishing: list[Pending]) -> None:
        touched = set(sharded.touched_units())
        units = [g for g in sharded.units if g.home is not None and g.home.steps_apart and g.unit.index in touched]
        step = plain_step(sharded.optimizer)
        policy = self._homes.policy
        with torch.no_grad():
            place = 0
            for gradients in sorted(units, key=lambda g: g.unit.index):
                while place < len(tiles) and tiles[place].gradients is gradients:
                    tile = tiles[place]
                    self._begin(tile, sharded)
                    if policy.pipeline_read and place + 1 < len(tiles):
                        self._begin(tiles[place + 1], sharded)
                    writes = self._step(tile, sharded, step)
                    if not policy.pipeline_write:
                        for transfer in writes:
                            transfer.wait()
                    place += 1
                publishing += self._residency.publish(gradients.unit.index, copied=True)
            sharded.show(sharded.near)

    @property
    def _records(self) -> BufferPool:
        assert self._homes.space is not None
        return self._homes.space.records

    def _begin(self, tile: _Tile, sharded: ShardedOptimizer) -> None:
        """Begin to read a tile, if it is on disk and nobody has begun yet."""
        swap = tile.home.swap
        if swap is None or tile.buffer is not None:
            return
        tile.buffer = self._records.take()
        keys = list(swap.layout.regions)
        known = tile.number in swap.stateful  # states of any run, also of those that do not step now
        last = keys[-1] if known else MASTER if MASTER in keys else GRADIENT
        tile.reads = swap.start_read_tile(tile.number, tile.buffer, last)

    def _step(self, tile: _Tile, sharded: ShardedOptimizer, step: Callable[[], object]) -> list[Transfer]:
        """Step on one tile; returns the writes under way."""
        home = tile.home
        if home.swap is None:
            if self.take(tile.runs):
                copy_out(tile.runs)
                return []
            runs = self._step_narrow(tile.runs, sharded)
            if not runs:
                return []
            sharded.attach(runs)
            sharded.show(runs)
            copied = prepare(sharded, runs)
            step()
            if not copied:
                copy_out(runs)
            for run in runs:
                run.parameter.grad = None
            return []
        for transfer in tile.reads:
            transfer.wait()
        assert tile.buffer is not None
        try:
            factor = self._stage_in(tile, sharded)
            sharded.show(tile.runs)
            copied = prepare(sharded, tile.runs, factor)
            step()
            if not copied:
                copy_out(tile.runs)
            writes = self._stage_out(tile, sharded)
        except BaseException:
            self._forget(tile, sharded)
            raise
        self._records.give(tile.buffer, writes)
        tile.buffer = None
        return writes

    def _step_narrow(self, runs: Sequence[Run], sharded: ShardedOptimizer) -> list[Run]:
        """Step on those whose masters have 16 bits; returns the others."""
        narrow = [] if self._narrow is None else self._narrow.chosen(runs)
        if self._narrow is not None:
            self._narrow.step(sharded, narrow)
        copy_out(narrow)
        return [run for run in runs if run not in narrow]

    def _stage_in(self, tile: _Tile, sharded: ShardedOptimizer) -> float:
        """Parameters, gradients and states of the runs become views of the staging buffer.

        Returns:
            A factor by which gradients are still to be multiplied.
        """
        swap, buffer = tile.home.swap, tile.buffer
        assert swap is not None
        assert buffer is not None
        buffers = tile.gradients.buffers
        first = buffers.start + swap.layout.span(tile.number)[0]
        views = {key: swap.view(buffer, tile.number, key) for key in swap.layout.regions}
        on_disk = tile.gradients.on_disk
        assert on_disk is not None
        factor = on_disk.factor(first, first + views[GRADIENT].numel())
        if factor is None or not isinstance(sharded.optimizer, NativeOptimizer):
            on_disk.apply(views[GRADIENT], first)
            factor = 1.0
        for run in tile.runs:
            part = slice(run.start - first, run.stop - first)
            if MASTER in views:
                run.parameter.data = views[MASTER][part]
            run.parameter.grad = views[GRADIENT][part]
            if run.stored:
                sharded.optimizer.state[run.parameter].update({key: views[key][part] for key in run.stored})
        return factor

    def _stage_out(self, tile: _Tile, sharded: ShardedOptimizer) -> list[Transfer]:
        """Write what has changed."""
        home, swap, buffer = tile.home, tile.home.swap, tile.buffer
        assert swap is not None
        assert buffer is not None
        start = swap.layout.span(tile.number)[0]
        first = tile.gradients.buffers.start + start
        kept: list[tuple[Run, tuple[str, ...]]] = []
        for run in tile.runs:
            state = sharded.optimizer.state.get(run.parameter, {})
            stored = []
            for key in [key for key in swap.layout.regions if key in state]:
                view = swap.view(buffer, tile.number, key)[run.start - first : run.stop - first]
                value = state.pop(key)
                if value.data_ptr() != view.data_ptr():  # made in this step
                    view.copy_(value.view(-1))
                stored.append(key)
            kept.append((run, tuple(stored)))
        self._let_go(tile)
        writes = []
        if home.shard_on_disk:
            copy = swap.shard_view(buffer, tile.number).copy_(swap.view(buffer, tile.number, MASTER))
            writes += swap.start_write(SHARD, start, copy)
        changed = [key for key in swap.layout.regions if key != GRADIENT]
        if changed:
            writes += swap.start_write_tile(tile.number, buffer, changed[0])
        for run, keys in kept:
            run.stored = keys
        return writes

    def _let_go(self, tile: _Tile) -> None:
        """Nothing points into the staging buffer any more."""
        for run in tile.runs:
            run.parameter.grad = None
            if tile.gradients.buffers.on_disk:
                run.parameter.data = run.parameter.new_empty(0)

    def _forget(self, tile: _Tile, sharded: ShardedOptimizer) -> None:
        """A step has failed: what is on disk holds."""
        for run in tile.runs:
            state = sharded.optimizer.state.get(run.parameter, {})
            for key in run.stored:
                state.pop(key, None)
        self._let_go(tile)


def _never(runs: Sequence[Run]) -> bool:
    return False


def copy_out(runs: Sequence[Run]) -> None:
    """New values go where parameters are, in their dtype."""
    with torch.no_grad():
        for run in runs:
            target = run.published
            if target is not None:
                target.copy_(run.parameter.view(-1), non_blocking=True)


def prepare(sharded: ShardedOptimizer, runs: Sequence[Run], factor: float = 1.0, parts: Parts | None = None) -> bool:
    """Let a native optimizer do more in its pass over memory, in the step that comes.

    Args:
        sharded: the optimizer.
        runs: that it will step on.
        factor: of gradients.
        parts: which parameters lie in the runs, for optimizers that look at whole ones.

    Returns:
        Whether it puts new values where parameters are.
    """
    optimizer = sharded.optimizer
    if not isinstance(optimizer, NativeOptimizer):
        return False
    copies: dict[torch.Tensor, torch.Tensor] = {}
    copies.update({run.parameter: target for run in runs if (target := run.published) is not None})
    gradients: dict[torch.Tensor, torch.Tensor] = {run.parameter: run.gradient for run in runs if run.foreign}
    near = all(target.device == p.device and target.itemsize == 2 for p, target in copies.items())
    blocks: dict[torch.Tensor, Blocks] = {}
    if optimizer.codec is not None:
        blocks.update({run.parameter: run.blocks for run in runs if run.blocks is not None})
    optimizer.prepare_step(
        grad_scale=factor, copies=copies if near else None, gradients=gradients, blocks=blocks, parts=parts
    )
    return near


def _tiles(runs: Sequence[Run]) -> Iterator[_Tile]:
    """Runs by unit and tile, in order."""

    def key(run: Run) -> tuple[int, int]:
        home = run.gradients.home
        assert home is not None
        number = 0 if home.swap is None else (run.start - run.gradients.buffers.start) // home.swap.layout.tile
        return run.gradients.unit.index, number

    tile: _Tile | None = None
    for run in sorted(runs, key=lambda run: (*key(run), run.start)):
        number = key(run)[1]
        if tile is None or tile.gradients is not run.gradients or tile.number != number:
            if tile is not None:
                yield tile
            tile = _Tile(run.gradients, number, [])
        tile.runs.append(run)
    if tile is not None:
        yield tile
