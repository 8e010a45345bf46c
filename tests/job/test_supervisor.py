"""Tests how the supervisor of a Slurm job judges the end of a step."""

import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import DEFAULT, Mock

import pytest
from slurm_job import RUNNING, Slurm, reasons, record_signal, start, step

from tests.support.programs import wait_for
from tests.support.said import said
from trainkit.backends.slurm import allocation
from trainkit.backends.slurm import attempt_watch as attempt_module
from trainkit.backends.slurm.attempt_watch import SlurmAttemptWatch
from trainkit.backends.slurm.claim_attempt import claim_attempt
from trainkit.errors import EXIT_FAILED, EXIT_STOPPED
from trainkit.job import supervisor
from trainkit.job.attempt import Attempt
from trainkit.job.supervisor import supervise_job
from trainkit.locks import file_lock
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import RankFailure
from trainkit.run.files import read_json, read_jsonl, write_json
from trainkit.run.record import AUTO_RESTART, AttemptRecord, add_slurm_attempt, mark_cancelled
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState


def test_a_step_that_srun_gave_up_has_not_finished_whatever_its_code(run, slurm):
    # Observed with Slurm 22.05: one host was cut off, and the other had lost its daemon and its tasks.
    slurm.lost = ("node2",)
    said = (
        "srun: error: Node failure on node2",
        "srun: Job step aborted: Waiting up to 12 seconds for job step to finish.",
        "srun: forcing job termination",
        "srun: error: Timed out waiting for job step to complete",
    )
    assert start(run, f"import sys; print(*{said}, sep='\\n', file=sys.stderr)") != 0
    end = read_json(run.attempt(1).end_file)
    assert (end["state"], end["action"], end["verdict"]["host"]) == ("failed", "restart", "node2")


def test_a_cancellation_before_the_start_of_the_ranks_starts_none(run, slurm, monkeypatch):
    wait_for_the_lock = supervisor.become_sole_supervisor
    cancelled_meanwhile = Mock(side_effect=lambda *args: wait_for_the_lock(*args) or mark_cancelled(run))
    monkeypatch.setattr(supervisor, "become_sole_supervisor", cancelled_meanwhile)
    code, end = step(run, "pass")
    assert (code, end["state"]) == (EXIT_STOPPED, "cancelled")
    assert "started" not in [event["event"] for event in read_jsonl(run.events_file)]


def test_a_step_that_slurm_could_not_start_is_no_crash(run, slurm):
    says = "srun: error: Unable to create step for job 7: Memory required by task is not available"
    code = f"import os, sys; os.environ['TRAINKIT_JOB_ATTEMPT'] in '12' and sys.exit({says!r})"
    assert step(run, code)[1]["state"] == "finished"
    ends = [read_json(run.attempt(number).end_file) for number in (1, 2)]
    found = [(end["action"], end["cause"], end["exit_code"], end["verdict"]) for end in ends]
    assert found == [("restart", "not_started", EXIT_STOPPED, None)] * 2
    assert reasons(run) == [(1, "7", "submit"), (2, "7", AUTO_RESTART), (3, "7", AUTO_RESTART)]
    started = [event["attempt"] for event in read_jsonl(run.events_file) if event["event"] == "started"]
    assert started == [1, 2, 3]


def test_the_code_is_that_of_what_began_it(run, slurm):
    record = {"rank": 3, "node_rank": 1, "host": "b", "time": "1", "type": "ValueError", "message": "m"}
    record |= {"exit_code": 5, "final": True}
    code, end = step(run, "raise SystemExit(137)", lambda: write_json(run.attempt(1).rank_error(3), record))
    assert (code, end["verdict"]["rank"]) == (5, 3)
    said(end["reason"])


