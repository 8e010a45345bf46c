"""Which attempt a start of a Slurm job is, and what its supervisor makes of the step's end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_attempt
from trainkit.errors import EXIT_NO_RESTART, EXIT_STOPPED
from trainkit.job import allocation, batch, comeback, take
from trainkit.job.batch import supervise
from trainkit.job.record import COMEBACK, KILLED, add_slurm_entry, mark_cancelled, read_job
from trainkit.job.step_watch import StepWatch
from trainkit.job.take import take_attempt
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir, log_event, read_json, read_jsonl, write_json
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.job_now import JobNow
from trainkit.slurm.states import JobState

RUNNING = JobNow(JobState.RUNNING, "RUNNING", is_preempted=False, may_requeue=True, end_time=None, restarts=0)


@dataclass
class Slurm:
    """What Slurm says and was told."""

    job: JobNow | None = RUNNING
    lost: tuple[str, ...] | None = ()
    refuses: bool = False
    requeued: int = 0

    def requeue(self, job_id: str, patience_s: float) -> None:
        if self.refuses:
            raise SlurmRefused(f"scontrol: Job {job_id} may not be requeued")
        self.requeued += 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(take, "ENTRY_TIMEOUT_S", 0.2)
    return make_attempt(tmp_path / "run", ["requeue.max_crashes=1"]).run


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A Slurm that says what a test wants, with a job of one host."""
    slurm = Slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    monkeypatch.setattr(batch, "write_to", lambda log: None)
    monkeypatch.setattr(batch.children, "adopt_orphans", lambda: None)
    monkeypatch.setattr(allocation, "expand_hosts", lambda text: [text])
    monkeypatch.setattr(allocation, "look_at_job", lambda job_id, patience_s: slurm.job)
    monkeypatch.setattr(allocation, "lost_hosts", lambda job_id, hosts, is_running: slurm.lost)
    monkeypatch.setattr(allocation.shutil, "which", lambda program: program)
    monkeypatch.setattr(comeback, "requeue", slurm.requeue)
    return slurm


def reasons(run: RunDir) -> list[tuple[int, str, str]]:
    return [(entry["attempt"], entry["job_id"], entry["reason"]) for entry in read_job(run)["attempts"]]


def test_the_first_start_takes_the_attempt_that_was_submitted(run: RunDir) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    attempt = take_attempt(run, "7")
    assert attempt is not None
    assert attempt.number == 1
    [entry] = read_job(run)["attempts"]
    assert entry["pid"] == os.getpid()


def test_a_job_that_came_back_opens_the_next_one_with_the_same_plan(run: RunDir) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    take_attempt(run, "7")
    attempt = take_attempt(run, "7")
    assert attempt is not None
    assert reasons(run) == [(1, "7", "submit"), (2, "7", COMEBACK)]
    assert attempt.plan_file.read_bytes() == run.attempt(1).plan_file.read_bytes()
    assert attempt.config_file.read_bytes() == run.attempt(1).config_file.read_bytes()


def test_a_job_whose_submission_was_interrupted_still_knows_its_attempt(run: RunDir) -> None:
    attempt = take_attempt(run, "7")
    assert attempt is not None
    assert reasons(run) == [(1, "7", "submit")]


def test_a_job_that_was_cancelled_while_it_waited_does_not_start(run: RunDir) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    mark_cancelled(run)
    assert take_attempt(run, "7") is None


def step(run: RunDir, code: str, *writes: Any) -> tuple[int, dict[str, Any]]:
    """The exit code of a job whose step runs some Python, and the newest end.json."""
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    for write in writes:
        write()
    result = supervise(run, [sys.executable, "-c", code])
    end = read_json(run.attempt(run.attempt_numbers()[-1]).end_file)
    assert end["exit_code"] == result
    return result, end


def told(run: RunDir, name: str) -> Callable[[], None]:
    return lambda: log_event(run, 1, "signal", signal=name)


def test_what_cancel_now_kills_was_not_a_failure(run: RunDir, slurm: Slurm) -> None:
    # Slurm's SIGTERM for a job that it cancels may come before the step is seen to have ended.
    code = (
        "import os; from trainkit.rundir import RunDir, log_event;"
        " from trainkit.job.record import mark_cancelled; run = RunDir(os.environ['TRAINKIT_JOB_RUN_DIR']);"
        " mark_cancelled(run, now=True); log_event(run, 1, 'signal', signal='SIGTERM');"
        " os.kill(os.getpid(), 9)"
    )
    result, end = step(run, code)
    assert (result, end["state"], end["reason"], end["verdict"]) == (137, "cancelled", KILLED, None)


