"""The pool of ranks itself: results in order, failures in words, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.pool import RankError, fresh_ranks, run_ranks


def rank_and_sum(value):
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total


def process_id():
    return os.getpid()


def random_numbers():
    return torch.rand(3)


def fail_in_rank(rank):
    if dist.get_rank() == rank:
        found = 41
        assert found == 42, "the answer is off"
    sleep_long()


def fail_instead_of_reducing(rank):
    if dist.get_rank() == rank:
        _ = 1 / 0
    dist.all_reduce(torch.ones(1))


def fail_everywhere():
    raise ValueError(f"no good in rank {dist.get_rank()}")


def wait_in_rank(rank):
    print(f"rank {dist.get_rank()} is here")
    if dist.get_rank() == rank:
        sleep_long()


def sleep_long():
    time.sleep(600)


def die_in_rank(rank, signal_number):
    print("last words", flush=True)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal_number)
    return "alive"


def change_surroundings():
    os.environ["POOL_TEST"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)


def surroundings():
    return os.environ.get("POOL_TEST"), os.getcwd(), torch.get_default_dtype()


def leave_without_group():
    dist.destroy_process_group()


def rank_from_environment():
    return int(os.environ["RANK"]), dist.is_initialized()


def sum_of_loaded():
    loader = torch.utils.data.DataLoader(range(10), num_workers=1)
    return sum(int(batch) for batch in loader)


def return_a_lambda():
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_the_order_of_ranks(world_size):
    results = run_ranks(rank_and_sum, world_size, value=1.0)
    expected = torch.tensor([sum(1.0 + rank for rank in range(world_size))])
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(total, expected) for _, total in results)


def test_the_processes_are_used_again_and_a_call_is_cheap():
    first = run_ranks(process_id, 2)
    start = time.monotonic()
    for _ in range(10):
        assert run_ranks(process_id, 2) == first
    assert time.monotonic() - start < 5


def test_seeds_are_the_same_in_every_call_and_rank():
    first, second = run_ranks(random_numbers, 2), run_ranks(random_numbers, 2)
    assert all(torch.equal(first[0], other) for other in (first[1], *second))


def test_surroundings_are_put_back():
    before = run_ranks(surroundings, 2)
    run_ranks(change_surroundings, 2)
    assert run_ranks(surroundings, 2) == before


def test_a_destroyed_group_does_not_spoil_the_next_call():
    run_ranks(leave_without_group, 2)
    assert len(run_ranks(rank_and_sum, 2, 0.0)) == 2


def test_the_first_failing_rank_is_shown_and_the_others_are_not_waited_for():
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_in_rank, 2, 1)
    assert time.monotonic() - start < 20
    report = str(caught.value)
    assert "failed first in rank 1 of 2" in report
    assert "in fail_in_rank" in report
    assert "AssertionError: the answer is off" in report
    assert "found = 41" in report
    assert "Had not returned by then: rank 0." in report
    assert len(run_ranks(rank_and_sum, 2, 0.0)) == 2


def test_ranks_that_fail_because_another_failed_come_second():
    with pytest.raises(RankError) as caught:
        run_ranks(fail_instead_of_reducing, 2, 1)
    report = str(caught.value)
    assert "failed first in rank 1 of 2" in report
    assert "ZeroDivisionError" in report
    assert report.count("Traceback") == 1


def test_failures_after_the_first_are_told_in_one_line_each():
    with pytest.raises(RankError) as caught:
        run_ranks(fail_everywhere, 2)
    report = str(caught.value)
    assert report.count("Traceback") == 1
    assert report.count("ValueError: no good in rank") == 2
    assert "failed later: ValueError" in report


def test_a_timeout_tells_where_the_ranks_hang():
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(wait_in_rank, 2, 1, timeout=3)
    assert time.monotonic() - start < 20
    report = str(caught.value)
    assert "rank 1 of 2 did not return within 3 s" in report
    assert "in sleep_long" in report
    assert "rank 1 is here" in report


def test_a_killed_rank_is_told_with_its_signal_and_output():
    with pytest.raises(RankError) as caught:
        run_ranks(die_in_rank, 2, 1, int(signal.SIGSEGV))
    report = str(caught.value)
    assert "failed first in rank 1" in report
    assert "killed by SIGSEGV" in report
    assert "last words" in report


def test_ranks_may_start_processes_of_their_own():
    assert run_ranks(sum_of_loaded, 2) == [45, 45]


def test_a_result_that_cannot_be_sent_is_an_error_in_words():
    with pytest.raises(RankError, match="return_a_lambda"):
        run_ranks(return_a_lambda, 1)


def test_a_function_inside_a_function_is_refused():
    def inner():
        return 1

    with pytest.raises(TypeError, match="Move it to the top level"):
        run_ranks(inner, 1)


def test_fresh_ranks_report_how_each_process_ended():
    outcomes = fresh_ranks(die_in_rank, 2, 1, int(signal.SIGKILL))
    assert [outcome.exitcode for outcome in outcomes] == [0, -signal.SIGKILL]
    assert [outcome.result for outcome in outcomes] == ["alive", None]
    assert all("last words" in outcome.output for outcome in outcomes)
    assert not any(outcome.error or outcome.timed_out for outcome in outcomes)


def test_fresh_ranks_report_what_raised_and_what_hung():
    raised = fresh_ranks(fail_everywhere, 1)[0]
    assert "ValueError: no good in rank 0" in raised.error
    returned, hung = fresh_ranks(wait_in_rank, 2, 1, timeout=4)
    assert not returned.timed_out
    assert hung.timed_out
    assert "in sleep_long" in hung.output


def test_fresh_ranks_can_leave_the_process_group_to_the_function():
    outcomes = fresh_ranks(rank_from_environment, 2, init_process_group=False)
    assert [outcome.result for outcome in outcomes] == [(0, False), (1, False)]


def test_no_worker_outlives_a_killed_test_process(tmp_path):
    script = f"""
import os, threading
from tests import pool
from tests.dist.test_pool import process_id, sleep_long
from tests.pool import run_ranks
pool.PRELOAD[:] = ["torch", "torch.distributed"]  # a quicker start
with open({str(tmp_path / "pids")!r}, "w") as file:
    file.write(" ".join(map(str, run_ranks(process_id, 2))))
threading.Timer(0.5, lambda: os.kill(os.getpid(), 9)).start()
run_ranks(sleep_long, 2)
"""
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=100)
    assert result.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    end = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < end, "workers are left"
        time.sleep(0.05)


def _runs(pid):
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