SLEEPS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("how", "then", "kind", "hint"),
    [
        # Shared memory that a rank has filled is not freed when the rank is killed.
        ("Out Of Memory", "sys.exit(1)", "OutOfMemory", "raise resources.mem"),
        # The killed agent writes no record, but srun reports its end. The other agents wait for its rank.
        ("Killed", "time.sleep(60)", "exit", ""),
    ],
)
def test_an_agent_that_was_killed_is_named_and_no_longer_waited_for(
    run, slurm, monkeypatch, how, then, kind, hint
):
    monkeypatch.setattr("trainkit.backends.slurm.attempt_watch.PEER_EXIT_S", 0.2)
    write_json(run.attempt(1).rendezvous_file, {"step_id": "0", "hosts": ["node1"]})
    says = f"srun: error: node1: task 0: {how}"
    once = "import os, sys, time\nos.environ['TRAINKIT_JOB_ATTEMPT'] == '2' and os._exit(0)\n"
    step(run, f"{once}print({says!r}, file=sys.stderr, flush=True); {then}")
    first = read_json(run.attempt(1).end_file)
    assert (first["action"], first["cause"]) == ("restart", "crash")
    said(first["reason"])
    verdict = first["verdict"]
    named = [verdict[key] for key in ("host", "node_rank", "type", "exit_code")]
    assert named == ["node1", 0, kind, 137]
    assert verdict.get("hint", "").startswith(hint)
    said(verdict["message"])


def test_a_task_that_ended_as_asked_does_not_end_those_that_still_save(run, slurm, monkeypatch):
    """A launcher exits with a different code as soon as the ranks of its node have saved."""
    monkeypatch.setattr("trainkit.backends.slurm.attempt_watch.PEER_EXIT_S", 0.2)
    says = "srun: error: node1: task 0: Exited with exit code 143"
    code = f"import sys, time; print({says!r}, flush=True); time.sleep(1.5); sys.exit(75)"
    said(step(run, code, record_signal(run, "SIGTERM"))[1]["reason"])


def test_a_step_whose_run_folder_is_deleted_is_ended(run, monkeypatch):
    monkeypatch.setattr("trainkit.job.allocation.DELETED_AFTER_S", 0.3)
    watch = watch_of(run, monkeypatch)
    threading.Timer(0.3, shutil.rmtree, (run.attempt(1).path,)).start()
    watch.run()
    watch.collect()
    assert [code for _, code in watch.observed.exits] == [143]


def test_a_step_whose_run_folder_is_moved_saves(run, tmp_path, monkeypatch):
    ready, moved = tmp_path / "ready", tmp_path / "moved"
    code = f"signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75)); open({str(ready)!r}, 'w').close()"
    watch = watch_of(run, monkeypatch, f"import signal, sys, time; {code}; time.sleep(60)")
    run.hold()
    old = run.path
    mover = threading.Thread(target=lambda: wait_for(ready.exists) and old.rename(moved))
    mover.start()
    watch.run()
    mover.join()
    watch.collect()
    assert (watch.observed.moved_to, watch.observed.stop_signal) == (str(moved), "SIGTERM")
    assert (watch.observed.exits, old.exists()) == ([(0, 75)], False)


def test_a_step_whose_run_folder_is_away_for_a_moment_goes_on(run, monkeypatch):
    """The run folder disappears while a server is restarted or the filesystem is mounted again."""
    back = run.path / "back"
    code = f"while not os.path.exists({str(back)!r}): time.sleep(0.02)\nraise SystemExit(75)"
    watch = watch_of(run, monkeypatch, f"import os, time\n{code}")
    folder, aside = run.attempt(1).path, run.path / "aside"
    stale = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))

    def move() -> None:
        folder.rename(aside)
        time.sleep(0.4)
        aside.rename(folder)
        back.touch()

    mover = threading.Timer(0.2, move)
    mover.start()
    monkeypatch.setattr(watch, "_end_if_superseded", stale)
    watch.run()
    mover.join()
    watch.collect()
    assert [code for _, code in watch.observed.exits] == [75]
    assert stale.called


