"""Tests attempts whose processes all died, and starts of a job that have nothing left to do."""

import errno
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from unittest.mock import Mock

import pytest
from slurm_job import RUNNING, reasons

from tests.support.webhooks import webhook
from trainkit.backends.slurm import resubmit
from trainkit.backends.slurm.allocation import SlurmAllocation
from trainkit.backends.slurm.backend import cancel_follow_ups
from trainkit.backends.slurm.claim_attempt import claim_attempt
from trainkit.job.attempt import Attempt
from trainkit.job.attempt_end import close_dead_attempts, progress_of, write_end
from trainkit.job.decision import Decision, Outcome
from trainkit.job.supervisor import supervise_job
from trainkit.plan.launch import LaunchPlan
from trainkit.run import record
from trainkit.run.files import read_json, write_json
from trainkit.run.record import AUTO_RESTART, add_slurm_attempt, mark_cancelled, read_job, record_of
from trainkit.run.rundir import AttemptDir, RunDir


def as_utc(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


PASS = [sys.executable, "-c", "pass"]


def start_that_dies(run: RunDir, monkeypatch: pytest.MonkeyPatch, host: str) -> AttemptDir:
    """Start job 7 on a host that goes down during the start, so that no end is recorded."""
    with monkeypatch.context() as patch:
        patch.setenv("SLURMD_NODENAME", host)
        attempt = claim_attempt(run, "7")
    assert isinstance(attempt, AttemptDir)
    return attempt


def test_a_host_that_died_has_its_end_written_and_reported(run, slurm, monkeypatch):
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    dead = start_that_dies(run, monkeypatch, "node9")
    dead.rank_log(0).write_text("the last that was heard\n")
    os.utime(dead.rank_log(0), (1.8e9, 1.8e9))
    slurm.down = ("node9",)
    with webhook() as found:
        monkeypatch.setenv("TRAINKIT_WEBHOOK_URL", found.url)
        assert supervise_job(run, PASS) == 0
    reported = sorted((one["event"], one["attempt"]) for one in found.messages)
    assert reported == [("finished", 2), ("requeued", 1)]
    first, second = (read_json(run.attempt(number).end_file) for number in (1, 2))
    assert (first["state"], first["action"], first["cause"]) == ("failed", "requeue", "node_fail")
    assert second["state"] == "finished"
    verdict = first["verdict"]
    assert (verdict["type"], verdict["host"]) == ("HostLost", "node9")
    assert verdict["time"] == as_utc(datetime.fromtimestamp(1.8e9, timezone.utc))


@pytest.mark.parametrize(
    ("is_down", "num_starts", "brake"),
    [
        (True, 2, "requeue.max_crashes is 1, and 2 attempts saved nothing new"),
        (False, 4, "requeue.max is 3, and the run has restarted 3 times"),
    ],
)
def test_a_run_that_takes_its_hosts_down_stops(run, slurm, monkeypatch, is_down, num_starts, brake):
    """Slurm itself restarts a job whenever its host dies, without a limit."""
    plan = read_json(run.attempt(1).plan_file)
    plan["requeue"]["max"] = 3
    write_json(run.attempt(1).plan_file, plan)
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    dead_starts = 0
    while dead_starts < num_starts:
        start_that_dies(run, monkeypatch, f"node{dead_starts}")
        dead_starts += 1
        slurm.down = tuple(f"node{number}" for number in range(10)) if is_down else ()
        if dead_starts < num_starts:
            # The next start only records the end of the start before it, and dies too.
            live = Attempt(run.attempt(run.attempt_numbers()[-1]))
            live.update()
            policy = LaunchPlan.from_dict(read_json(live.folder.plan_file)).requeue
            assert close_dead_attempts(live, policy, SlurmAllocation(run, "7", []).is_down) is None
    assert supervise_job(run, [sys.executable, "-c", "raise SystemExit(3)"]) not in (0, 75)
    last, dead = (read_json(run.attempt(number).end_file) for number in (num_starts + 1, num_starts))
    for end in (last, dead):
        assert (end["state"], end["action"], end["cause"]) == ("failed", "failed", "node_fail")
        assert end["reason"].endswith(brake)
        assert end["verdict"]["host"] == f"node{num_starts - 1}"
    assert not run.attempt(num_starts + 1).supervisor_log.exists()  # no step was started


def test_the_queue_is_no_progress(run):
    """Only run time counts as progress of a trainer without checkpoints, not time in the queue."""

    def progress() -> int:
        return progress_of(run.attempt(1), record_of(run.attempt(1)))

    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    claim_attempt(run, "7")
    record.change_newest(run, started_at=as_utc(datetime.fromtimestamp(time.time() - 7200, timezone.utc)))
    assert progress() == 1  # the trainer still runs
    for log in (run.attempt(1).rank_log(0), run.attempt(1).supervisor_log):
        log.write_text("a line\n")
        os.utime(log, (time.time() - 7000, time.time() - 7000))
    claim_attempt(run, "7")
    assert progress() == 0
    os.utime(run.attempt(1).rank_log(0), (time.time() - 3600, time.time() - 3600))
    assert progress() == 1


def test_a_follow_up_that_had_no_attempt_yet_when_the_run_was_cancelled(run, slurm):
    """Slurm had started the chained job and signalled its steps, but the job had no attempt yet."""
    add_slurm_attempt(run, 1, "6", "submit", "sbatch")
    record.set_follow_ups(run, ["7"])
    decision = Decision("follow_up", "saved after SIGUSR2", 75, "timeout")
    write_end(run.attempt(1), record_of(run.attempt(1)), Outcome(), decision)
    mark_cancelled(run)
    assert supervise_job(run, PASS) == 0
    assert run.attempt_numbers() == [1]
    assert read_json(run.attempt(1).end_file)["state"] == "cancelled"


def test_a_person_who_starts_a_cancelled_run_again_is_heeded(run):
    add_slurm_attempt(run, 1, "6", "submit", "sbatch")
    mark_cancelled(run)
    texts = [file.read_text() for file in (run.attempt(1).config_file, run.attempt(1).plan_file)]
    record.open_attempt(run, *texts)
    claim_attempt(run, "7")
    assert reasons(run) == [(1, "6", "submit"), (2, "7", "submit")]


def test_an_attempt_that_could_not_be_made_leaves_nothing(run, monkeypatch):
    """A quota may allow one more folder, but no files in it."""
    real = Path.mkdir

    def mkdir(path: Path, *args: int, **kwargs: bool) -> None:
        if path.name == "errors":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(path, *args, **kwargs)

    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    claim_attempt(run, "7")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(OSError, match="quota"):
            claim_attempt(run, "7")
    assert run.attempt_numbers() == [1]
    claim_attempt(run, "7")
    assert reasons(run) == [(1, "7", "submit"), (2, "7", AUTO_RESTART)]


def test_a_record_that_cannot_be_read_is_not_replaced(run, monkeypatch):
    add_slurm_attempt(run, 1, "6", "submit", "sbatch")
    record.set_follow_ups(run, ["7"])
    before = run.job_file.read_bytes()

    def stale(*args: object) -> None:
        error = OSError(errno.ESTALE, "Stale file handle")
        monkeypatch.setattr("trainkit.run.record.read_json", Mock(side_effect=error))

    monkeypatch.setattr("trainkit.backends.slurm.backend.cancel_waiting", stale)
    with pytest.raises(OSError, match="Stale"):
        cancel_follow_ups(run, read_job(run))
    assert run.job_file.read_bytes() == before


@pytest.mark.parametrize(("state", "is_done"), [("allocated*", False), ("down*", True), ("mixed", False)])
def test_the_guard_waits_until_slurm_has_given_the_host_up(monkeypatch, state, is_done):
    requeued: list[str] = []
    monkeypatch.setattr(resubmit, "job_details", lambda job_id: RUNNING)
    monkeypatch.setattr(resubmit, "node_states", lambda hosts: dict.fromkeys(hosts, state))
    monkeypatch.setattr(resubmit, "requeue", requeued.append)
    assert resubmit.requeue_if_down("7", "node1") is is_done
    assert requeued == (["7"] if is_done else [])
