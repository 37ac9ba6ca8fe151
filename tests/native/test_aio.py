"""Every engine of file I/O moves exactly the bytes that plain file I/O would, whatever size, address and offset."""

import gc
import os
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import ds_lightning as dsl
from ds_lightning.config.schema.offload import AioConfig
from ds_lightning.errors import ConfigError, NativeOpError
from ds_lightning.ops import aio
from ds_lightning.ops.aio import choice, memory
from ds_lightning.ops.aio.python_engine import cut
from ds_lightning.ops.aio.request import Request
from tests.native.aio_common import (
    ENGINES,
    PAGE,
    SIZES,
    bytes_of,
    held,
    in_file,
    need,
    numbers,
    placed,
    soon_held,
)

OPTIONS = {
    "default": {},
    "small": {"block_size": 5000, "queue_depth": 3, "intra_op_parallelism": 2},
    "sequential": {"block_size": 8192, "queue_depth": 4, "single_submit": True, "overlap_events": False},
}


@pytest.fixture(params=ENGINES)
def engine(request):
    return need(request.param)


@pytest.fixture
def io(engine):
    with aio.AsyncIO(engine=engine) as io:
        yield io


# Bytes


@pytest.mark.parametrize(
    ("options", "direct"),
    [("default", True), ("default", False), ("small", True), ("sequential", True)],
    ids=["default", "cached", "small", "sequential"],
)
def test_bytes_are_exact_at_every_size_address_and_offset(engine, direct, options, tmp_path):
    path = tmp_path / "file"
    with aio.AsyncIO(engine=engine, **OPTIONS[options]) as io, io.open(path, "w+", direct=direct) as file:
        assert file.direct is not bool(file.why_not_direct)
        assert not (file.direct and not direct)
        for nbytes in SIZES:
            for skew in (0, 1, 64, 512):
                for offset in (0, 1, 512, PAGE, 3 * PAGE - 1):
                    values = placed(numbers(nbytes, offset + skew), skew)
                    io.write(values, file, offset).wait()
                    assert in_file(path, offset, nbytes) == bytes_of(values), (nbytes, skew, offset)
                    back = placed(torch.zeros_like(values), skew)
                    io.read(back, file, offset).wait()
                    assert torch.equal(back, values), (nbytes, skew, offset)


def test_bytes_around_a_transfer_stay(io, tmp_path):
    path = tmp_path / "file"
    around = numbers(6 * PAGE)
    for offset, nbytes in ((1, 1), (PAGE - 1, 2), (PAGE, PAGE), (100, 3 * PAGE), (2 * PAGE, 2 * PAGE + 7)):
        path.write_bytes(bytes_of(around))
        expected = around.clone()
        expected[offset : offset + nbytes] = new = numbers(nbytes, 1)
        with io.open(path, "r+") as file:
            io.write(new, file, offset).wait()
        assert path.read_bytes() == bytes_of(expected)
        room = torch.full((6 * PAGE + 2,), 7, dtype=torch.uint8)
        with io.open(path) as file:
            io.read(room[1 : 1 + nbytes], file, offset).wait()
        assert torch.equal(room[1 : 1 + nbytes], new)
        assert room[0] == 7
        assert (room[1 + nbytes :] == 7).all()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64],
    ids=str,
)
def test_tensors_of_any_dtype_and_shape(io, dtype, tmp_path):
    with io.open(tmp_path / "file", "w+") as file:
        for shape in ((), (0, 3), (1,), (513,), (31, 67)):
            values = torch.randn(shape, dtype=torch.float64).to(dtype)
            back = torch.zeros(shape, dtype=dtype)
            io.write(values, file, 3).wait()
            io.read(back, file, 3).wait()
            assert torch.equal(back, values)
        part = torch.zeros(4, 100, dtype=dtype)
        io.write(torch.ones(100, dtype=dtype), file).wait()
        io.read(part[2], file).wait()
        assert part.sum() == part[2].sum()
        assert part[2].all()


def test_a_read_counts_as_a_change_in_place(io, tmp_path):
    with io.open(tmp_path / "file", "w+", nbytes=64) as file:
        values = torch.ones(16, requires_grad=True)
        squares = (values * values).sum()
        with torch.no_grad():
            io.read(values.detach(), file).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()


