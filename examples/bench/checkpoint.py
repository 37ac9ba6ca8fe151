"""Saving and loading checkpoints side by side with plain torch.distributed.checkpoint and, where installed, DeepSpeed.

    python examples/bench/checkpoint.py                    # about 300 MB of states on 2 ranks, 5 rounds
    python examples/bench/checkpoint.py --layers 2 --width 128 --rounds 2

All contestants hold the same tensors (fp32 weights and both moments of AdamW, stage 3 or row shards) and take turns in
the same processes; figures are medians over rounds and ratios to plain DCP of the same run. The stall of an
asynchronous save is the time until training may go on; it is compared with the synchronous save of the same form. Peak
memory is the most anonymous memory during a save or load above what the process held before, on the rank where it is
most. Every write is synced to disk.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

CONTESTANTS = ("dcp", "sharded", "full", "deepspeed")


# Memory of this process ----------------------------------------------------------------------------------------------


class Peak:
    """Samples the anonymous memory of this process: pages of mapped files are the kernel's to drop."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is needed now
        self.held = self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous())


def anonymous() -> int:
    """Bytes of anonymous memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell anonymous from mapped memory")


# Contestants ---------------------------------------------------------------------------------------------------------


def make_model(layers: int, width: int) -> Any:
    """Layers of a GPT, about `12 * layers * width ** 2` parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 2 * width),
                        nn.Linear(2 * width, width)) for _ in range(layers))
    )  # fmt: skip


class Ours:
    """A stage-3 engine and its checkpoints."""

    def __init__(self, layers: int, width: int) -> None:
        import torch
        from torch import distributed as dist

        from ds_lightning.topology import Topology
        from ds_lightning.zero.engine import ZeroEngine
        from ds_lightning.zero.plan import StagePlan

        self.model = make_model(layers, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ranks = Topology.create(torch.device("cpu"), timedelta(minutes=5))
        self.engine = ZeroEngine(self.model, [self.optimizer], self.ranks, StagePlan.of(3))
        with self.engine.passes.step_scope():
            x = torch.randn(2, width, generator=torch.Generator().manual_seed(dist.get_rank()))
            loss = self.model(x).square().mean()
        with self.engine.passes.backward_scope():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes(self) -> int:
        """All tensors, over all ranks."""
        return sum(p.numel() for p in self.model.parameters()) * 12

    def saver(self, sharded: bool, background: bool) -> Any:
        from ds_lightning.checkpoint.saver import CheckpointSaver

        saver = CheckpointSaver(sharded, background, lambda text: None)
        saver.open()
        return saver

    def save(self, saver: Any, path: Path) -> None:
        sharded = self.engine.sharded(self.optimizer)
        names = [[self.engine.table.name_of(p) for group in sharded.user_params() for p in group]]
        checkpoint = {
            "state_dict": saver.module_state(self.engine, self.model, False),
            "optimizer_states": [saver.optimizer_state(self.engine, sharded)],
            "ds_lightning": {"optimizer_parameter_names": names},
        }
        saver.answer(self.ranks)
        saver.save(checkpoint, path, self.ranks, lambda: None)

    def load(self, path: Path) -> None:
        from ds_lightning.checkpoint import state
        from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
        from ds_lightning.checkpoint.loading import load

        checkpoint = load(path, ZeroCheckpointIO().load_checkpoint, print)
        with self.engine.state_dicts.loading():
            self.model.load_state_dict(checkpoint["state_dict"])
        names = checkpoint["ds_lightning"]["optimizer_parameter_names"][0]
        sharded = self.engine.sharded(self.optimizer)
        state.load_optimizer_state(self.engine, sharded, checkpoint["optimizer_states"][0], names)


class PlainDCP:
    """The same tensors as DTensors, each cut into rows."""

    def __init__(self, layers: int, width: int) -> None:
        import torch
        from torch import distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))

        def cut(values: Any) -> Any:
            return distribute_tensor(values, mesh, [Shard(0)])

        named = dict(make_model(layers, width).named_parameters())
        self.state: dict[str, Any] = {
            "model": {name: cut(value.detach()) for name, value in named.items()},
            "optimizer": {
                name: {key: cut(torch.rand_like(value.detach())) for key in ("exp_avg", "exp_avg_sq")}
                for name, value in named.items()
            },
        }

    def save(self, path: Path) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))

    def load(self, path: Path) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.load(self.state, storage_reader=dcp.FileSystemReader(path))


