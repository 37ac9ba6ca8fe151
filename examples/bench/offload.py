"""What an optimizer step from disk costs, beside the parts it is made of.

    python examples/bench/offload.py                       # 50 million parameters in 8 units, 7 rounds
    python examples/bench/offload.py --units 4 --numel 1000000 --rounds 3

One rank at stage 3 under AdamW. Contestants take turns in the same process; figures are medians over rounds:

    memory      the step with states in memory
    read        reading every byte that a step from disk reads, tile by tile, and nothing else
    write       writing every byte that it writes
    both        reading and writing at the same time, as a pipelined step does
    sequential  the step from disk without pipelines
    pipelined   with pipeline_read and pipeline_write

A pipelined step can at best take `max(both, memory)`: the last column is how far it is from that.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_lightning as dsl
from ds_lightning.offload.policy import Home, OffloadPolicy
from ds_lightning.offload.tiles import GRADIENT
from ds_lightning.topology import Topology
from ds_lightning.zero.engine import ZeroEngine
from ds_lightning.zero.options import EngineOptions
from ds_lightning.zero.plan import StagePlan

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "native": lambda parameters: dsl.optim.AdamW(parameters, lr=1e-3),
}


class Units(nn.Module):
    """Blocks of equal size whose gradients are easily had."""

    def __init__(self, units: int, numel: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(numel // 1024, 1024, bias=False) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x).sum() for block in self.blocks]).sum()


class Contestant:
    """A model with its engine, and gradients that stay."""

    def __init__(self, arguments: argparse.Namespace, policy: OffloadPolicy | None) -> None:
        torch.manual_seed(0)
        self.module = Units(arguments.units, arguments.numel)
        self.optimizer = OPTIMIZERS[arguments.optimizer](self.module.parameters())
        self.engine = ZeroEngine(
            self.module, [self.optimizer], Topology.single(), StagePlan.of(3), EngineOptions(offload=policy)
        )
        x = torch.randn(1, arguments.numel // 1024) * 1e-3
        with self.engine.passes.step_scope():
            loss = self.module(x)
        with self.engine.passes.backward_scope():
            loss.backward()
        self.step()  # makes the states

    def step(self) -> None:
        self.optimizer.step()


class Transfers:
    """The reads and writes of a step, without the step."""

    def __init__(self, contestant: Contestant) -> None:
        homes = contestant.engine.homes
        assert homes is not None
        assert homes.space is not None
        self._space = homes.space
        self._swaps = [b.home.swap for b in contestant.engine.units.values() if b.home and b.home.swap]
        self.nbytes = sum(swap.layout.tiles * swap.layout.record for swap in self._swaps)

    def run(self, reads: bool, writes: bool) -> None:
        pool = self._space.records
        tiles = [(swap, tile) for swap in self._swaps for tile in range(swap.layout.tiles)]
        ahead: list[Any] = []
        for place, (swap, tile) in enumerate(tiles):
            keys = list(swap.layout.regions)
            first = keys[keys.index(GRADIENT) + 1]
            if not reads:
                buffer = pool.take()
                pool.give(buffer, swap.start_write_tile(tile, buffer, first))
                continue
            for other, number in tiles[place + len(ahead) : place + 2]:
                buffer = pool.take()
                ahead.append((buffer, other.start_read_tile(number, buffer, list(other.layout.regions)[-1])))
            buffer, transfers = ahead.pop(0)
            for transfer in transfers:
                transfer.wait()
            pool.give(buffer, swap.start_write_tile(tile, buffer, first) if writes else None)
        for swap in self._swaps:
            swap.settle()


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    def policy(pipelined: bool) -> OffloadPolicy:
        return OffloadPolicy(
            optimizer=Home.DISK,
            optimizer_path=folder,
            pipeline_read=pipelined,
            pipeline_write=pipelined,
            buffer_count=arguments.buffers,
            aio={"block_size": arguments.block_size, "queue_depth": arguments.queue_depth},
        )

    memory = Contestant(arguments, None)
    sequential = Contestant(arguments, policy(False))
    pipelined = Contestant(arguments, policy(True))
    alone = Transfers(pipelined)
    for left, right in zip(memory.engine.units.values(), pipelined.engine.units.values(), strict=True):
        assert torch.equal(left.read_master(), right.read_master()), "offload changed a result"
    contestants: dict[str, Callable[[], object]] = {
        "memory": memory.step,
        "read": lambda: alone.run(True, False),
        "write": lambda: alone.run(False, True),
        "both": lambda: alone.run(True, True),
        "sequential": sequential.step,
        "pipelined": pipelined.step,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, call in contestants.items():
            times[name].append(seconds(call))
    print(f"{alone.nbytes / 2**20:.0f} MiB of states and gradients on disk, engine {alone._space.io.engine}")
    for engine in (sequential.engine, pipelined.engine):
        assert engine.homes is not None
        engine.homes.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--numel", type=int, default=6_291_456, help="elements of a unit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the step")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="torch")
    parser.add_argument("--buffers", type=int, default=4, help="buffer_count")
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        times = measure(arguments, Path(folder))
    middle = {name: statistics.median(values) for name, values in times.items()}
    bounds = [max(b, m) for b, m in zip(times["both"], times["memory"], strict=True)]
    print(f"{'':12}{'ms':>10}{'x max(both, memory)':>24}")
    for name, values in times.items():
        ratio = statistics.median(v / b for v, b in zip(values, bounds, strict=True))
        print(f"{name:12}{middle[name] * 1e3:10.1f}{ratio:24.2f}")


if __name__ == "__main__":
    main()