def test_pieces_cover_a_request_once_and_no_page_is_both_cached_and_direct():
    for offset in (0, 1, 4095, 4096, 4097, 8191):
        for nbytes in (0, 1, 4095, 4096, 4097, 20000):
            for block_size in (1, 4096, 5000, 1 << 20):
                request = Request(False, 0, nbytes, offset, 3, 4, PAGE, 512)
                pieces = list(cut(request, block_size))
                assert sorted(at + k for at, size, _ in pieces for k in (0, size)) == sorted(
                    [0] * bool(nbytes) + [at for at, _, _ in pieces if at] * 2 + [nbytes] * bool(nbytes)
                )
                for at, size, is_direct in pieces:
                    if is_direct:
                        assert (offset + at) % PAGE == size % PAGE == 0
                    else:
                        assert (offset + at) // PAGE == (offset + at + size - 1) // PAGE


# Memory


def test_memory_begins_at_a_page_and_goes_with_its_last_view():
    for nbytes in (0, 1, PAGE, (2 << 20) - 1, 5 << 20):
        tensor, mapping = memory.mapped(nbytes)
        gone = weakref.ref(mapping)
        del mapping
        assert tensor.dtype == torch.uint8
        assert tensor.shape == (nbytes,)
        assert tensor.untyped_storage().nbytes() == nbytes
        assert tensor.data_ptr() % PAGE == 0
        assert not tensor.any()
        view = tensor.fill_(3)[nbytes // 2 :].view(-1)
        del tensor
        if nbytes:
            gc.collect()
            assert gone() is not None
            assert (view == 3).all()
        del view
        gc.collect()
        assert gone() is None
    with pytest.raises(ValueError, match="negative"):
        aio.AsyncIO.empty(-1)


# Many at once


def test_many_transfers_are_in_flight_at_the_same_time(io, tmp_path):
    count, nbytes = 40, 30011
    values = [numbers(nbytes, k) for k in range(count)]
    with io.open(tmp_path / "file", "w+") as file:
        writes = [io.write(value, file, k * nbytes) for k, value in enumerate(values)]
        for transfer in reversed(writes):
            transfer.wait()
            assert transfer.done
        back = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
        reads = [io.read(room, file, k * nbytes) for k, room in enumerate(back)]
        for transfer in reads:
            transfer.wait()
        assert all(map(torch.equal, back, values))


def test_reads_and_writes_of_several_files_go_on_together(io, tmp_path):
    files = [io.open(tmp_path / str(k), "w+", nbytes=1 << 20) for k in range(4)]
    values = [numbers(1 << 20, k) for k in range(4)]
    for turn in range(3):
        rooms = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in files]
        write = io.write(values[turn], files[turn])
        reads = [io.read(rooms[k], files[k]) for k in range(turn)]
        for transfer in (*reads, write):
            transfer.wait()
        assert all(torch.equal(rooms[k], values[k]) for k in range(turn))
    for file in files:
        file.close()


def test_threads_share_one_io(io, tmp_path):
    def work(k: int) -> bool:
        with io.open(tmp_path / str(k % 3), "r+") as file:
            right = True
            for turn in range(10):
                values = numbers(20001, 100 * k + turn)
                back = torch.zeros_like(values)
                io.write(values, file, k * 20001).wait()
                io.read(back, file, k * 20001).wait()
                right = right and torch.equal(back, values)
        return right

    for k in range(3):
        (tmp_path / str(k)).touch()
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_several_threads_wait_for_one_transfer(io, tmp_path):
    with io.open(tmp_path / "file", "w+") as file, ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            transfer = io.write(numbers(100000), file)
            for waiting in [pool.submit(transfer.wait) for _ in range(4)]:
                waiting.result()


