"""Tests a silent COMMAND: what it waits for, its notification, and when it is ended."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_tree import wait_for

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.capabilities.diagnose.diagnose import diagnose
from trainkit.capabilities.slow_ranks.policy import SlowRanksPlan
from trainkit.capabilities.slow_ranks.shown import notices_of, sentence
from trainkit.capabilities.slow_ranks.silence import SilenceWatch
from trainkit.job.failure.stacks import (
    STATE_PROBLEMS,
    LockFile,
    Reply,
    explain_silence,
    find_lock,
    find_requests,
)
from trainkit.job.hangs import HangRecord, hang_failure, missing_ranks, read_hangs
from trainkit.observe.status import read_status
from trainkit.plan.workload import Workload
from trainkit.run.events import Event, log_event, read_events
from trainkit.run.files import append_jsonl, parse_time, read_jsonl, to_json, utc_now, write_json
from trainkit.run.history import OwnedEvents, RunHistory
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir, RunDir

PLAN = launch_plan(workload=Workload(("train",)))
LOCK = LockFile("/cache/op/lock", "2026-01-01T00:00:00Z", is_certain=True)


class Watched:
    """A watch of an attempt with a fake clock and fake agents."""

    def __init__(self, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.attempt, self.now_s = attempt, 1000.0
        self.replies: list[Reply] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.watch = SilenceWatch(attempt, PLAN.with_part(SlowRanksPlan(**policy)))

    def wait(self, seconds: float) -> list[HangRecord]:
        for _ in range(round(seconds / 10)):
            self.now_s += 10.0
            self.watch.poll()
            for request in find_requests(self.attempt):
                for reply in self.replies:
                    request.reply(reply)
        return read_hangs(self.attempt)

    def events(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.attempt.run.events_file))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path / "rank-study").attempt(1)
    attempt.run.path.mkdir()
    attempt.create()
    for rank in range(4):
        attempt.rank_log(rank).touch()
    return attempt


def test_a_silent_command_hangs(attempt, monkeypatch):
    watched, run = Watched(attempt, monkeypatch, silence_s=60.0), attempt.run
    for change in (attempt.rank_log(3), attempt.node_log(1), run.metrics_file, run.heartbeat_file):
        assert watched.wait(50) == []
        change.write_text("x")
    watched.now_s += 3600.0
    watched.watch.poll()
    assert watched.wait(50) == []
    found = watched.wait(30)
    assert missing_ranks(PLAN, found) == []
    failure = hang_failure(attempt, PLAN, found)
    assert failure.host is None
    assert failure.final is False
    said(failure.message)
    assert [event["event"] for event in watched.events()] == [], "it has printed, and no lock is in its way"


def test_ranks_wait_for_one_in_the_debugger(attempt, monkeypatch):
    watched = Watched(attempt, monkeypatch, silence_s=60.0)
    (attempt.path / "debugger").mkdir()
    record = attempt.path / "debugger" / "rank-0002.json"
    record.touch()
    assert watched.wait(1000) == []
    record.unlink()
    assert watched.wait(50) == []
    assert watched.wait(30) != []


def test_before_the_first_line_silence_is_reported_and_ends_nothing(attempt, monkeypatch):
    watched = Watched(attempt, monkeypatch)
    watched.replies = [Reply(rank, "a", 7, "py-spy", {"Main": ["read (disk.py:3)"]}) for rank in range(4)]
    attempt.node_log(0).write_text("node 0 is a; eth0")
    assert watched.wait(600) == []
    assert watched.events() == []
    assert watched.wait(3600) == []
    [event] = watched.events()
    assert (event["event"], event["rank"], event["lock"]) == ("silent", 0, None)
    said(event["reason"])
    attempt.rank_log(2).write_text("step 1")
    watched.wait(20)
    assert [event["event"] for event in watched.events()] == ["silent", "silent_over"]
    watched.wait(3600)
    assert len(watched.events()) == 2, "a script that prints seldom"


WAITS = "all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:3)"
STEP, LOG, LOAD = "step (/me/train.py:9)", "log (/me/train.py:30)", "load (/me/data.py:3)"


@pytest.mark.parametrize(
    ("stacks", "rank"),
    [
        ([[WAITS, STEP]] * 3 + [[LOAD]], 3),
        ([[WAITS, STEP]] * 3 + [[WAITS, LOG]], None),
        ([[WAITS, STEP]] * 3 + [None], 3),
        ([[WAITS]] + [[LOAD]] * 3, 0),
        ([[WAITS]] * 2 + [[LOAD], []], 0),
    ],
)
def test_without_records_the_stacks_name_who_waits_for_nobody(attempt, monkeypatch, stacks, rank):
    watched = Watched(attempt, monkeypatch, silence_s=60.0)
    for number, stack in enumerate(stacks):
        stopped = STATE_PROBLEMS["T"] if stack is None else "no py-spy"
        watched.replies.append(Reply(number, "a", 7, "", {"Main": stack} if stack else {}, problem=stopped))
    found = watched.wait(120)
    failure = hang_failure(attempt, PLAN, found)
    assert failure.rank == rank
    said(failure.message)
    assert rank == 0 or failure.message in watched.events()[0]["reason"]
    assert (failure.host is None) is (rank != 3)
    # A rank can wait for its GPU in any function.
    assert hang_failure(attempt, replace(PLAN, device="cuda"), found).host is None or stacks[3] is None


def test_a_lock_in_the_way_is_reported_after_the_first_line_too(attempt, monkeypatch):
    watched = Watched(attempt, monkeypatch)
    watched.replies = [Reply(rank, "a", 7, "", problem="no py-spy", lock=LOCK) for rank in range(4)]
    attempt.rank_log(0).write_text("Using /cache as PyTorch extensions root...")
    watched.wait(700)
    [event] = watched.events()
    assert event["lock"] == "/cache/op/lock"
    said(event["reason"])


def test_ranks_that_compile_wait_or_are_elsewhere():
    """The stack shows that a rank compiles. Without a stack, the rank may be the cause of the hang."""
    compiles = Reply(0, "a", 7, "py-spy", {"Main": ["communicate (subprocess.py:9)"]})
    said(explain_silence([compiles]).text)
    blind = Reply(2, "b", 9, "", lock=replace(LOCK, is_certain=False))
    for reply, waits in ((Reply(1, "b", 8, "py-spy", lock=LOCK), "1 on b waits"), (blind, "2 on b may wait")):
        text = f"rank {waits} for the lock file /cache/op/lock of 2026-01-01T00:00:00Z"
        silence = explain_silence([compiles, reply])
        assert (silence.text, silence.lock) == (text, "/cache/op/lock")
    said(explain_silence([blind, Reply(1, "b", 8, "py-spy", lock=LOCK)]).text)
    waits, reads = {"Main": ["wait (dist.py:1)"]}, {"Main": ["read (disk.py:3)"]}
    replies = [Reply(rank, "a", 7, "py-spy", reads if rank == 2 else waits) for rank in range(4)]
    said(explain_silence(replies).text)
    blind = Reply(1, "a", 7, "", problem="py-spy, which could read the stacks of the rank, is not installed")
    assert explain_silence([blind]).text == f"rank 1 on a: {blind.problem}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Return a function that starts a Python process, waits until its code has run, and returns its pid."""
    children = []

    def run(code: str, **environ: object) -> int:
        argv = [sys.executable, "-c", f"{code}\nimport time; print(flush=True); time.sleep(60)"]
        env = {"HOME": str(tmp_path), **{name: str(value) for name, value in environ.items()}}
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env)
        child.stdout.readline()
        children.append(child)
        return child.pid

    yield run
    for child in children:
        child.kill()
        child.communicate()


