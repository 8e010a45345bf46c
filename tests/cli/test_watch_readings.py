"""How often `trainkit watch` reads files and asks Slurm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trainkit.backends import jobs as jobs_of_runs
from trainkit.backends.jobs import SlurmPoller
from trainkit.cli.watch_screen import read_again
from trainkit.slurm.jobs import JobInfo
from trainkit.slurm.states import JobState


class Slurm:
    """Answers queries and counts them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.is_reachable = True

    def query(self, ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, JobInfo] | None:
        self.asked.append(tuple(ids))
        if not self.is_reachable:
            warn("squeue cannot reach Slurm")
            return None
        return {job_id: JobInfo(job_id, JobState.RUNNING) for job_id in ids}


def begin(read: Callable[[], object], show: Callable[[object], object], interval_s: float) -> Any:
    ended, is_on = threading.Event(), threading.Event()
    is_on.set()
    args = (read, show, interval_s, ended, is_on)
    threading.Thread(target=read_again, args=args, daemon=True).start()
    return ended, is_on


def wait_for(is_true: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_slurm_is_asked_once_for_many_readings() -> None:
    slurm = Slurm()
    poller = SlurmPoller(60.0, slurm.query)
    assert poller.jobs([]) == {}
    for _ in range(100):
        jobs = poller.jobs(["1", "2"])
        assert jobs is not None
        assert list(jobs) == ["1", "2"]
    assert slurm.asked == [("1", "2")]
    assert poller.problem is None


def test_an_answer_is_about_all_jobs_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_of_runs, "MIN_QUERY_INTERVAL_S", 0.0)
    slurm = Slurm()
    poller = SlurmPoller(60.0, slurm.query)
    assert set(poller.jobs(["1"]) or {}) == {"1"}
    assert set(poller.jobs(["1", "2"]) or {}) == {"1", "2"}
    assert set(poller.jobs(["2"]) or {}) >= {"2"}


def test_an_outage_says_since_when_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_of_runs, "MIN_QUERY_INTERVAL_S", 0.0)
    slurm = Slurm()
    slurm.is_reachable = False
    poller = SlurmPoller(0.01, slurm.query)
    assert poller.jobs(["1"]) is None
    first = poller.problem
    assert first is not None
    assert first.startswith("Slurm cannot be reached since ")
    assert first.endswith("squeue cannot reach Slurm")
    count = len(slurm.asked)
    wait_for(lambda: poller.jobs(["1"]) or len(slurm.asked) > count + 2)
    assert poller.problem == first
    slurm.is_reachable = True
    wait_for(lambda: poller.jobs(["1"]))
    assert poller.problem is None


def test_errors_of_a_reading_are_its_result() -> None:
    results: list[object] = []
    seen = threading.Event()

    def read() -> object:
        if len(results) == 1:
            raise FileNotFoundError(2, "No such file or directory", "metrics.jsonl")
        return "read"

    def show(result: object) -> None:
        results.append(result)
        if len(results) == 3:
            seen.set()

    ended, _ = begin(read, show, 0.01)
    assert seen.wait(20)
    ended.set()
    assert results[0] == results[2] == "read"
    assert isinstance(results[1], FileNotFoundError)


def test_readings_that_take_long_are_seldom() -> None:
    """A reading of 50 ms is repeated once a second, whatever the interval."""
    times: list[float] = []

    def read() -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.05:
            pass
        times.append(time.monotonic())

    ended, _ = begin(read, lambda result: None, 0.001)
    wait_for(lambda: len(times) == 2)
    ended.set()
    assert times[1] - times[0] >= 1.0


def test_jobs_of_an_earlier_answer_are_not_asked_again_at_once() -> None:
    slurm = Slurm()
    poller = SlurmPoller(60.0, slurm.query)
    for ids in (["1", "2"], ["1"], ["2"], ["1", "2"]):
        assert set(ids) <= set(poller.jobs(ids) or {})
    assert slurm.asked == [("1", "2")]


def test_a_paused_reader_reads_nothing() -> None:
    count = [0]

    def read() -> None:
        count[0] += 1

    ended, is_on = begin(read, lambda result: None, 0.001)
    wait_for(lambda: count[0] > 2)
    is_on.clear()
    time.sleep(0.1)
    seen = count[0]
    time.sleep(0.1)
    assert count[0] == seen
    is_on.set()
    wait_for(lambda: count[0] > seen)
    ended.set()
