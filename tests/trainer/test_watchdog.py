"""Hangs of real ranks: noticed, written down with their stacks, and blamed on the right one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.runs import log_text, make_attempt, start_workers
from trainkit.job.hangs import hang_verdict, read_hangs
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, read_json

pytestmark = pytest.mark.slow

OPTIONS = [
    "train.steps=100000",
    "train.global_batch_size=null",
    "requeue.hang_min_s=2",
    "requeue.hang_factor=2",
]

SLEEPER = """
import os, time
if os.environ.get("RANK") == "1":
    from trainkit.trainer.data.batches import PrefetchedBatches
    give = PrefetchedBatches.__next__
    num_given = 0
    def give_or_sleep(self):
        global num_given
        num_given += 1
        while num_given == 8:
            time.sleep(1)
        return give(self)
    PrefetchedBatches.__next__ = give_or_sleep
"""
"""A sitecustomize.py: the data of rank 1 never comes at step 8."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.05)


@contextmanager
def ranks(
    attempt: AttemptDir, num_procs: int, env: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers that nobody supervises; they are killed at the end."""
    procs = start_workers(attempt, num_procs, env)
    try:
        yield procs
    finally:
        for proc in procs:
            proc.kill()
            proc.wait()


def plan_of(attempt: AttemptDir) -> LaunchPlan:
    return LaunchPlan.from_dict(read_json(attempt.plan_file))


def test_a_rank_that_waits_for_its_data_is_behind_those_that_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLEEPER)
    root = str(Path(__file__).parents[2])
    attempt = make_attempt(tmp_path / "run", OPTIONS, 3)
    with ranks(attempt, 3, {"PYTHONPATH": f"{tmp_path / 'site'}:{root}"}):
        wait_until(lambda: len(read_hangs(attempt)) == 3)
        wait_until(lambda: all(attempt.rank_stacks(rank).stat().st_size > 0 for rank in range(3)))
    records = read_hangs(attempt)
    assert [(record.step, record.phase) for record in records] == [
        (8, "forward"),
        (8, "data"),
        (8, "forward"),
    ], log_text(attempt)
    assert all(1.0 <= record.waited_s < 5.0 and record.limit_s >= 2.0 for record in records)
    assert all(0.0 < record.usual_s < 2.0 for record in records)
    verdict = hang_verdict(attempt, plan_of(attempt), records)
    assert (verdict["rank"], verdict["step"]) == (1, 8)
    assert "in data" in verdict["message"]
    assert "give_or_sleep" in attempt.rank_stacks(1).read_text()
    assert "in data" in attempt.rank_log(1).read_text()
    trace = json.loads(attempt.rank_stacks(0).with_suffix(".collectives.json").read_text())
    assert trace["entries"][-1]["state"] != "completed"
