"""Two hosts on one machine: network namespaces joined by a link that can be slowed down.

    with Hosts() as hosts:
        hosts.limit(100)  # Mbit/s in each direction
        process = hosts.start(1, [sys.executable, "-c", "print('on the second host')"])

Needs root, and `ip` and `tc` (Debian: iproute2). What was made is named after this process and goes with it: processes
and namespaces when the block is left, whatever the reason, and those of a run that was killed at the next run.

`tbf` limits the rate, in the kernel, for each direction on its own. It adds no delay: the round trip of an idle link is
that of this machine, some hundredths of a millisecond, where a switch takes a tenth and a long line many.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

PREFIX = "dslbench"
BURST_KB = 256  # holds the largest packet (64 KiB), which tbf would otherwise take apart
QUEUE_MS = 200  # how long a packet may wait before it is dropped


def missing() -> list[str]:
    """What this machine lacks for namespaces and slow links, in words."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append("root: network namespaces are root's to make")
    lacks += [f"{tool}: apt-get install iproute2" for tool in ("ip", "tc") if shutil.which(tool) is None]
    return lacks


class Hosts:
    """Two namespaces with an `eth0` each and a link between them.

    Attributes:
        address: of the first host, for the others.
        interface: name of the link's end, on both.

    Raises:
        OSError: the system refuses; the message is its own.
    """

    address = "10.0.0.1"
    interface = "eth0"

    def __init__(self) -> None:
        self.names = tuple(f"{PREFIX}-{os.getpid()}-{host}" for host in range(2))
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Hosts:
        _sweep()
        first, second = self.names
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            ours = ("ip", "-n", first, "link", "add", self.interface, "type", "veth")
            _run(*ours, "peer", "name", self.interface, "netns", second)
            for number, name in enumerate(self.names, 1):
                _run("ip", "-n", name, "address", "add", f"10.0.0.{number}/24", "dev", self.interface)
                _run("ip", "-n", name, "link", "set", self.interface, "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def limit(self, mbit: int | None) -> None:
        """Give the link a rate in Mbit/s in each direction; None for as fast as the machine copies."""
        for name in self.names:
            if mbit is None:
                _run("tc", "-n", name, "qdisc", "delete", "dev", self.interface, "root", check=False)
                continue
            words = ("rate", f"{mbit}mbit", "burst", f"{BURST_KB}kb", "latency", f"{QUEUE_MS}ms")
            _run("tc", "-n", name, "qdisc", "replace", "dev", self.interface, "root", "tbf", *words)

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; it gets no Ctrl-C of its own and is ended with the hosts."""
        return self._start(["ip", "netns", "exec", self.names[host], *command], options)

    def _start(self, words: list[str], options: dict[str, Any]) -> subprocess.Popen[Any]:
        process = subprocess.Popen(words, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def end_processes(self) -> None:
        """Kill what was started."""
        for process in self._processes:
            process.kill()
        while self._processes:
            process = self._processes.pop()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what it was sent, and has not read
                        pipe.close()

    def close(self) -> None:
        """End all processes and remove the namespaces, and with them the link. A second Ctrl-C waits for it."""
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        try:
            self.end_processes()
            self._remove()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def _remove(self) -> None:
        for name in self.names:
            _remove(name)


class Loopback(Hosts):
    """The same without namespaces: processes of this machine, and its loopback as fast as it is. Needs no root."""

    address = "127.0.0.1"
    interface = "lo"

    def __enter__(self) -> Loopback:
        return self

    def limit(self, mbit: int | None) -> None:
        if mbit is not None:
            raise ValueError("the loopback interface is everybody's: it is not slowed down")

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return self._start(command, options)

    def _remove(self) -> None:
        pass


def _sweep() -> None:
    """Remove the namespaces of runs that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _remove(name: str) -> None:
    """Remove a namespace and end what runs in it, such as a process that was being started when a signal came."""
    for pid in _run("ip", "netns", "pids", name, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name, check=False)


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