def test_other_python_threads_run_during_a_wait():
    # A pipe that stays empty until the other thread writes: with the lock held, both would wait for ever.
    reading, writing = os.pipe()
    room = torch.zeros(4, dtype=torch.uint8)
    with (
        aio.AsyncIO(engine=need("io_uring")) as io,
        io.open(f"/proc/self/fd/{reading}", direct=False) as file,
        ThreadPoolExecutor(1) as pool,
    ):
        transfer = io.read(room, file)
        assert not transfer.done
        pool.submit(lambda: (time.sleep(0.05), os.write(writing, b"wxyz")))
        transfer.wait()
    assert bytes_of(room) == b"wxyz"
    os.close(reading)
    os.close(writing)


# Ends


def test_waiting_again_or_for_nothing_is_fine(io, tmp_path):
    with io.open(tmp_path / "file", "w+") as file:
        transfer = io.write(torch.ones(10), file)
        transfer.wait()
        transfer.wait()
        assert transfer.done
        assert transfer.error is None
        nothing = io.write(torch.ones(0), file)
        assert nothing.done
        nothing.wait()
    file.close()
    io.close()
    io.close()


def test_200_cycles_leave_no_descriptors_and_no_threads(engine, tmp_path):
    values, back = numbers(9000), torch.zeros(9000, dtype=torch.uint8)

    def cycle(io, k):
        with io.open(tmp_path / "file", "w+", nbytes=9000) as file:
            io.write(values, file).wait()
            io.read(back.zero_(), file).wait()
        assert torch.equal(back, values)

    gc.collect()
    without = held()
    with aio.AsyncIO(engine=engine) as io:
        for k in range(20):  # Python's pool begins its threads one by one
            cycle(io, k)
        before = held()
        for k in range(200):
            cycle(io, k)
        assert soon_held(before)
    assert soon_held(without)
    for k in range(20):
        with aio.AsyncIO(engine=engine, intra_op_parallelism=2) as io:
            cycle(io, k)
    assert soon_held(without)


def test_memory_and_file_of_a_dropped_transfer_live_until_it_is_done(engine, tmp_path):
    io = aio.AsyncIO(engine=engine, block_size=4096, queue_depth=1)
    gone = []
    for k in range(8):
        values, mapping = memory.mapped(1 << 20)
        values.fill_(k)
        gone.append(weakref.ref(mapping))
        file = io.open(tmp_path / str(k), "w+")
        io.write(values, file)
        del values, mapping, file
    gc.collect()
    del io  # waits
    gc.collect()
    assert all(reference() is None for reference in gone)
    for k in range(8):
        assert (tmp_path / str(k)).read_bytes() == bytes([k]) * (1 << 20)