BATON = ["wait (torch/utils/file_baton.py:49)", "_jit_compile (torch/utils/cpp_extension.py:9)"]
COMPILES = ["communicate (subprocess.py:9)"]


def test_the_lock_file_of_a_process(tmp_path, start):
    folder = tmp_path / ".cache/torch_extensions/py311_cu128"
    lock = folder / "cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    pid = start("")
    found = find_lock(pid)
    assert (found.path, found.is_certain) == (str(lock), False)
    assert find_lock(pid, COMPILES) is None, "it does not wait"
    assert find_lock(pid, BATON) == replace(found, is_certain=True)
    assert find_lock(start("", TORCH_EXTENSIONS_DIR=folder)) == found
    assert find_lock(start("", XDG_CACHE_HOME=tmp_path)) is None
    (folder / "old").mkdir()
    (folder / "old/lock").touch()
    os.utime(folder / "old/lock", (1e9, 1e9))
    assert find_lock(pid, BATON) == found, "of several, the newest may be the one"


WAITS = """
    lock = os.environ["TORCH_EXTENSIONS_DIR"] + "/cpu_adam/lock"
    while os.path.exists(lock):
        time.sleep(0.02)
    print("compiled", flush=True)
    while not os.path.exists(RUN_DIR + "/go"):
        time.sleep(0.02)
"""


