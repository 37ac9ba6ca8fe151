"""The handle with DeepSpeed's methods: what each returns, and page-locked memory."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ds_lightning as dsl
from ds_lightning.errors import FileIOError
from ds_lightning.ops.aio import handle as handle_module
from tests.native.aio_common import ENGINES, bytes_of, held, need, numbers


@pytest.fixture(params=ENGINES)
def handle(request):
    return dsl.ops.aio.aio_handle(engine=need(request.param))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "file")


def test_getters_and_defaults():
    handle = dsl.ops.aio.aio_handle()
    assert handle.get_block_size() == 1 << 20
    assert handle.get_queue_depth() == 128
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is False
    assert handle.get_intra_op_parallelism() == 1
    assert handle.get_alignment() == 512
    handle = dsl.ops.aio.aio_handle(4096, 3, True, True, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (4096, 3, 2)
    assert handle.get_single_submit() is handle.get_overlap_events() is True
    assert handle.get_alignment() == 1024
    assert dsl.ops.aio.aio_handle(thread_count=3).get_intra_op_parallelism() == 3
    with pytest.raises(ValueError, match="old name"):
        dsl.ops.aio.aio_handle(intra_op_parallelism=2, thread_count=3)


def test_blocking_calls(handle, path):
    values = torch.randn(1000)
    back = torch.zeros(1000)
    assert handle.write(values, path, True) == 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert handle.read(back, path, True) == 0
    assert torch.equal(back, values)
    assert handle.sync_pwrite(values[:10], path, 4000) == 1
    assert handle.sync_pread(back[:10], path, 4000) == 1
    assert torch.equal(back[:10], values[:10])
    assert handle.pwrite(values, path, True, False) == 1
    assert handle.pread(back, path, True, False, 0) == 1
    assert torch.equal(back, values)
    assert os.path.getsize(path) == 4040  # writing does not cut


def test_asynchronous_calls_are_counted_by_wait(handle, tmp_path):
    values = [torch.randn(1000) for _ in range(5)]
    for k, value in enumerate(values):
        assert handle.async_pwrite(value, str(tmp_path / str(k))) == 0
    assert handle.wait() == 5
    back = [torch.zeros(1000) for _ in range(5)]
    assert handle.async_pread(back[0], str(tmp_path / "0")) == 0
    assert handle.sync_pread(back[1], str(tmp_path / "1")) == 1  # its own alone
    assert handle.wait() == 1
    assert handle.pread(back[2], str(tmp_path / "2"), True, True) == 0
    assert handle.pread(back[3], str(tmp_path / "3"), False, **{"async": True}) == 0
    assert handle.async_pread(back[4], str(tmp_path / "4"), file_offset=0) == 0
    assert handle.wait() == 3
    assert all(map(torch.equal, back, values))
    with pytest.raises(AssertionError, match="nothing pending"):
        handle.wait()


def test_open_descriptors_stay_the_callers(handle, path):
    before = held()
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    values = torch.randn(1000)
    assert handle.async_pwrite(values, fd, 100) == 0
    assert handle.wait() == 1
    back = torch.zeros(1000)
    assert handle.async_pread(back, fd, 100) == 0
    assert handle.wait() == 1
    assert torch.equal(back, values)
    os.close(fd)
    assert held()[0] == before[0]


def test_failures_return_minus_one_and_are_logged(handle, path, caplog):
    four = torch.zeros(4, dtype=torch.uint8)
    with caplog.at_level(logging.ERROR):
        assert handle.sync_pread(four, path) == -1
        assert "no such file" in caplog.text
        assert handle.async_pread(four, path) == -1
        assert handle.read(four, path, False) == -1
        assert handle.sync_pwrite(four, os.path.join(path, "below")) == -1
        assert handle.write(four, os.path.dirname(path), False) == -1
        handle.write(torch.zeros(3, dtype=torch.uint8), path, False)
        caplog.clear()
        assert handle.sync_pread(four, path) == -1
        assert "opened as a file of 4 bytes, but it has 3" in caplog.text
        assert handle.async_pread(four, path) == -1
        assert handle.read(four, path, False) == -1
        assert handle.read(four[:2], path, False) == -1
        assert "exactly the 2 of the buffer" in caplog.text
    with pytest.raises(AssertionError):
        handle.wait()


def test_bytes_that_do_not_divide_among_threads_are_refused(path, caplog):
    handle = dsl.ops.aio.aio_handle(intra_op_parallelism=2)
    assert handle.sync_pwrite(torch.zeros(3, dtype=torch.uint8), path) == -1
    assert "do not divide by intra_op_parallelism=2" in caplog.text
    assert handle.sync_pwrite(torch.zeros(4, dtype=torch.uint8), path) == 1


def test_validation_finds_a_difference(handle, path, caplog, monkeypatch):
    def write(self, tensor, file, offset):
        return real(self, torch.zeros_like(tensor), file, offset)

    real = handle_module.AsyncIO.write
    monkeypatch.setattr(handle_module.AsyncIO, "write", write)
    assert handle.write(torch.ones(5), path, False) == 0
    assert handle.write(torch.ones(5), path, True) == -1
    assert "differ" in caplog.text
    assert handle.pwrite(torch.ones(5), path, True, True) == 0
    with pytest.raises(FileIOError, match="differ"):
        handle.wait()


def test_an_asynchronous_failure_is_raised_by_wait(handle, path):
    handle.write(numbers(10), path, False)
    fd = os.open("/dev/full", os.O_RDWR)
    assert handle.async_pwrite(numbers(4096), fd) == 0
    assert handle.async_pwrite(numbers(10), path) == 0
    with pytest.raises(FileIOError, match="no room"):
        handle.wait()
    os.close(fd)
    with pytest.raises(AssertionError):
        handle.wait()


def test_threads_share_a_handle(handle, tmp_path):
    for k in range(4):
        (tmp_path / str(k)).write_bytes(bytes_of(numbers(50_000, k)))

    def read(k: int) -> bool:
        back = torch.zeros(50_000, dtype=torch.uint8)
        return all(
            handle.sync_pread(back.zero_(), str(tmp_path / str(k))) == 1 and torch.equal(back, numbers(50_000, k))
            for _ in range(10)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))


def test_the_wear_of_disks_is_spoken_of_once(path, caplog):
    handle_module._speak_of_wear.cache_clear()
    handle = dsl.ops.aio.aio_handle()
    for _ in range(3):
        handle.sync_pwrite(torch.zeros(4), path)
    assert caplog.text.count("endurance") == 1


# Page-locked memory


def locked_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmLck:"))


def test_locked_memory_is_shared_and_its_views_count(path):
    handle, other = dsl.ops.aio.aio_handle(), dsl.ops.aio.aio_handle()
    before = locked_kib()
    tensor = handle.new_cpu_locked_tensor(100_000, torch.zeros(0, dtype=torch.bfloat16))
    if locked_kib() == before:
        pytest.skip("memory cannot be locked here")
    assert tensor.shape == (100_000,)
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() % 4096 == 0
    assert locked_kib() >= before + 195
    assert other.is_pinned(tensor)
    assert other.is_pinned(tensor.narrow(0, 500, 1000).view(-1))
    assert not other.is_pinned(torch.zeros(5))
    assert handle.sync_pwrite(tensor, path) == 1
    assert not other.free_cpu_locked_tensor(torch.zeros(5))
    assert other.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert locked_kib() == before
    tensor.fill_(1)  # it is memory still
    dropped = handle.new_cpu_locked_tensor(100_000, tensor)
    address = dropped.data_ptr()
    del dropped
    assert locked_kib() == before
    assert address not in handle_module.locked_memory()._sizes
    assert handle.new_cpu_locked_tensor(0, tensor).shape == (0,)


def test_without_the_right_to_lock_memory_is_ordinary_and_one_warning_says_so():
    code = (
        "import os, resource, warnings, torch; from ds_lightning.ops import aio\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "if os.getuid() == 0: os.setuid(12345)\n"
        "handle = aio.aio_handle(engine='python')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    tensors = [handle.new_cpu_locked_tensor(1000, torch.zeros(0)) for _ in range(3)]\n"
        "assert not any(map(handle.is_pinned, tensors))\n"
        "assert not handle.free_cpu_locked_tensor(tensors[0])\n"
        "assert all(tensor.fill_(2).sum() == 2000 for tensor in tensors)\n"
        "print(*[warning.message for warning in caught], sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    (warning,) = done.stdout.splitlines()
    assert "4000 bytes could not be page-locked" in warning
    assert "limited to 0 bytes" in warning