def test_a_step_that_ends_well(run: RunDir, slurm: Slurm) -> None:
    assert step(run, "pass")[0] == 0
    events = [event["event"] for event in read_jsonl(run.events_file)]
    assert events == ["started", "finished"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (RUNNING, "saved after SIGTERM"),
        (replace(RUNNING, state=JobState.CANCELLED), "saved after SIGTERM"),
    ],
)
def test_a_person_who_tells_only_the_ranks(run: RunDir, slurm: Slurm, job: JobNow, words: str) -> None:
    slurm.job = job
    code, end = step(run, "raise SystemExit(75)", told(run, "SIGTERM"))
    assert (code, end["state"], end["reason"], slurm.requeued) == (EXIT_STOPPED, "stopped", words, 0)


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        (replace(RUNNING, is_preempted=True), 1),
        # In the queue again already: Slurm does it by itself.
        (replace(RUNNING, state=JobState.COMPLETING, restarts=1), 0),
        (None, 1),
    ],
)
def test_a_preemption_brings_the_job_back(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, job: JobNow | None, asked: int
) -> None:
    monkeypatch.setattr(comeback, "_await_eviction", lambda: None)
    slurm.job = job
    code, end = step(run, "raise SystemExit(75)", told(run, "SIGTERM"))
    assert (code, end["action"], end["cause"]) == (EXIT_STOPPED, "requeue", "preempted")
    assert slurm.requeued == asked
    assert run.attempt_numbers() == [1]


def test_a_crash_starts_the_step_again_in_the_allocation(run: RunDir, slurm: Slurm) -> None:
    code = "import os; raise SystemExit(5 if os.environ['TRAINKIT_JOB_ATTEMPT'] == '1' else 0)"
    assert step(run, code)[1]["state"] == "finished"
    first = read_json(run.attempt(1).end_file)
    assert (first["state"], first["action"], first["cause"]) == ("failed", "restart", "crash")
    assert first["exit_code"] == EXIT_STOPPED
    assert reasons(run) == [(1, "7", "submit"), (2, "7", COMEBACK)]
    events = [event["event"] for event in read_jsonl(run.events_file)]
    assert events.count("started") == 2
    assert "restart" in events


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (replace(RUNNING, state=JobState.COMPLETING, is_preempted=True), ("requeue", "crash", 1)),
        # In the queue again already: Slurm does it by itself.
        (replace(RUNNING, state=JobState.COMPLETING, restarts=1), ("requeue", "crash", 0)),
        (replace(RUNNING, state=JobState.CANCELLED), ("failed", "crash", 0)),
    ],
)
@pytest.mark.parametrize("says", ["", "srun: error: Unable to create step for job 7: no memory"])
def test_a_notice_before_the_step_is_started_again(
    run: RunDir,
    slurm: Slurm,
    monkeypatch: pytest.MonkeyPatch,
    job: JobNow,
    expected: tuple[str, str, int],
    says: str,
) -> None:
    def take_away(delay_s: float) -> signal.Signals:
        slurm.job = job
        return signal.SIGTERM

    monkeypatch.setattr(batch.children, "wait_unless_told", take_away)
    monkeypatch.setattr(comeback, "_await_eviction", lambda: None)
    _, end = step(run, f"import sys; sys.exit({says!r} or 5)")
    assert (end["action"], end["cause"], slurm.requeued) == expected
    assert run.attempt_numbers() == [1]


def test_a_step_that_slurm_could_not_start_is_no_crash(run: RunDir, slurm: Slurm) -> None:
    says = "srun: error: Unable to create step for job 7: Memory required by task is not available"
    code = f"import os, sys; os.environ['TRAINKIT_JOB_ATTEMPT'] in '12' and sys.exit({says!r})"
    assert step(run, code)[1]["state"] == "finished"
    ends = [read_json(run.attempt(number).end_file) for number in (1, 2)]
    assert [(end["action"], end["cause"], end["verdict"]) for end in ends] == [
        ("restart", "not_started", None)
    ] * 2


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (RUNNING, []),
        (replace(RUNNING, state=JobState.REQUEUED, restarts=1), ["7"]),
        # It runs elsewhere by now.
        (replace(RUNNING, restarts=1), []),
    ],
)
def test_a_run_that_has_ended_is_not_started_again_by_slurm(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, job: JobNow, expected: list[str]
) -> None:
    """A host was lost for a while, so that the job is in the queue; what ran on it has failed for good."""
    cancelled: list[str] = []
    monkeypatch.setattr(comeback, "cancel_waiting", cancelled.extend)
    slurm.job = job
    code, end = step(run, f"raise SystemExit({EXIT_NO_RESTART})")
    assert (code, end["action"], cancelled) == (EXIT_NO_RESTART, "failed", expected)


@pytest.mark.parametrize(
    "job", [replace(RUNNING, state=JobState.REQUEUED, restarts=1), replace(RUNNING, restarts=1)]
)
def test_a_job_that_somebody_else_brought_back_is_left_to_it(run: RunDir, slurm: Slurm, job: JobNow) -> None:
    """A host that was cut off is back, and its job has gone on without it."""
    slurm.job = job
    end = step(run, "raise SystemExit(1)")[1]
    assert (end["action"], slurm.requeued, run.attempt_numbers()) == ("requeue", 0, [1])


