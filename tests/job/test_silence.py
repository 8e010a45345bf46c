"""A COMMAND that prints nothing: what it waits for, the notification, and when it is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_tree import Job, wait_for

from tests.support.runs import launch_plan
from trainkit.job.decision import repeatable_failure
from trainkit.job.failure.stacks import LockFile, Reply, explain_silence, find_locks, find_requests
from trainkit.job.hangs import HangRecord, hang_failure, missing_ranks, read_hangs
from trainkit.job.progress_watch import SilenceWatch
from trainkit.observe.diagnose import diagnose
from trainkit.observe.status import read_status
from trainkit.plan.launch import RequeuePolicy
from trainkit.run.events import log_event
from trainkit.run.files import parse_time, read_jsonl, utc_now, write_json
from trainkit.run.history import RunHistory
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir, RunDir

PLAN = launch_plan(command=("train",))
LOCK = LockFile("/cache/op/lock", "2026-01-01T00:00:00Z", is_certain=True, holder="")
STARTED = "2026-01-01T01:00:00.000Z"


class Watched:
    """A watch of an attempt, whose clock and agents are the test's."""

    def __init__(self, attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.attempt, self.now_s = attempt, 1000.0
        self.replies: list[Reply] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.watch = SilenceWatch(attempt, replace(PLAN, requeue=RequeuePolicy(**policy)))

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


def test_a_silent_command_hangs(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of any rank, metrics and the heartbeat all count; a suspended machine does not."""
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
    assert failure.message.startswith("no progress for 70 s, in a command without output: none of ")
    assert [event["event"] for event in watched.events()] == [], "it has printed, and no lock is in its way"


def test_ranks_wait_for_one_in_the_debugger(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(attempt, monkeypatch, silence_s=60.0)
    attempt.debugger_dir.mkdir()
    record = attempt.debugger_dir / "rank-0002.json"
    record.touch()
    assert watched.wait(1000) == []
    record.unlink()
    assert watched.wait(50) == []
    assert watched.wait(30) != []


def test_before_the_first_line_silence_is_reported_and_ends_nothing(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(attempt, monkeypatch)
    watched.replies = [Reply(rank, "a", 7, "py-spy", {"Main": ["read (disk.py:3)"]}) for rank in range(4)]
    attempt.node_log(0).write_text("node 0 is a; eth0")
    assert watched.wait(600) == []
    assert watched.events() == []
    assert watched.wait(3600) == []
    [event] = watched.events()
    assert (event["event"], event["rank"], event["lock"]) == ("silent", 0, None)
    assert event["reason"] == "no output for 620 s, and none before; rank 0 on a is in read (disk.py:3)"
    attempt.rank_log(2).write_text("step 1")
    watched.wait(20)
    assert [event["event"] for event in watched.events()] == ["silent", "silent_over"]
    watched.wait(3600)
    assert len(watched.events()) == 2, "a script that prints seldom"


def test_a_lock_in_the_way_is_reported_after_the_first_line_too(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(attempt, monkeypatch)
    watched.replies = [Reply(rank, "a", 7, "", problem="no py-spy", locks=[LOCK]) for rank in range(4)]
    attempt.rank_log(0).write_text("Using /cache as PyTorch extensions root...")
    watched.wait(700)
    [event] = watched.events()
    assert event["lock"] == "/cache/op/lock"
    assert event["reason"].startswith(
        "no output for 620 s; rank 0 on a (and 3 more) waits for the lock file "
    )


def test_a_lock_that_a_killed_process_left_is_final(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would wait for it as this attempt does."""
    watched = Watched(attempt, monkeypatch, silence_s=60.0)
    watched.replies = [Reply(rank, "a", 7, "py-spy", locks=[LOCK]) for rank in range(4)]
    failure = hang_failure(attempt, PLAN, watched.wait(100))
    found = repeatable_failure(failure)
    assert found.final, "it is not restarted"
    assert "waits for the lock file /cache/op/lock of 2026-01-01T00:00:00Z, which no" in failure.message


def test_a_rank_that_compiles_does_not_wait() -> None:
    """Its stack shows what it does; without one, the process that has the lock open is named."""
    held = replace(LOCK, is_certain=False, holder="process 7 (python)")
    stack = {"Main": ["communicate (subprocess.py:9)"]}
    compiles = Reply(0, "a", 7, "py-spy", stack, locks=[held])
    assert explain_silence([compiles]).text == "rank 0 on a is in communicate (subprocess.py:9)"
    waits = Reply(1, "b", 8, "py-spy", stack, locks=[LOCK])
    assert explain_silence([compiles, waits]).text.startswith("rank 1 on b waits for ")
    assert explain_silence([compiles, waits]).text.endswith("which process 7 (python) on a has open")
    assert "may wait" in explain_silence([Reply(0, "a", 7, "", locks=[held])]).text


def test_the_rank_that_is_elsewhere_is_shown() -> None:
    waits, reads = {"Main": ["wait (dist.py:1)"]}, {"Main": ["read (disk.py:3)"]}
    replies = [Reply(rank, "a", 7, "py-spy", reads if rank == 2 else waits) for rank in range(4)]
    assert explain_silence(replies).text == "rank 2 on a is in read (disk.py:3)"
    blind = Reply(1, "a", 7, "", problem="py-spy, which can read its stacks, is not installed")
    assert explain_silence([blind]).text == f"rank 1 on a: {blind.problem}"


@pytest.mark.parametrize(
    ("changes", "is_left"),
    [
        ({}, True),
        ({"is_certain": False}, False),
        ({"holder": "process 9 (ninja)"}, False),
        ({"time": "2026-01-01T02:00:00Z"}, False),
    ],
)
def test_what_counts_as_left_behind(changes: dict[str, Any], is_left: bool) -> None:
    silence = explain_silence([Reply(0, "a", 7, "py-spy", locks=[replace(LOCK, **changes)])], STARTED)
    assert (silence.lock, silence.is_left) == ("/cache/op/lock", is_left)
    waits = "waits" if changes.get("is_certain", True) else "may wait"
    holder = "process 9 (ninja) on a" if "holder" in changes else "no process on a"
    time = changes.get("time", LOCK.time)
    assert (
        silence.text
        == f"rank 0 on a {waits} for the lock file /cache/op/lock of {time}, which {holder} has open"
    )


def test_a_holder_on_another_host_is_found() -> None:
    """Its host says who holds the lock, and only the other one that a rank waits for it."""
    held = replace(LOCK, is_certain=False, holder="process 9 (python)")
    silence = explain_silence([Reply(0, "a", 9, "", locks=[held]), Reply(1, "b", 7, "py-spy", locks=[LOCK])])
    assert silence.text.startswith("rank 1 on b waits for ")
    assert silence.text.endswith("which process 9 (python) on a has open")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Start a Python process with these variables, which has run its code when this returns."""
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


def test_the_lock_files_of_a_process(tmp_path: Path, start: Callable[..., int]) -> None:
    lock = tmp_path / ".cache/torch_extensions/py311_cu128/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    pid = start("")
    [found] = find_locks(pid)
    assert (found.path, found.is_certain, found.holder) == (str(lock), False, "")
    assert find_locks(pid, COMPILES) == [], "it does not wait, and nobody has it"
    [found] = find_locks(pid, BATON)
    assert found.is_certain
    other = start("", TORCH_EXTENSIONS_DIR=lock.parents[1])
    assert [one.path for one in find_locks(other)] == [str(lock)]
    assert find_locks(start("", XDG_CACHE_HOME=tmp_path)) == []


def test_a_rank_that_compiles_holds_the_lock_itself(tmp_path: Path, start: Callable[..., int]) -> None:
    """A rank that waits is shown with the newest lock file, which it has not open itself."""
    for name, time_s in (("cpu_adam", 2e9), ("old", 1e9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time_s, time_s))
    lock = str(tmp_path / "cpu_adam/lock")
    pid = start(f"f = open({lock!r})", TORCH_EXTENSIONS_DIR=tmp_path)
    [found] = find_locks(pid, COMPILES)
    assert (found.path, found.holder.partition(" (")[0]) == (lock, f"process {pid}")
    [found] = find_locks(pid, BATON)
    assert (found.path, found.holder) == (lock, "")
    holder = start(f"f = open({lock!r})")
    assert find_locks(pid, BATON)[0].holder.startswith(f"process {holder} (")


WAITS = """
    lock = os.environ["TORCH_EXTENSIONS_DIR"] + "/cpu_adam/lock"
    while os.path.exists(lock):
        time.sleep(0.02)
    print("compiled", flush=True)
    while not os.path.exists(RUN_DIR + "/go"):
        time.sleep(0.02)
"""


def test_a_run_behind_a_lock_that_was_left(start_job: Callable[..., Job], tmp_path: Path) -> None:
    """`status` and `diagnose` name the file while the run waits, and nothing once it continues."""
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
    assert now is not None
    status = read_status(RunHistory(run), read_job(run), True, now)
    [warning] = status.warnings
    assert f"and none before; rank 0 on {os.uname().nodename} " in warning
    assert f"wait for the lock file {lock} of " in warning.replace("waits", "wait")
    found = diagnose(attempt, alive=True)
    assert (found.state, found.name, found.rank) == ("running", "lock-file", 0)
    assert found.advice[0].startswith(f"no process on {os.uname().nodename} has it open")
    assert f"`rm {lock}`, then `trainkit resume {run.path}`" in found.advice[1]
    lock.unlink()
    wait_for(lambda: "silent_over" in events())
    assert read_status(RunHistory(run), read_job(run), True, now).warnings == []
    assert diagnose(attempt, alive=True).state == "nothing failed"
    (run.path / "go").touch()
    job.wait()
    assert not attempt.stacks_dir.exists() or list(attempt.stacks_dir.iterdir()) == []


def test_a_lock_is_the_cause_of_a_hang_and_a_hint_at_a_time_limit(attempt: AttemptDir) -> None:
    silence = explain_silence([Reply(0, "a", 7, "py-spy", locks=[LOCK])], STARTED)
    record = HangRecord(
        *(0, 0, "", None, f"a command without output: {silence.text}", 0, 70.0, 60.0, None, utc_now(), ()),
        is_final=True,
    )
    plan = replace(PLAN, num_nodes=1, workers_per_node=1)
    end = {"state": "failed", "cause": "hang", "verdict": hang_failure(attempt, plan, [record]).to_dict()}
    write_json(attempt.end_file, end)
    found = diagnose(attempt)
    assert (found.state, found.name, found.rank, found.host) == ("failed", "lock-file", 0, "a")
    assert found.cause == silence.text
    reason = f"no output for 610 s, and none before; {silence.text}"
    log_event(attempt.run, 1, "silent", rank=0, host="a", lock=silence.lock, reason=reason)
    write_json(attempt.end_file, {"state": "stopped", "cause": "timeout", "reason": "killed after SIGTERM"})
    found = diagnose(attempt)
    assert (found.name, found.advice[0]) == ("time-limit", reason)
    log_event(attempt.run, 1, "silent_over")
    assert reason not in diagnose(attempt).advice


def test_silence_without_a_lock_is_no_cause_of_an_end(attempt: AttemptDir) -> None:
    reason = "no output for 610 s, and none before; rank 0 on a is in read (disk.py:3)"
    log_event(attempt.run, 1, "silent", rank=0, host="a", reason=reason)
    found = diagnose(attempt, alive=True)
    assert (found.state, found.name, found.cause) == ("running", "no-output", reason)
    write_json(attempt.end_file, {"state": "failed", "cause": "crash", "reason": "a worker ended"})
    assert diagnose(attempt).name is None
