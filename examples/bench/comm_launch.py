"""The ranks of comm.py: started on two hosts of this machine, or by torchrun on real ones."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from comm_methods import NODE_SIZE
from hosts import Hosts, Loopback

RANK = Path(__file__).with_name("comm_rank.py")


class Failed(Exception):
    """A rank ended, or did not answer in time."""


class Ranks(Protocol):
    """Processes of one process group."""

    def ask(self, what: str, argument: Any) -> list[dict[str, Any]]:
        """Call a method of every `comm_rank.Rank`."""


class Started:
    """Ranks on the hosts of this machine, started again after one has failed."""

    def __init__(self, hosts: Hosts, per_host: int, settings: dict[str, Any], timeout: float, folder: Path) -> None:
        self._hosts = hosts
        self._per_host = per_host
        self._settings = json.dumps(settings)
        self._timeout = timeout
        self._folder = folder
        self._ranks: list[Any] = []

    def _start(self) -> None:
        port = "29500"  # in a namespace all are free
        if isinstance(self._hosts, Loopback):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
        size = 2 * self._per_host
        for rank in range(size):
            host, local = divmod(rank, self._per_host)
            environment = {
                **os.environ,
                **{"MASTER_ADDR": self._hosts.address, "MASTER_PORT": port},
                **{"GLOO_SOCKET_IFNAME": self._hosts.interface},
                **{"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host), "WORLD_SIZE": str(size)},
                **{"LOCAL_WORLD_SIZE": str(self._per_host), "TORCHELASTIC_RUN_ID": "comm"},
                # Namespaces share the name of the machine.
                **({} if isinstance(self._hosts, Loopback) else {NODE_SIZE: str(self._per_host)}),
                **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            }
            with self._log(rank).open("w") as log:
                command = [sys.executable, "-W", "ignore", str(RANK), self._settings]
                pipes = {"stdin": -1, "stdout": -1, "stderr": log, "text": True, "bufsize": 1}
                self._ranks.append(self._hosts.start(host, command, env=environment, **pipes))

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def ask(self, what: str, argument: Any) -> list[dict[str, Any]]:
        if not self._ranks:
            self._start()
        try:
            for process in self._ranks:
                process.stdin.write(json.dumps([what, argument]) + "\n")
            return self._answers(f"{what} {argument}")
        except (Failed, BrokenPipeError) as error:
            time.sleep(1)  # the others may have something to say, too
            ends = [f"rank {rank}: ...{self._log(rank).read_text()[-1500:]}" for rank in range(len(self._ranks))]
            self._hosts.end_processes()
            self._ranks = []
            raise Failed("\n".join([str(error), *ends])) from error

    def _answers(self, what: str) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + self._timeout
        while len(answers) < len(self._ranks):
            waiting = {p.stdout: rank for rank, p in enumerate(self._ranks) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise Failed(f"{what}: rank {min(waiting.values())} did not answer within {self._timeout:g} s")
            for pipe in ready:
                line = pipe.readline()
                if not line:
                    raise Failed(f"{what}: rank {waiting[pipe]} ended")
                answers[waiting[pipe]] = json.loads(line)
        return [answers[rank] for rank in range(len(self._ranks))]


class Joined:
    """This process is one of the ranks, started by torchrun on real hosts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from comm_rank import Rank, Settings

        self._rank = Rank(Settings(**settings))

    def ask(self, what: str, argument: Any) -> list[dict[str, Any]]:
        import torch.distributed as dist

        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, getattr(self._rank, what)(argument))
        return answers
