"""Python programs, started from a process that has imported torch and Lightning already.

    done = run_python(["script.py", "--steps=4"], cwd=folder)       # as subprocess.run([sys.executable, ...])

A program is a process of its own, with its own arguments, environment, working directory and path, that runs as
`__main__` and ends as every interpreter does, by its exit handlers. Only the seconds of imports at its beginning are
saved; what it starts itself, such as the other ranks of a job, begins from nothing. Tests of importing, and of signals
to a tree of processes, start theirs with `subprocess`.

[Note: how a program starts] A server, one per test process, waits with the imports done and one thread. For each
program it forks a guardian, which forks the program, tells its pid and, once it has ended, its exit status. The
program returns from the server's function to the top of the interpreter, so the end of the program is the end of the
interpreter.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.pool import PRELOAD

ROOT = Path(__file__).parents[1]
LARGEST = 1 << 17  # bytes of a request, most of it environment


def run_python(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 110
) -> subprocess.CompletedProcess[str]:
    """Run what would follow `python` on a command line: a file or `-m module`, and its arguments.

    Returns when the program has ended and nothing holds its output open any more.

    Raises:
        subprocess.TimeoutExpired: it was killed after so many seconds.
    """
    pipes = [os.pipe() for _ in range(3)]
    output: list[bytes] = [b"", b"", b""]

    def read(place: int) -> None:
        with open(pipes[place][0], "rb") as stream:
            output[place] = stream.readline() if place == 2 else b""
            if place == 2:
                started.set()
            output[place] += stream.read()

    started = threading.Event()
    request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
    readers = [threading.Thread(target=read, args=(place,), daemon=True) for place in range(3)]
    try:
        socket.send_fds(_server(), [json.dumps(request).encode()], [write for _, write in pipes])
    finally:
        for _, write in pipes:
            os.close(write)
        for reader in readers:
            reader.start()
    out, err, status = readers
    status.join(timeout)
    if status.is_alive():
        started.wait()
        os.kill(int(output[2].split()[0]), signal.SIGKILL)
        status.join()
        raise subprocess.TimeoutExpired(list(arguments), timeout, output[0], output[1])
    out.join()
    err.join()
    if not output[2]:
        raise RuntimeError("the server has ended")
    code = os.waitstatus_to_exitcode(int(output[2].split()[1]))
    return subprocess.CompletedProcess(list(arguments), code, *(text.decode(errors="replace") for text in output[:2]))


_servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


def _server() -> socket.socket:
    """The end of the server's socket; it is started when it is first needed."""
    if not _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"from tests.warm import serve; serve({theirs.fileno()})"
            process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=ROOT, stdin=subprocess.DEVNULL
            )
        _servers.append((process, ours))
        atexit.register(shutdown)
    return _servers[0][1]


def shutdown() -> None:
    """End the server; the next program starts a new one."""
    while _servers:
        process, ours = _servers.pop()
        ours.close()
        process.wait()


# What follows runs in the server and in the programs.


def serve(number: int) -> None:
    """Start programs until the test process closes its end. Returns in programs only when they are over."""
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in sys.path if entry not in ("", *own)]
    for name in PRELOAD:
        import_module(name)
    gc.collect()
    gc.freeze()  # programs neither look through what the imports made nor take it down at their end
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    with socket.socket(fileno=number) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, LARGEST, 3)
            if not message:
                os._exit(0)
            if os.fork() == 0:
                _guard(descriptors)
                break
            for descriptor in descriptors:
                os.close(descriptor)
            _reap()
    _run(json.loads(message), path)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _guard(descriptors: list[int]) -> None:
    """Fork the program, in which this returns, and stay to tell how it ends."""
    out, err, status = descriptors
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
    for descriptor in (out, err):
        os.close(descriptor)
    if pid:
        os.write(status, f"{pid}\n".encode())
        os.write(status, str(os.waitpid(pid, 0)[1]).encode())
        os._exit(0)
    os.close(status)


def _run(request: dict[str, Any], path: list[str]) -> None:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *rest = request["arguments"]
    module = first == "-m"
    extra = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [os.getcwd() if module else os.path.dirname(os.path.abspath(first)), *extra, *path]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the server's own
    if module:
        name, *rest = rest
        sys.argv = [name, *rest]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
