"""One job of a process that may run many: its command line and its environment."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed
from lightning.pytorch import Trainer


@contextmanager
def job(command_line: Sequence[str]) -> Iterator[list[Trainer]]:
    """Let Lightning start the other ranks with `command_line`; undo all of it afterwards.

    Lightning re-executes `sys.argv` and leaves its rank variables and the process group behind.
    Within a Hydra multirun the next job of this process would take them for its own and wait for
    ranks that nobody starts.

    Yields:
        A list to put the Trainer into, whose child processes are then awaited.
    """
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = list(command_line)
    trainers: list[Trainer] = []
    try:
        yield trainers
        for trainer in trainers:
            for child in getattr(trainer.strategy.launcher, "procs", []):
                child.wait()
    finally:
        sys.argv = argv
        if "LOCAL_RANK" not in environment and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