def test_without_a_controller_no_step_is_started(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comeback, "_await_eviction", lambda: None)
    slurm.job = None
    assert step(run, "raise SystemExit(1)")[1]["action"] == "requeue"


def test_a_host_that_is_lost_is_no_place_to_start_again(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comeback, "_await_eviction", lambda: None)
    monkeypatch.setattr("trainkit.job.bad_nodes.exclude_from", lambda *args: ())
    slurm.job, slurm.lost = RUNNING, ("node1",)
    end = step(run, "raise SystemExit(137)")[1]
    assert (end["action"], end["cause"]) == ("requeue", "node_fail")
    assert end["reason"] == "lost node1; starting again, comeback 1"


def test_the_code_is_that_of_what_began_it(run: RunDir, slurm: Slurm) -> None:
    record = {
        "rank": 3,
        "node_rank": 1,
        "host": "b",
        "time": "1",
        "type": "ValueError",
        "message": "m",
        "exit_code": 5,
        "final": True,
    }
    write = lambda: write_json(run.attempt(1).rank_error(3), record)  # noqa: E731
    code, end = step(run, "raise SystemExit(137)", write)
    assert code == 5
    assert end["verdict"]["rank"] == 3
    assert end["reason"].endswith("it would fail in the same way again")


def test_an_agent_that_was_killed_is_no_longer_waited_for(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could write nothing; srun says so, and waits for the others, which wait for its rank."""
    monkeypatch.setattr(StepWatch, "look_every_s", 0.05)
    monkeypatch.setattr("trainkit.job.step_watch.PEER_S", 0.2)
    write_json(run.attempt(1).rendezvous_file, {"step_id": "0", "hosts": ["node1"]})
    says = "srun: error: node1: task 0: Killed"
    code = f"import sys, time; print({says!r}, file=sys.stderr, flush=True); time.sleep(60)"
    step(run, f"import os; os.environ['TRAINKIT_JOB_ATTEMPT'] == '2' and os._exit(0)\n{code}")
    first = read_json(run.attempt(1).end_file)
    assert (first["action"], first["cause"]) == ("restart", "crash")
    assert (first["verdict"]["host"], first["verdict"]["node_rank"]) == ("node1", 0)
    assert first["verdict"]["message"] == "its agent was killed (agent of node 0)"


def test_a_task_that_ended_as_asked_does_not_end_those_that_still_save(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends with a code of its own as soon as the ranks of its node have saved."""
    monkeypatch.setattr(StepWatch, "look_every_s", 0.05)
    monkeypatch.setattr("trainkit.job.step_watch.PEER_S", 0.2)
    says = "srun: error: node1: task 0: Exited with exit code 143"
    code = f"import sys, time; print({says!r}, flush=True); time.sleep(1.5); sys.exit(75)"
    assert step(run, code, told(run, "SIGTERM"))[1]["reason"] == "saved after SIGTERM"


def test_a_job_that_slurm_does_not_start_again(run: RunDir, slurm: Slurm) -> None:
    slurm.job, slurm.refuses = RUNNING, True
    result, end = step(run, f"raise SystemExit({EXIT_STOPPED})", told(run, "SIGUSR2"))
    assert (result, end["state"], end["action"]) == (EXIT_STOPPED, "stopped", "stopped")
    assert end["reason"] == "saved after SIGUSR2; not started again: scontrol: Job 7 may not be requeued"


def test_a_host_that_died_has_its_end_written(run: RunDir, slurm: Slurm) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    assert take_attempt(run, "7") is not None
    assert supervise(run, [sys.executable, "-c", "pass"]) == 0
    first, second = (read_json(run.attempt(number).end_file) for number in (1, 2))
    assert (first["state"], first["action"], first["cause"]) == ("failed", "requeue", "node_fail")
    assert second["state"] == "finished"


def test_a_step_whose_run_folder_is_deleted_is_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepWatch, "look_every_s", 0.1)
    plan = LaunchPlan.from_dict(read_json(run.attempt(1).plan_file))
    watch = StepWatch(run.attempt(1), plan, ["sleep", "60"], seen="")
    threading.Timer(0.3, shutil.rmtree, (run.attempt(1).path,)).start()
    watch.work()
    assert [code for _, code in watch.outcome.ends] == [143]


def test_a_step_that_cannot_start(run: RunDir, slurm: Slurm) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    assert supervise(run, ["/no/such/srun"]) == 1
    assert "No such file" in read_json(run.attempt(1).end_file)["reason"]


def test_outside_of_slurm(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervise(run, ["true"]) == 1
    assert "this is no Slurm job" in capsys.readouterr().out
