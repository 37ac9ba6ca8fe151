"""Files that fail: full and read-only disks, short and missing files, limits and signals. Faults are real ones."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from ds_lightning.errors import DsLightningError, FileIOError
from ds_lightning.ops import aio
from tests.native.aio_common import ENGINES, bytes_of, held, need, numbers

MIB = 1 << 20


@pytest.fixture(params=ENGINES)
def io(request):
    with aio.AsyncIO(block_size=1 << 16, engine=need(request.param)) as io:
        yield io


def mounted(folder, *arguments: str):
    """Mounts a file system there, for as long as the test runs; skips where that is forbidden."""
    done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    return folder


@pytest.fixture
def small_tmpfs(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    yield mounted(folder, "-t", "tmpfs", "-o", "size=1m", "none")
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_ext4(tmp_path):
    folder, image = tmp_path / "small", tmp_path / "image"
    folder.mkdir()
    with image.open("wb") as stream:
        stream.truncate(8 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 can be made here: {error}")
    yield mounted(folder, "-o", "loop", str(image))
    subprocess.run(["umount", folder], check=True)


def fails(action, *words: str) -> FileIOError:
    with pytest.raises(FileIOError) as caught:
        action()
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, DsLightningError)
    for word in words:
        assert word in str(caught.value)
    return caught.value


def test_a_short_file_tells_path_offset_and_bytes(io, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100_000)
    with io.open(path) as file:
        for offset, nbytes, found in (
            (0, 100_001, 100_000),
            (99_999, 2, 1),
            (200_000, 70_000, 0),
            (4096, 1 << 20, 95_904),
        ):
            transfer = io.read(torch.zeros(nbytes, dtype=torch.uint8), file, offset)
            for _ in range(2):
                error = fails(transfer.wait, str(path), f"{nbytes} bytes at offset {offset}", f"{found} were found")
            assert (error.path, error.wanted, error.found, error.errno) == (path, nbytes, found, None)
        exact = torch.zeros(100_000, dtype=torch.uint8)
        io.read(exact, file).wait()
        assert (exact == ord("x")).all()


def test_a_file_that_is_cut_while_open(io, tmp_path):
    path = tmp_path / "cut"
    path.write_bytes(b"x" * MIB)
    with io.open(path, "r", nbytes=MIB) as file:
        os.truncate(path, 5000)
        fails(io.read(torch.zeros(MIB, dtype=torch.uint8), file).wait, "it has 5000 bytes, so 5000 were found")
    fails(lambda: io.open(path, "r", nbytes=MIB), f"opened as a file of {MIB} bytes, but it has 5000")


def test_files_that_cannot_be_opened(io, tmp_path):
    before = held()
    fails(lambda: io.open(tmp_path / "none"), str(tmp_path / "none"), "for reading", "no such file")
    fails(lambda: io.open(tmp_path / "none", "r+"), "for reading and writing")
    fails(lambda: io.open(tmp_path / "no" / "folder", "w+"), f"create {tmp_path / 'no'}")
    fails(lambda: io.open(tmp_path, "r+"), "name a file")
    (tmp_path / "file").touch()
    fails(lambda: io.open(tmp_path / "file" / "below", "w+"), "Not a directory")
    with pytest.raises(ValueError, match=r"mode='a' is not one of r, r\+, w\+"):
        io.open(tmp_path / "file", "a")
    assert held()[0] == before[0]


def test_a_read_only_folder(io, small_tmpfs):
    (small_tmpfs / "there").write_bytes(b"x")
    subprocess.run(["mount", "-o", "remount,ro", small_tmpfs], check=True)
    fails(lambda: io.open(small_tmpfs / "new", "w+"), "read-only", "another folder")
    fails(lambda: io.open(small_tmpfs / "there", "r+"), "read-only")
    with io.open(small_tmpfs / "there") as file:
        io.read(torch.zeros(1, dtype=torch.uint8), file).wait()


def test_a_file_without_permission(tmp_path):
    # In a process of its own, which gives up the rights of root.
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "file").chmod(0o400)
    code = (
        "import os, sys; from ds_lightning.ops import aio\n"
        "if os.getuid() == 0: os.setuid(12345)\n"
        "try: aio.File(sys.argv[1], 'r+')\n"
        "except OSError as error: print(error)"
    )
    tmp_path.chmod(0o755)
    command = [sys.executable, "-W", "ignore", "-c", code, tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=True)
    assert "Permission denied" in done.stdout


def check_full(io, folder):
    full = folder / "full"
    nbytes = 16 * MIB
    error = fails(
        lambda: io.open(full, "w+", nbytes=nbytes), str(full), str(nbytes), "Free on this file system", "Make room"
    )
    assert error.errno == errno.ENOSPC
    assert error.found == os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert full.stat().st_size == 0  # nothing stays reserved
    with io.open(full, "w+") as file:
        error = fails(io.write(numbers(nbytes), file).wait, str(full), "no room", "bytes are free")
        assert error.errno == errno.ENOSPC
    full.unlink()
    with io.open(full, "w+", nbytes=100_000) as file:
        io.write(numbers(100_000), file).wait()
        assert full.read_bytes() == bytes_of(numbers(100_000))


def test_a_full_disk_past_the_page_cache(io, small_ext4):
    with io.open(small_ext4 / "probe", "w+") as file:
        assert file.direct
    check_full(io, small_ext4)


def test_a_full_disk_through_the_page_cache(io, small_tmpfs):
    with io.open(small_tmpfs / "probe", "w+") as file:
        assert "tmpfs" in file.why_not_direct
    check_full(io, small_tmpfs)


def test_a_device_that_is_always_full(io):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with io.open("/dev/full", "r+") as file:
        assert fails(io.write(numbers(100_000), file).wait, "no room").errno == errno.ENOSPC


def test_a_limit_of_file_sizes_is_an_error_and_no_death(io, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL) if io.engine != "python" else None
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        with io.open(tmp_path / "large", "w+") as file:
            transfer = io.write(numbers(MIB), file)
            assert fails(transfer.wait, "grow that large", "ulimit -f").errno == errno.EFBIG
            io.write(numbers(200_000), file).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if handler is not None:
            signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "large").read_bytes()[:200_000] == bytes_of(numbers(200_000))


def test_signals_do_not_disturb(io, tmp_path):
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    values = numbers(4 * MIB)
    back = torch.zeros_like(values)
    try:
        with io.open(tmp_path / "file", "w+") as file:
            for _ in range(5):
                io.write(values, file, 3).wait()
                io.read(back.zero_(), file, 3).wait()
                assert torch.equal(back, values)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard


def test_a_wait_for_a_disk_that_does_not_answer_can_be_interrupted():
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    reading, writing = os.pipe()
    room = torch.zeros(4, dtype=torch.uint8)
    before = signal.signal(signal.SIGALRM, stop)
    with aio.AsyncIO(engine=need("io_uring")) as io, io.open(f"/proc/self/fd/{reading}", direct=False) as file:
        transfer = io.read(room, file)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            transfer.wait()
        signal.signal(signal.SIGALRM, before)
        os.write(writing, b"wxyz")
        transfer.wait()
    os.close(reading)
    os.close(writing)


def test_the_lowest_offset_of_several_failures_is_told(io, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 70_000)
    with io.open(path) as file:
        for _ in range(10):
            transfer = io.read(torch.zeros(10 * 70_000, dtype=torch.uint8), file)
            assert fails(transfer.wait).offset == 70_000


def test_a_failure_nobody_waited_for_is_told_at_the_end(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    io = aio.AsyncIO(engine="python")
    with io.open(tmp_path / "file") as file:
        io.read(torch.zeros(9), file)
        io.read(torch.zeros(1, dtype=torch.uint8), file).wait()
    fails(io.close, "met the end of the file")
    io.close()


def test_what_was_closed_is_not_used(io, tmp_path):
    file = io.open(tmp_path / "file", "w+")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="was closed; open it again"):
        io.write(torch.ones(3), file)
    io.close()
    with io.open(tmp_path / "file") as file, pytest.raises(ValueError, match="make a new one"):
        io.read(torch.ones(3), file)


def test_arguments_that_do_not_fit_are_refused_in_words(io, tmp_path):
    with io.open(tmp_path / "file", "w+", nbytes=100) as file, io.open(tmp_path / "file") as read_only:
        for words, action in {
            "opened for reading": lambda: io.write(torch.ones(3), read_only),
            "offset=-1 is negative": lambda: io.read(torch.ones(3), file, -1),
            r"contiguous.*\(2, 3\)": lambda: io.write(torch.ones(3, 2).t(), file),
            "layout torch.sparse_coo": lambda: io.write(torch.eye(3).to_sparse(), file),
            "not on meta": lambda: io.read(torch.ones(3, device="meta"), file),
        }.items():
            with pytest.raises(ValueError, match=words):
                action()


def test_reading_goes_on_beside_failures(io, tmp_path):
    (tmp_path / "good").write_bytes(bytes_of(numbers(300_000)))
    (tmp_path / "short").write_bytes(b"x")
    failures = []

    def fail():
        with io.open(tmp_path / "short") as file:
            for _ in range(20):
                failures.append(fails(io.read(torch.zeros(100_000, dtype=torch.uint8), file).wait))

    thread = threading.Thread(target=fail)
    thread.start()
    with io.open(tmp_path / "good") as file:
        for _ in range(20):
            back = torch.zeros(300_000, dtype=torch.uint8)
            io.read(back, file).wait()
            assert torch.equal(back, numbers(300_000))
    thread.join()
    assert len(failures) == 20
