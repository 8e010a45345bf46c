"""Tests hangs of real ranks: detected, recorded with their stacks, and blamed on the right rank."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.hangs import Case, run_case
from tests.support.programs import is_running
from tests.support.runs import fork_workers, free_port, log_text, losses, make_attempt, site, wait_until
from tests.support.said import said
from trainkit.job.failure.stacks import gather
from trainkit.job.hangs import hang_failure, read_hangs
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import AttemptDir

pytestmark = pytest.mark.slow

OPTIONS = [
    "train.steps=100000",
    "train.global_batch_size=null",
    "requeue.hang_min_s=2",
    "requeue.hang_factor=2",
]


def let_rank_1_sleep() -> None:
    """Let the data of rank 1 never arrive at step 8."""
    from trainkit.trainer.causal_lm import PrefetchedBatches

    give, num_given = PrefetchedBatches.__next__, 0

    def give_or_sleep(batches: PrefetchedBatches) -> Any:
        nonlocal num_given
        num_given += 1
        while num_given == 8:
            time.sleep(1)
        return give(batches)

    if os.environ["RANK"] == "1":
        PrefetchedBatches.__next__ = give_or_sleep  # type: ignore[method-assign]


def plan_of(attempt: AttemptDir) -> LaunchPlan:
    return LaunchPlan.from_dict(read_json(attempt.plan_file))


def test_a_rank_that_waits_for_its_data_is_behind_those_that_wait_for_it(tmp_path):
    attempt = make_attempt(tmp_path / "run", OPTIONS, 3)
    traces = [attempt.rank_stacks(rank).with_suffix(".collectives.json") for rank in range(3)]
    workers = fork_workers(attempt, 3, first=let_rank_1_sleep)  # no supervisor watches these ranks
    try:
        wait_until(lambda: len(read_hangs(attempt)) == 3)
        wait_until(lambda: all(trace.exists() for trace in traces))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    records = read_hangs(attempt)
    assert [(record.step, record.phase) for record in records] == [
        (8, "forward"),
        (8, "data"),
        (8, "forward"),
    ], log_text(attempt)
    assert all(record.waited_s >= 1.0 and record.limit_s >= 2.0 for record in records)
    assert min(record.waited_s for record in records) < 5.0  # one rank may have been suspended itself
    assert all(0.0 < record.usual_s < 2.0 for record in records)
    verdict = hang_failure(attempt, plan_of(attempt), records)
    assert (verdict.rank, verdict.step) == (1, 8)
    said(re.sub(r"(\d+\.)?\d+ s|(?<=:)\d+", "N", verdict.message))
    assert "give_or_sleep" in attempt.rank_stacks(1).read_text()
    assert "in data" in attempt.rank_log(1).read_text()
    trace = json.loads(traces[0].read_text())
    assert trace["entries"][-1]["state"] != "completed"


def test_a_rank_that_calls_something_else_is_named():
    """The others wait for the rank in a collective that it has called too."""
    result, text = run_case(Case("order", "loop", 3, (1,)))
    assert result == "right", text
    assert re.search(r"rank 1 .*\ball_gather \[4\].* ranks 0,2 .*\ball_reduce \[16\]", text), text


HOLDER = """
import os, sys
if os.environ.get("RANK") == "1" and "trainkit.trainer" in sys.orig_argv:
    import ctypes
    from trainkit.trainer.causal_lm import PrefetchedBatches
    give = PrefetchedBatches.__next__
    num_given = 0
    def give_or_hold(self):
        global num_given
        num_given += 1
        if num_given == 8:
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        return give(self)
    PrefetchedBatches.__next__ = give_or_hold
"""
"""A sitecustomize.py that makes rank 1 wait forever in C, without releasing the interpreter's lock."""


@contextmanager
def agent(attempt: AttemptDir, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the agent of node 0 as a supervisor does, and kill it and its workers at the end."""
    argv = [sys.executable, "-m", "trainkit.job.node.agent", str(attempt.run.path), "--attempt", "1"]
    argv += ["--node-rank", "0", "--master-port", str(free_port())]
    with attempt.node_log(0).open("wb") as log:
        proc = subprocess.Popen(argv, env={**os.environ, **env}, stdout=log, stderr=log)
    try:
        yield proc
    finally:
        proc.kill()  # the workers die with the agent
        proc.wait()


def test_a_rank_that_cannot_say_anything_is_made_to_write_its_stacks(tmp_path):
    """The Python threads of the rank never run again, so the agent uses the C handler of SIGQUIT."""
    env = site(tmp_path, HOLDER)
    attempt = make_attempt(tmp_path / "run", OPTIONS, 3)
    with agent(attempt, env):
        wait_until(lambda: len(read_hangs(attempt)) == 2)
        wait_until(lambda: "in give_or_hold" in attempt.rank_stacks(1).read_text())
        # The result is read before the ranks end, because a rank that loses its peer withdraws its record.
        verdict = hang_failure(attempt, plan_of(attempt), read_hangs(attempt))
    assert (verdict.rank, verdict.step, verdict.host) == (1, 8, socket.gethostname())
    silent = "does not respond"
    assert verdict.message.startswith(silent)
    assert "in give_or_hold" in attempt.rank_stacks(1).read_text()
    assert f"rank 1 {silent}" in attempt.node_log(0).read_text()


def test_ranks_say_where_they_are_and_train_on_until_the_run_goes_on_elsewhere(tmp_path):
    attempt = make_attempt(tmp_path / "run", OPTIONS, 2)
    with agent(attempt, {}) as proc:
        wait_until(lambda: len(losses(attempt.run.path)) >= 3)
        for _ in range(3):  # a rank has 3 s to answer
            replies = gather(attempt, 2, None, 60.0)
            if all(reply.how == "asked" for reply in replies):
                break
        assert [(reply.rank, reply.how) for reply in replies] == [(0, "asked"), (1, "asked")]
        for reply in replies:
            assert reply.step >= 3
            assert any("loop.py" in frame for frame in reply.main_stack)
        before = len(losses(attempt.run.path))
        wait_until(lambda: len(losses(attempt.run.path)) > before)
        assert proc.poll() is None
        newer = attempt.run.attempt(2)
        newer.create()
        time.sleep(2.5)
        assert proc.poll() is None, "an attempt that waits in a queue ends nobody"
        write_json(newer.rendezvous_file, {"port": 29500})
        proc.wait(timeout=120)
    assert "attempt 2" in attempt.node_log(0).read_text()
    wait_until(lambda: not any(is_running(reply.pid) for reply in replies))
    assert list(attempt.errors_dir.iterdir()) == [], "that is no failure"