def test_closing_a_file_or_an_io_waits_for_what_is_under_way(engine, tmp_path):
    io = aio.AsyncIO(engine=engine, block_size=4096, queue_depth=1)
    file = io.open(tmp_path / "file", "w+")
    transfers = [io.write(torch.full((1 << 18,), k, dtype=torch.uint8), file, k << 18) for k in range(4)]
    file.close()
    assert all(transfer.done for transfer in transfers)
    assert (tmp_path / "file").stat().st_size == 1 << 20
    other = io.open(tmp_path / "other", "w+")
    transfer = io.write(numbers(1 << 20), other)
    io.close()
    assert transfer.done
    assert (tmp_path / "other").read_bytes() == bytes_of(numbers(1 << 20))
    other.close()


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_process_may_end_with_transfers_in_flight(engine, tmp_path):
    code = (
        "import sys, torch; from ds_lightning.ops import aio; io = aio.AsyncIO(4096, 1, engine=sys.argv[1])\n"
        "file = io.open(sys.argv[2], 'w+')\n"
        "for k in range(4): io.write(torch.full((1 << 20,), k, dtype=torch.uint8), file, k << 20)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, engine, tmp_path / "file"]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([k]) * (1 << 20) for k in range(4))


def test_a_forked_child_is_told_and_may_end(engine, tmp_path):
    io = aio.AsyncIO(engine=engine)
    file = io.open(tmp_path / "file", "w+")
    transfer = io.write(numbers(100), file)
    with pytest.warns(DeprecationWarning, match="fork") if sys.version_info >= (3, 12) else nullcontext():
        child = os.fork()
    if child == 0:
        told = 0
        for action in (lambda: io.write(numbers(100), file), transfer.wait, io.close):
            try:
                action()
            except RuntimeError as error:
                told += "forked" in str(error)
        del io
        gc.collect()
        with (
            aio.AsyncIO(engine="threads" if engine != "python" else engine) as own,
            own.open(tmp_path / "own", "w+") as f,
        ):
            own.write(numbers(10), f).wait()
        os._exit(told)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    transfer.wait()
    io.close()
    file.close()


# Choices


def test_the_best_engine_that_runs_is_chosen_and_says_why_not_a_better_one(monkeypatch):
    need("threads")
    monkeypatch.delenv(choice.SWITCH, raising=False)
    forbidden = []

    class Engine(choice.NativeEngine):
        def __init__(self, kind, options):
            if kind in forbidden:
                raise NativeOpError(f"{kind} is forbidden here")
            super().__init__(kind if kind == "threads" else "threads", options)

    monkeypatch.setattr(choice, "NativeEngine", Engine)
    for expected in ("io_uring", "libaio", "threads", "python"):
        with aio.AsyncIO() as io:
            assert io.engine == expected
            assert io.why == "; ".join(f"no {kind}: {kind} is forbidden here" for kind in forbidden)
        forbidden.append(expected)


def test_the_environment_stands_in_for_auto(monkeypatch):
    monkeypatch.setenv(choice.SWITCH, "python")
    with aio.AsyncIO() as io:
        assert io.engine == "python"
        assert choice.SWITCH in io.why
    monkeypatch.setenv(choice.SWITCH, "smoke")
    with pytest.raises(ValueError, match="DS_LIGHTNING_AIO=smoke is not one of auto, io_uring"):
        aio.AsyncIO()
    with aio.AsyncIO(engine="python") as io:
        assert io.engine == "python"


def test_without_native_code_python_serves_and_one_warning_says_so(tmp_path):
    code = (
        "import sys, warnings, torch; from ds_lightning.ops import aio\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3):\n"
        "        with aio.AsyncIO() as io, io.open(sys.argv[1], 'w+') as file:\n"
        "            io.write(torch.arange(5000), file, 3).wait()\n"
        "            back = torch.zeros(5000, dtype=torch.int64); io.read(back, file, 3).wait()\n"
        "            assert io.engine == 'python' and torch.equal(back, torch.arange(5000))\n"
        "print(*[warning.message for warning in caught], sep='\\n')\n"
        "try: aio.AsyncIO(engine='io_uring')\n"
        "except Exception as error: print(error)"
    )
    environment = {**os.environ, "DS_LIGHTNING_NATIVE": "0", choice.SWITCH: ""}
    command = [sys.executable, "-c", code, tmp_path / "file"]
    done = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True, text=True)
    warning, refusal = done.stdout.splitlines()
    assert "Python threads" in warning
    assert "DS_LIGHTNING_NATIVE=0" in warning
    assert "engine='io_uring' does not run here: DS_LIGHTNING_NATIVE=0" in refusal


def test_a_configuration_makes_an_io():
    config = AioConfig(block_size=4096, queue_depth=3, intra_op_parallelism=2, single_submit=True, overlap_events=False)
    with aio.AsyncIO.from_config(config.frozen(), "python") as io:
        assert io.options == aio.async_io.Options(4096, 3, True, False, 2)
    with pytest.raises(ConfigError, match=r"aio.use_gds=true is not supported yet"):
        aio.AsyncIO.from_config(AioConfig(use_gds=True))
    for name in ("block_size", "queue_depth", "intra_op_parallelism"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            aio.AsyncIO(**{name: 0})


def test_it_is_reached_from_the_package():
    assert dsl.ops.aio.AsyncIO is aio.AsyncIO
    assert dsl.ops.aio.aio_handle is aio.AioHandle


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [0, 1, 4097, (1 << 20) + 4])
def test_tensors_on_a_gpu_go_by_way_of_the_host(io, nbytes, tmp_path):
    values = numbers(nbytes).cuda()
    back = torch.zeros_like(values)
    with io.open(tmp_path / "file", "w+") as file:
        io.write(values, file, 5).wait()
        io.read(back, file, 5).wait()
    assert torch.equal(back, values)
