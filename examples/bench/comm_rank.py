"""One rank of comm.py: trains by one method after another in the same process, and tells what a step took.

Started by comm.py, in whose words on stdin (a JSON value a line) it works and to which it answers on stdout.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import queue
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_methods import LR, NODE_SIZE, WARMUP, Method, methods
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader

from ds_lightning import ZeroStrategy
from ds_lightning.demo import ByteGPT
from ds_lightning.demo.text import read_stdlib
from ds_lightning.demo.windows import Windows
from ds_lightning.errors import ConfigError

PINGS = 50


@dataclass(frozen=True)
class Settings:
    """Equal on all ranks."""

    layers: int
    width: int
    length: int
    batch: int
    steps: int
    precision: str
    accelerator: str
    interface: str
    profile: int
    """How many functions to name."""


class Model(ByteGPT):
    """The demo's model, without its schedule, and without an optimizer where the configuration makes it."""

    def __init__(self, has_optimizer: bool, **size: int) -> None:
        super().__init__(heads=8, **size)
        self._has_optimizer = has_optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> Any:
        return None if self._has_optimizer else torch.optim.AdamW(self.parameters(), lr=LR, fused=True)


class Clock(Callback):
    """Reads time after the warm-up and after the last step, and counts bytes one forward earlier.

    Between forward and backward nothing is under way: what a step publishes may go on after its end, and is there once
    the next forward is through.
    """

    def __init__(self, interface: str, profile: cProfile.Profile | None) -> None:
        self.times: list[dict[str, float]] = []
        self.bytes: list[dict[str, float]] = []
        self.loss = 0.0
        self._interface = interface
        self._profile = profile

    def on_before_backward(self, trainer: Trainer, module: Any, loss: torch.Tensor) -> None:
        if trainer.global_step + 1 in (WARMUP, trainer.max_steps):
            engine = getattr(trainer.strategy, "engine", None)
            self.bytes.append(
                {
                    "wire": sent_over(self._interface),
                    "local": sent_over("lo") if self._interface != "lo" else 0,
                    "ledger": engine.ledger.bytes_sent if engine is not None else 0,
                    "calls": engine.ledger.calls if engine is not None else 0,
                }
            )
            self.loss = loss.item()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in (WARMUP, trainer.max_steps):
            if self._profile is not None:
                self._profile.disable() if self.times else self._profile.enable()
            self.times.append({"seconds": time.perf_counter(), "cpu": time.process_time()})

    def per_step(self, steps: int) -> dict[str, float]:
        """Figures of one of so many steps."""
        return {key: (last[key] - first[key]) / steps for first, last in (self.times, self.bytes) for key in first}


class Rank:
    """This process; every method is collective."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._local = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(1)
        dist.init_process_group("gloo" if settings.accelerator == "cpu" else "nccl")
        self._hosts = dist.get_world_size() // self._local
        self._methods = methods(self._local)
        self._text, _ = read_stdlib(max_megabytes=1)

    def measure(self, name: str) -> dict[str, Any]:
        """Train by a method; figures are those of one step of this rank, or a refusal in words."""
        settings, method = self._settings, self._methods[name]
        profile = cProfile.Profile() if settings.profile and dist.get_rank() == 0 else None
        clock = Clock(settings.interface, profile)
        torch.manual_seed(0)
        try:
            trainer = Trainer(
                strategy=_strategy(method),
                accelerator=settings.accelerator,
                precision=settings.precision,
                devices=self._local,
                num_nodes=self._hosts,
                plugins=[TorchElasticEnvironment()],
                max_steps=WARMUP + settings.steps,
                callbacks=[clock],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            model = Model(method.has_optimizer, layers=settings.layers, width=settings.width)
            dist.barrier()
            trainer.fit(model, self._batches())
        except ConfigError as error:
            return {"refused": str(error)}
        numel = sum(parameter.numel() for parameter in model.parameters())
        slowest = _slowest(profile, settings.profile) if profile is not None else ""
        return {**clock.per_step(settings.steps), "loss": clock.loss, "numel": numel, "profile": slowest}

    def probe(self, nbytes: int) -> dict[str, float]:
        """What the link is without us: bytes a second in one direction, and the seconds of a round trip of one byte.

        Answered by rank 0, which asks the first rank of the second host.
        """
        here, there = dist.get_rank(), self._local
        bulk, word = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        trips = []
        if here in (0, there):
            for payload in [word] * (PINGS + 1) + [bulk]:  # the first makes the connection
                began = time.perf_counter()
                if here == 0:
                    dist.send(payload, there)
                    dist.recv(word, there)
                else:
                    dist.recv(payload, 0)
                    dist.send(word, 0)
                trips.append(time.perf_counter() - began)
        dist.barrier()
        return {"rate": nbytes / trips[-1], "trip": statistics.median(trips[1:-1])} if here == 0 else {}

    def _batches(self) -> DataLoader[Any]:
        settings = self._settings
        count = (WARMUP + settings.steps) * settings.batch
        windows = Windows(self._text, settings.length, seed=dist.get_rank(), count=count)
        return DataLoader(windows, settings.batch)


def _slowest(profile: cProfile.Profile, count: int) -> str:
    """Where a step's time went, waiting included, by function."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(count)
    return text.getvalue().partition("Ordered by")[2]


def _strategy(method: Method) -> DDPStrategy:
    if method.config is not None:
        zero = dict(method.config["zero_optimization"])
        if NODE_SIZE in os.environ:
            zero["node_size"] = int(os.environ[NODE_SIZE])
        return ZeroStrategy(config={**method.config, "zero_optimization": zero})
    return DDPStrategy() if method.hook is None else HookedDDP(method.hook)


class HookedDDP(DDPStrategy):
    """DDP with a communication hook; Lightning's own argument for it acts on GPUs only."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self._hook = hook

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(None, getattr(default_hooks, self._hook))


def sent_over(interface: str) -> int:
    """Bytes that this host has sent over an interface, with the headers of their packets."""
    return int(Path("/sys/class/net", interface, "statistics", "tx_bytes").read_text())


def serve() -> None:
    """Answer until stdin ends, and then end at once: whoever asked is gone, in the middle of a collective perhaps."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    rank = Rank(Settings(**json.loads(sys.argv[1])))
    while True:
        what, argument = json.loads(requests.get())
        print(json.dumps(getattr(rank, what)(argument)), file=answers)


if __name__ == "__main__":
    serve()
