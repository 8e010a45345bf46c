"""Worker processes: order of results, failures, signals."""

import os
import signal
import time

import pytest

from trainkit.data.prepare import run_jobs
from trainkit.errors import TrainkitError, UsageError


def double(number):
    return 2 * number


def fail_at_three(number):
    if number == 3:
        raise UsageError("three is wrong", hint="choose another")
    time.sleep(0 if number < 3 else 30)
    return number


def signal_own_parent_group(number):
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        os.kill(os.getpid(), sent)
    return number


def kill_self(number):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_in_the_order_of_the_jobs(workers):
    ended = []
    assert run_jobs(double, list(range(20)), workers, ended.append) == [2 * number for number in range(20)]
    assert sorted(ended) == list(range(20))
    assert run_jobs(double, [], workers, ended.append) == []


def test_a_failure_does_not_wait_for_the_others():
    began = time.monotonic()
    with pytest.raises(UsageError, match="three is wrong") as caught:
        run_jobs(fail_at_three, list(range(10)), 2, lambda number: None)
    assert caught.value.hint == "choose another"
    assert time.monotonic() - began < 15


def test_signals_are_the_parents_business():
    assert run_jobs(signal_own_parent_group, [1, 2], 2, lambda number: None) == [1, 2]


def test_killed_worker():
    with pytest.raises(TrainkitError, match="a worker process was killed") as caught:
        run_jobs(kill_self, [1, 2], 2, lambda number: None)
    assert "fewer workers" in caught.value.hint