def test_a_run_behind_a_lock_that_was_left(start_job, tmp_path):
    lock = tmp_path / "extensions/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    env = {"TORCH_EXTENSIONS_DIR": str(lock.parents[1])}
    job = start_job(WAITS, launch={"env": env}, requeue={"inspect_s": 0.5})
    run, attempt = job.run, job.run.attempt(1)

    def events() -> list[str]:
        return [event["event"] for event in read_jsonl(run.events_file)]

    wait_for(lambda: "silent" in events())
    now = parse_time(utc_now())
    status = read_status(RunHistory(run), read_job(run), True, now)
    [warning] = status.warnings
    assert f"and no output before; rank 0 on {os.uname().nodename} " in warning
    assert f"wait for the lock file {lock} of " in warning.replace("waits", "wait")
    found = diagnose(attempt, read_job(attempt.run), alive=True)
    assert (found.state, found.name, found.rank) == ("running", "lock-file", 0)
    said(found.advice[0])
    said(found.advice[1])
    lock.unlink()
    wait_for(lambda: "silent_over" in events())
    assert read_status(RunHistory(run), read_job(run), True, now).warnings == []
    assert diagnose(attempt, read_job(attempt.run), alive=True).state == "nothing failed"
    (run.path / "go").touch()
    job.wait()
    assert not attempt.stacks_dir.exists() or list(attempt.stacks_dir.iterdir()) == []


def test_a_lock_is_the_cause_of_a_hang_and_a_hint_at_a_time_limit(attempt):
    silence = explain_silence([Reply(0, "a", 7, "py-spy", lock=LOCK)])
    phase = f"a command without output: {silence.text}"
    record = HangRecord(0, 0, "", None, phase, 0, 70.0, 60.0, None, utc_now(), ())
    plan = replace(PLAN, num_nodes=1, workers_per_node=1)
    end = {"state": "failed", "cause": "hang", "verdict": to_json(hang_failure(attempt, plan, [record]))}
    write_json(attempt.end_file, end)
    found = diagnose(attempt, read_job(attempt.run))
    assert (found.state, found.name, found.rank, found.host) == ("failed", "lock-file", 0, "a")
    assert found.cause == silence.text
    reason = f"no output for 610 s, and no output before; {silence.text}"
    log_event(attempt.run, 1, "silent", rank=0, host="a", lock=silence.lock, reason=reason)
    write_json(attempt.end_file, {"state": "stopped", "cause": "timeout", "reason": "killed after SIGTERM"})
    found = diagnose(attempt, read_job(attempt.run))
    assert (found.name, found.advice[0]) == ("time-limit", reason)
    log_event(attempt.run, 1, "silent_over")
    assert reason not in diagnose(attempt, read_job(attempt.run)).advice


def test_silence_without_a_lock_is_no_cause_of_an_end(attempt):
    reason = "no output for 610 s, and no output before; rank 0 on a is in read (disk.py:3)"
    log_event(attempt.run, 1, "silent", rank=0, host="a", reason=reason)
    found = diagnose(attempt, read_job(attempt.run), alive=True)
    assert (found.state, found.name, found.cause) == ("running", "no-output", reason)
    write_json(attempt.end_file, {"state": "failed", "cause": "crash", "reason": "a worker ended"})
    assert diagnose(attempt, read_job(attempt.run)).name is None


SLOW = {"phase": "compute", "ratio": 2.0, "own_s": 0.19, "usual_s": 0.07}


def test_slow_ranks_are_reported_until_they_are_no_longer_slow(tmp_path):
    run = RunDir(tmp_path)
    for event in (
        {"event": "slow_rank", "attempt": 1, "rank": 1, "host": "a", "since_step": 11, **SLOW},
        {"event": "slow_rank", "attempt": 2, "rank": 2, "host": "b", "since_step": 61, **SLOW},
        {"event": "slow_rank", "attempt": 2, "rank": 3, "host": "c", "since_step": 71, **SLOW},
        {"event": "slow_run", "attempt": 2, "since_step": 81, **SLOW, "phase": "network"},
        {"event": "slow_rank_over", "attempt": 2, "rank": 3, "host": "c", "since_step": 71, **SLOW},
    ):
        append_jsonl(run.events_file, event)
    said("\n".join(sentence(event) for event in OwnedEvents(read_events(run)).lasting(2)))


def test_the_newest_silence_is_a_warning_until_any_output(tmp_path):
    seen = OwnedEvents()
    for rank in (3, 1):
        seen.add(Event({"event": "silent", "attempt": 1, "rank": rank, "reason": f"rank {rank} waits"}))
    [found] = notices_of(RunDir(tmp_path), seen.lasting(1))
    said(found.text)
    seen.add(Event({"event": "silent_over", "attempt": 1}))
    assert (seen.lasting(1), len(seen.all)) == ([], 3)


def test_events_of_another_package_last_too():
    names = ("started", "toy.hot", "toy.cold", "toy.hot_over", "finished")
    seen = OwnedEvents(Event({"event": name, "attempt": 1}) for name in names)
    assert [event.name for event in seen.all] == ["toy.hot", "toy.cold", "toy.hot_over"]
    assert [event.name for event in seen.lasting(1)] == ["toy.cold"]
    assert seen.lasting(2) == []