class DeepSpeed:
    """Its own engine at stage 3."""

    def __init__(self, layers: int, width: int) -> None:
        import deepspeed
        import torch

        model = make_model(layers, width)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        loss = self.engine(torch.randn(2, width)).square().mean()
        self.engine.backward(loss)
        self.engine.step()

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path))
        for file in path.rglob("*.pt"):  # the others sync what they write
            with file.open("rb") as stream:
                os.fsync(stream.fileno())

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(str(path))


# The worker ----------------------------------------------------------------------------------------------------------


def work(rank: int, world: int, port: int, arguments: argparse.Namespace, folder: str, results: Any) -> None:
    """One rank: every contestant in turn, round after round."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    found: dict[tuple[str, str], list[float]] = {}

    def note(name: str, key: str, value: float) -> None:
        values = [torch.tensor(0.0, dtype=torch.float64) for _ in range(world)]
        dist.all_gather(values, torch.tensor(value, dtype=torch.float64))
        found.setdefault((name, key), []).append(max(map(float, values)))

    def timed(name: str, key: str, action: Callable[[], None]) -> None:
        dist.barrier()
        with Peak() as peak:
            began = time.perf_counter()
            action()
            seconds = time.perf_counter() - began
        note(name, f"{key} s", seconds)
        note(name, f"{key} peak", peak.most - peak.held)

    ours = Ours(arguments.layers, arguments.width)
    plain = PlainDCP(arguments.layers, arguments.width)
    others = [("dcp", plain)]
    if importlib.util.find_spec("deepspeed") is not None:
        others.append(("deepspeed", DeepSpeed(arguments.layers, arguments.width)))
    savers = {(s, b): ours.saver(s, b) for s in (True, False) for b in (True, False)}

    def forget(path: Path) -> None:
        dist.barrier()
        if rank == 0 and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    for turn in range(arguments.rounds + 1):  # the first warms up
        if turn == 1:
            found.clear()
        for form, sharded in (("sharded", True), ("full", False)):
            path = Path(folder) / form
            forget(path)
            timed(form, "save", lambda sharded=sharded, path=path: ours.save(savers[sharded, False], path))
            entries = path.rglob("*") if path.is_dir() else [path]
            note(form, "bytes", sum(entry.stat().st_size for entry in entries))
            timed(form, "load", lambda path=path: ours.load(path))
            forget(path)
            timed(form, "stall", lambda sharded=sharded, path=path: ours.save(savers[sharded, True], path))
            timed(form, "rest", lambda sharded=sharded: savers[sharded, True].wait("", ours.ranks))
            forget(path)
        for name, other in others:
            path = Path(folder) / name
            forget(path)
            timed(name, "save", lambda other=other, path=path: other.save(path))
            note(name, "bytes", sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file()))
            timed(name, "load", lambda other=other, path=path: other.load(path))
            forget(path)
    if rank == 0:
        results.put((ours.bytes(), {key: statistics.median(values) for key, values in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


def report(total: int, medians: dict[tuple[str, str], float]) -> None:
    """Print figures and ratios."""
    import torch
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{total / 2**20:.0f} MiB of tensors, torch {torch.__version__}, ratios to plain DCP")
    for column in ("contestant", "save", "load", "stall / save", "size / tensors", "peak of save", "peak of load"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for name in CONTESTANTS:
        if (name, "save s") not in medians:
            table.add_row(name, *["not installed" if name == "deepspeed" else "-"] * 1)
            continue

        def figure(key: str, name: str = name) -> float:
            return medians[name, key]

        def ratio(key: str, name: str = name) -> str:
            return f"{medians[name, key]:.3f} s ({medians[name, key] / medians['dcp', key]:.2f} x)"

        stall = f"{figure('stall s') / figure('save s'):.2f}" if (name, "stall s") in medians else "-"
        peaks = (f"{figure(f'{key} peak') / 2**20:.0f} MiB" for key in ("save", "load"))
        table.add_row(name, ratio("save s"), ratio("load s"), stall, f"{figure('bytes') / total:.4f}", *peaks)
    Console(width=120).print(table)


def main() -> None:
    """Run the ranks and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        port = 20000 + os.getpid() % 20000
        ranks = [
            context.Process(target=work, args=(rank, arguments.ranks, port, arguments, folder, results))
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
        report(*results.get())


if __name__ == "__main__":
    main()
