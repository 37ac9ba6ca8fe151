"""examples/bench/comm.py: two hosts and their link, every method's row, and nothing that stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "examples" / "bench"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def _can_make_hosts() -> bool:
    """Root in a container is not always allowed to."""
    name = f"dslbench-{os.getpid()}-probe"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    except OSError:
        return False
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made


CAN_MAKE_HOSTS = _can_make_hosts()
needs_hosts = pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="needs root and iproute2")

RECEIVE = """
import socket, time
server = socket.create_server(("10.0.0.1", 5000))
print("ready", flush=True)
link, _ = server.accept()
began, got = time.perf_counter(), 0
while part := link.recv(1 << 20):
    got += len(part)
print(got, time.perf_counter() - began)
"""
SEND = """
import socket
socket.create_connection(("10.0.0.1", 5000)).sendall(bytes(2_000_000))
"""


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"dslbench-{pid}-")]


@needs_hosts
def test_a_link_has_the_rate_it_was_given_and_goes_with_the_block():
    from hosts import Hosts

    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    subprocess.run(["ip", "netns", "add", f"dslbench-{gone.pid}-0"], check=True)  # of a run that was killed
    with Hosts() as hosts:
        assert namespaces(gone.pid) == []
        hosts.limit(80)
        hosts.limit(40)
        receiver = hosts.start(0, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "ready\n"
        hosts.start(1, [sys.executable, "-c", SEND])
        got, seconds = map(float, receiver.stdout.read().split())
        idle = hosts.start(1, ["sleep", "1000"])
        assert len(namespaces(os.getpid())) == 2
    assert got == 2_000_000
    assert seconds > 0.9 * (got - 2 * 256 * 1024) * 8 / 40e6  # tbf lets a burst through
    assert idle.returncode == -signal.SIGKILL
    assert namespaces(os.getpid()) == []


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, number):
    run = subprocess.Popen(
        [sys.executable, str(BENCH / "comm.py"), "--methods", "ddp"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    try:
        while not (children := _ranks_of(run.pid)):
            assert run.poll() is None
            time.sleep(0.02)
    finally:
        run.send_signal(number)
        run.communicate(timeout=30)
    assert run.returncode != 0
    assert namespaces(run.pid) == []
    end = time.monotonic() + 5
    while any(Path("/proc", str(child)).exists() for child in children):  # one that was just being started
        assert time.monotonic() < end
        time.sleep(0.02)


def _ranks_of(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # gone since
            if b"comm_rank.py" in Path("/proc", child, "cmdline").read_bytes():
                found.append(int(child))
    return found


def test_a_small_run(tmp_path):
    where = ["--links", "1000"] if CAN_MAKE_HOSTS else ["--loopback"]
    size = ["--layers", "1", "--width", "64", "--length", "16", "--steps", "4", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "comm.py"), *where, *size, "--methods", "ddp", "stage2", "stage3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("\u2502 ").split("\u2502") for line in done.stdout.splitlines() if line.startswith("\u2502")]
    found = {name: cells for name, *cells in [[cell.strip() for cell in row] for row in rows]}
    assert list(found) == ["ddp", "stage2", "stage3"]
    assert len({cells[-1] for cells in found.values()}) == 1, "the same loss"
    if CAN_MAKE_HOSTS:  # other programs use the loopback interface, too
        for name in ("stage2", "stage3"):
            assert 0.85 < float(found[name][-2]) < 1.01, "the ledger counts what the interface counts, but for headers"
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")


class FakeRanks:
    """Answers as ranks do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, what, argument):
        from comm_launch import Failed

        self.asked.append(argument)
        if argument == "qwZ":
            return [{"refused": "qwZ is not\nsupported yet"}] * 2
        if argument == "qgZ" and self.asked.count("qgZ") == 2:
            raise Failed("measure qgZ: rank 1 ended\nrank 0: ...")
        seconds = {"ddp": 0.2, "stage3": 0.1, "qgZ": 0.3}[argument] * len(self.asked)
        answer = {"seconds": seconds, "cpu": 0.01, "wire": 100.0, "local": 25.0, "ledger": 120.0}
        answer |= {"calls": 3, "numel": 7, "profile": ""}
        return [{**answer, "loss": 4.0}, {**answer, "seconds": seconds / 2, "loss": 5.0}]


def test_refusals_and_failures_are_told_and_do_not_come_again(capsys):
    from comm import measure
    from comm_table import Results

    ranks, results = FakeRanks(), Results()
    measure(ranks, results, "fast", ["ddp", "stage3", "qwZ", "qgZ"], 3, per_host=1, shared=False)
    assert ranks.asked == ["ddp", "stage3", "qwZ", "qgZ", "ddp", "stage3", "qgZ", "ddp", "stage3"]
    assert results.skipped == {
        "qwZ": "qwZ is not supported yet",
        "qgZ": "failed on fast: measure qgZ: rank 1 ended",
    }
    assert results.failed == {"qgZ"}
    assert "rank 0: ..." in capsys.readouterr().err
    assert results.median("fast", "ddp", "seconds") == pytest.approx(0.2 * 5)
    assert results.ratio("fast", "stage3", "ddp") == pytest.approx(0.5 * 6 / 5)  # of 2 / 1, 6 / 5 and 9 / 8
    assert results.median("fast", "ddp", "loss") == 4.5
    assert results.median("fast", "ddp", "counted") == pytest.approx(240 / 250)


def test_without_root_it_says_what_else_can_be_done(monkeypatch, capsys):
    import comm

    monkeypatch.setattr(comm, "missing", lambda: ["root: network namespaces are root's to make"])
    monkeypatch.setattr(sys, "argv", ["comm.py"])
    with pytest.raises(SystemExit, match=r"(?s)without root.*--loopback.*torchrun") as left:
        comm.main()
    assert left.value.code != 0
