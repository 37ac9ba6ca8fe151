"""Train a GPT whose states are several times the memory that it may use, and plot what it used.

    python examples/offload.py                                  # 76 million parameters, 1.2 GB of states, 256 MiB
    python examples/offload.py --offload none --limit 0         # the same without offload, to compare

Parameters, gradients and optimizer states live on a disk; a block at a time comes into memory. `--limit` is what the
process may use above what Python and its libraries take; where the system lets us (a control group, as root), the
kernel enforces it. Writes offload.png.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

import ds_lightning as dsl
from ds_lightning.demo import ByteGPT, StdlibText

MIB = 2**20


class BigGPT(LightningModule):
    """The demo's GPT, built block by block in `configure_model`: nobody ever holds it whole."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.gpt: nn.Module | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = ByteGPT(layers=self.layers, width=self.width, heads=8)

    def training_step(self, batch, index):
        tokens, targets = batch
        loss = nn.functional.cross_entropy(self.gpt(tokens).flatten(0, 1).float(), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def resident() -> int:
    """Bytes of this process's own memory: what the kernel cannot take back by dropping pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Resident(Callback):
    """Samples resident memory every few milliseconds, above what there was at the beginning."""

    def __init__(self) -> None:
        self.start = resident()
        self.times: list[float] = []
        self.bytes: list[int] = []
        self.marks: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            self.times.append(time.monotonic() - self._began)
            self.bytes.append(resident() - self.start)

    def mark(self, what: str) -> None:
        self.marks.append((time.monotonic() - self._began, what))

    def on_train_start(self, trainer, module) -> None:
        self.mark("training begins")

    def on_train_batch_end(self, trainer, *_) -> None:
        self.mark("")

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def limited(nbytes: int) -> Iterator[bool]:
    """This process may use so much memory, page cache included; yields whether the kernel sees to it."""
    version_1 = Path("/sys/fs/cgroup/memory")
    home, name = Path("/sys/fs/cgroup"), "memory.max"
    if version_1.is_dir():
        home, name = version_1, "memory.limit_in_bytes"
    group = home / f"offload_example_{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(nbytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        enforced = True
    except OSError:
        enforced = False
    try:
        yield enforced
    finally:
        with suppress(OSError):
            (home / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def plot(memory: Resident, states: int, limit: int, title: str, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    used = [nbytes / MIB for nbytes in memory.bytes]
    axes.fill_between(memory.times, used, alpha=0.3)
    axes.plot(memory.times, used, linewidth=1, label="resident memory of the process")
    axes.axhline(states / MIB, color="tab:red", linestyle="--", label="parameters, gradients and states of AdamW")
    if limit:
        axes.axhline(limit / MIB, color="tab:green", linestyle="--", label="allowed")
    for moment, what in memory.marks:
        axes.axvline(moment, color="grey", linewidth=0.5, alpha=0.5)
        axes.annotate(what, (moment, states / MIB * 0.9), rotation=90, fontsize=8, ha="right", va="top")
    axes.set(xlabel="seconds", ylabel="MiB above the start", title=title, ylim=(0, states / MIB * 1.1))
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="nvme")
    parser.add_argument("--folder", default="swap", help="for swap files, on a fast local disk")
    parser.add_argument("--limit", type=int, default=256, help="MiB above the libraries'; 0 for none")
    parser.add_argument("--out", default="offload.png")
    args = parser.parse_args()

    seed_everything(1234)
    data = StdlibText(batch_size=2, block_size=128, max_megabytes=2)
    data.text  # noqa: B018  (read before memory is counted)
    torch.ones(64, 64) @ torch.ones(64, 64)  # threads and their stacks
    config = {
        "activation_checkpointing": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": args.offload, "nvme_path": args.folder, "pipeline_read": True},
            "offload_param": {"device": args.offload, "nvme_path": args.folder, "max_in_cpu": 0, "buffer_count": 2},
        },
    }
    memory = Resident()
    limit = args.limit * MIB
    with limited(memory.start + limit + 64 * MIB if limit else 2**62) as enforced:  # and some pages of files
        model = BigGPT(args.layers, args.width)
        trainer = Trainer(
            strategy=dsl.ZeroStrategy(config=config),
            accelerator="cpu",
            devices=1,
            max_steps=args.steps,
            callbacks=[memory],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
    memory.stop()
    numel = sum(parameter.numel() for parameter in model.parameters())
    states, most = 16 * numel, max(memory.bytes)  # fp32 parameters, gradients and two moments
    how = "the kernel enforced it" if enforced and limit else "observed"
    print(
        f"{numel / 1e6:.1f} million parameters, {states / MIB:.0f} MiB of states; resident at most "
        f"{most / MIB:.0f} MiB above the start, 1/{states / most:.1f} of the states "
        f"(allowed: {args.limit or 'all'} MiB, {how})"
    )
    plot(memory, states, limit, f"offload {args.offload}: {args.layers} blocks of width {args.width}", args.out)
    if limit and most > limit:
        raise SystemExit(f"used {most / MIB:.0f} MiB, more than the {args.limit} MiB allowed")


if __name__ == "__main__":
    main()