def test_the_end_of_a_step_waits_for_a_run_folder_that_is_away(run, slurm, monkeypatch):
    """The cause of the missing folder may also have ended the ranks."""
    monkeypatch.setattr("trainkit.job.processes.DISK_RETRY_S", 0.05)
    stale = [OSError(errno.ESTALE, "Stale file handle")] * 2
    away_at_first = Mock(wraps=attempt_module.first_exit_code, side_effect=[*stale, *[DEFAULT] * 9])
    monkeypatch.setattr(attempt_module, "first_exit_code", away_at_first)
    code = "import os; raise SystemExit(5 if os.environ['TRAINKIT_JOB_ATTEMPT'] == '1' else 0)"
    assert step(run, code)[1]["state"] == "finished"
    assert away_at_first.call_count > 2
    first = read_json(run.attempt(1).end_file)
    assert (first["action"], first["cause"]) == ("restart", "crash")


def test_a_step_is_ended_when_another_start_of_the_job_waits_for_it(run, monkeypatch):
    """Only the daemon of the job's host has died, so that Slurm has requeued the job."""
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    assert run.attempt_numbers() == [1]
    claim_attempt(run, "7")
    saves = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR2, save)
print("training", flush=True)
time.sleep(60)
"""
    watch = watch_of(run, monkeypatch, saves)
    log = run.attempt(1).supervisor_log

    def come_back() -> None:
        wait_for(lambda: log.exists() and "training" in log.read_text())
        claim_attempt(run, "7")

    threading.Thread(target=come_back).start()
    watch.run()
    watch.collect()
    assert [code for _, code in watch.observed.exits] == [EXIT_STOPPED]
    assert log.read_text().splitlines()[-1] == "saved"
    assert watch.superseded_by.attempt == 2
    assert run.attempt_numbers() == [1, 2]


def test_a_superseded_command_that_exits_with_0_leaves_the_run(run, slurm, monkeypatch):
    plan_file = run.attempt(1).plan_file
    write_json(plan_file, {**read_json(plan_file), "command": ["python", "train.py"]})
    watch = watch_of(run, monkeypatch)
    watch.superseded_by = AttemptRecord(2, "8")
    watch.observed.stop_signal, watch.observed.exits = "SIGUSR2", [(0, 0)]
    monkeypatch.setattr(watch, "run", lambda: None)
    given = allocation.SlurmAllocation(run, "7", [])
    monkeypatch.setattr(given, "watch", lambda attempt: watch)
    live = Attempt(run.attempt(1))
    live.observed = watch.observed
    decision = supervisor.Supervisor(given)._run_attempt(live)
    assert decision.action == "stopped"
    said(decision.reason)


def watch_of(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: str = SLEEPS) -> SlurmAttemptWatch:
    monkeypatch.setattr(SlurmAttemptWatch, "poll_interval_s", 0.1)
    plan = LaunchPlan.from_dict(read_json(run.attempt(1).plan_file))
    return SlurmAttemptWatch(Attempt(run.attempt(1), plan), [sys.executable, "-c", code], supervisor_view="")


def test_a_start_waits_for_room_on_the_disk(run, slurm, monkeypatch):
    monkeypatch.setattr("trainkit.job.processes.DISK_RETRY_S", 0.05)
    full = OSError(errno.ENOSPC, "No space left on device")
    take_later = Mock(wraps=claim_attempt, side_effect=[full, full, DEFAULT, full])
    monkeypatch.setattr(allocation, "claim_attempt", lambda run, job_id, *_: take_later(run, job_id))
    assert start(run) == 0
    assert take_later.call_count == 3
    monkeypatch.setattr("trainkit.job.processes.DISK_PATIENCE_S", 0.0)
    assert supervise_job(run, [sys.executable, "-c", "pass"]) == 1


def test_hosts_that_are_given_up(run, slurm, monkeypatch):
    note = Mock()
    monkeypatch.setattr(allocation, "note_failure", note)
    monkeypatch.setattr(allocation, "excluded", lambda cluster, run: {"node9": "it died in an earlier start"})
    given = allocation.SlurmAllocation(run, "7", [])
    for host in ("node1.cluster.local", "node1"):  # Slurm knows only the second name
        given.record_suspect(Attempt(run.attempt(1)), RankFailure(host=host, node=True, message="no GPU"))
    assert [call.args[1] for call in note.call_args_list] == ["node1"]
    assert given.good_hosts == []
    assert given.hosts_to_exclude() == ["node1", "node9"]


def test_a_step_that_cannot_start_and_a_start_outside_of_slurm(run, slurm, monkeypatch, capfd):
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    assert supervise_job(run, ["/no/such/srun"]) == 1
    assert "No such file" in read_json(run.attempt(1).end_file)["reason"]
    monkeypatch.delenv("SLURM_JOB_ID")
    capfd.readouterr()
    assert supervise_job(run, ["true"]) == 1
    said(capfd.readouterr().out)


class TestHeldLocks:
    """Tests a lock that stays held, for example by a host that is down."""

    @pytest.fixture(autouse=True)
    def impatient(self, run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trainkit.locks.STOP_S", 0.1)
        monkeypatch.setattr(allocation.SlurmAllocation, "lock_timeout_s", 0.2)
        monkeypatch.setattr(allocation, "await_eviction", lambda: None)
        add_slurm_attempt(run, 1, "7", "submit", "sbatch")
        shutil.copyfile(run.attempt(1).plan_file, run.plan_file)

    @pytest.fixture
    def terminated(self) -> Iterator[None]:
        """Make a stop signal pending, as after the supervisor has blocked it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.raise_signal(signal.SIGTERM)
        yield
        signal.sigtimedwait({signal.SIGTERM}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start(self, run: RunDir) -> int:
        return supervise_job(run, [sys.executable, "-c", "raise SystemExit(3)"])

    @pytest.mark.parametrize(
        ("case", "code"), [("waits", EXIT_STOPPED), ("used up", EXIT_FAILED), ("cancelled", EXIT_STOPPED)]
    )
    def test_a_job_that_cannot_claim_an_attempt_is_requeued(
        self, run, slurm, monkeypatch, capfd, request, case, code
    ):
        if case == "used up":
            monkeypatch.setenv("SLURM_RESTART_COUNT", "100")
        elif case == "cancelled":
            request.getfixturevalue("terminated")
            slurm.job = replace(RUNNING, state=JobState.CANCELLED)
        with file_lock(run.lock_file):
            assert self.start(run) == code
        assert slurm.requeued == (case == "waits")
        out = capfd.readouterr().out
        assert f"error: {run.lock_file} " in out
        assert f"process {os.getpid()} on " in out

    def test_a_held_supervisor_lock_is_tried_again_by_the_next_start(self, run, slurm):
        with file_lock(run.supervisor_lock_file):
            assert self.start(run) == EXIT_STOPPED
        end = read_json(run.attempt(1).end_file)
        assert (end["action"], end["cause"], slurm.requeued) == ("requeue", "not_started", 1)
        assert end["reason"].startswith(str(run.supervisor_lock_file))
        assert f"process {os.getpid()} on " in end["reason"]

    def test_a_held_supervisor_lock_is_logged_also_where_the_plan_is_damaged(self, run, slurm, capfd):
        run.attempt(1).plan_file.write_text("")
        with file_lock(run.supervisor_lock_file):
            assert self.start(run) == EXIT_FAILED
        hint = f"hint: if the host of that process is permanently down, remove {run.supervisor_lock_file}"
        assert hint in capfd.readouterr().out

    @pytest.mark.parametrize("is_preempted", [True, False])
    def test_the_supervisor_lock_is_awaited_until_slurm_ends_the_job(
        self, run, slurm, terminated, is_preempted
    ):
        state = JobState.RUNNING if is_preempted else JobState.CANCELLED
        slurm.job = replace(RUNNING, state=state, is_preempted=is_preempted)
        with file_lock(run.supervisor_lock_file):
            assert self.start(run) == EXIT_STOPPED
        end = read_json(run.attempt(1).end_file)
        expected = ("requeue", "preempted", 1) if is_preempted else ("stopped", None, 0)
        assert (end["action"], end["cause"], slurm.requeued) == expected
