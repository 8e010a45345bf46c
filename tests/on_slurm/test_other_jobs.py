"""Tests runs that continue as another job: resubmitted by the ending job, or as a chained job."""

from typing import Any

from tests.on_slurm.login import ASK_SLURM_S, BACKENDS, Login, settings, wait_for
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

ENDS_AT_THE_SECOND_TIME = """
import os, time
print("attempt", os.environ["TRAINKIT_JOB_ATTEMPT"], "rank", os.environ["RANK"], flush=True)
time.sleep(600 if os.environ["TRAINKIT_JOB_ATTEMPT"] == "1" else 0)
"""
ONLY_BY_OTHER_JOBS = ("--time", "1", *settings("requeue.on=[timeout]"))
"""Options with which a run can continue only as another job.

Slurm may not requeue the job, and one minute is too short for a restart in the allocation.
"""


def carried(run: RunDir) -> list[tuple[str, str]]:
    """Return the job and the reason of every attempt."""
    return [(entry.job_id, entry.reason) for entry in read_job(run).attempts]


def waits_for(login: Login, job_id: str) -> str:
    found = login.cluster.job(job_id)["Dependency"]
    return "" if found == "(null)" else found


def test_a_follow_up_carries_the_run_on_and_the_rest_vanish(login):
    script = login.script(ENDS_AT_THE_SECOND_TIME)
    args = [*settings("requeue.follow_ups=2"), "--", "python", script]
    runs = [login.submit("--backend", backend, *args) for backend in BACKENDS]
    jobs = [_kill_the_supervisor(login, run) for run in runs]
    for run, (first, second, _) in zip(runs, jobs, strict=True):
        end = login.wait_for_end(run, attempt=2)
        assert end["state"] == "finished", login.logs_and_attempts(run)
        assert carried(run) == [(first, "submit"), (second, "restart")]
    login.wait_until_idle()
    for run, (_, second, third) in zip(runs, jobs, strict=True):
        assert login.cluster.job(third)["JobState"] == "CANCELLED"
        assert read_job(run).follow_ups == [second, third]


def _kill_the_supervisor(login: Login, run: RunDir) -> tuple[str, str, str]:
    """Kill the supervisor once its rank has started, and return the run's job and its two chained jobs."""
    first = login.job_id(run)
    second, third = read_job(run).follow_ups
    assert waits_for(login, second) == f"afternotok:{first}(unfulfilled)"
    assert waits_for(login, third) == f"afternotok:{first}(unfulfilled),afternotok:{second}(unfulfilled)"
    login.wait_for_log(run, "attempt 1 rank 0")
    # The supervisor is killed, so no process can requeue the job.
    supervisor = str(read_job(run).attempts[0].pid)
    overlapping = ["srun", f"--jobid={first}", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1"]
    login.run([*overlapping, "kill", "-KILL", supervisor])
    return first, second, third


def test_follow_ups_of_a_run_that_a_person_ends(login):
    run = login.submit(*settings("requeue.follow_ups=2", "resources.extra.hold=true"), "--", "true")
    first, second = login.job_id(run), read_job(run).follow_ups[0]
    # a person cancels the job, so the chained job replaces it, and is held too
    login.run(["scancel", first], check=True)
    wait_for(
        lambda: login.cluster.job(first)["JobState"] == "CANCELLED", "the first job's end", poll_s=ASK_SLURM_S
    )
    assert login.status(run)["state"] in ("pending", "requeueing")
    refused = login.trainkit("resume", str(run.path))
    assert (refused.returncode, f"is running as {second}" in refused.stderr) == (2, True)
    refused = login.trainkit("submit", str(login.config), "--after", str(run.path), "--", "true")
    assert (refused.returncode, "its 2 chained jobs" in refused.stderr) == (2, True)
    assert login.trainkit("cancel", second).returncode == 0
    assert login.jobs() == []
    assert login.status(run)["state"] == "cancelled"


def test_a_job_that_slurm_may_not_start_again_is_submitted_anew(login):
    listens = ("--", "python", "listens.py")
    runs = [login.submit(*ONLY_BY_OTHER_JOBS, "--backend", backend, *listens) for backend in BACKENDS]
    group = login.submit(*ONLY_BY_OTHER_JOBS, "--array", "3-4", *listens)
    runs.append(RunDir(group.path / "4"))
    for run in runs:
        login.wait_for_log(run, "attempt 1 rank 0")
    before = [login.job_id(run) for run in runs]
    after = login.submit("--after", str(runs[0].path), "--", "true")
    for run in runs:
        assert login.trainkit("requeue", str(run.path)).returncode == 0
    for run, first in zip(runs, before, strict=True):
        login.wait_for_log(run, "attempt 2 rank 0", attempt=2)
        (_, submitted), (second, trigger) = carried(run)
        assert (submitted, trigger) == ("submit", "restart")
        assert second != first
        assert second.partition("_")[2] == first.partition("_")[2]
        assert login.wait_for_end(run)["action"] == "resubmit"
        assert _asked_of(login, second) == _asked_of(login, first)
    waits_for = login.cluster.job(login.job_id(after))["Dependency"]
    assert waits_for == f"afterok:{login.job_id(runs[0])}(unfulfilled)"
    assert len(read_job(RunDir(group.path / "3")).attempts) == 1  # the other task is not affected
    # A second time: the files of the new job are complete.
    assert login.trainkit("requeue", str(runs[1].path)).returncode == 0
    login.wait_for_log(runs[1], "attempt 3 rank 0", attempt=3)
    for run in (after, *runs, group):
        assert login.trainkit("cancel", str(run.path), "--now").returncode == 0
    login.wait_until_idle()


def _asked_of(login: Login, job_id: str) -> dict[str, Any]:
    job = login.cluster.job(job_id)
    return {name: job[name] for name in ("JobName", "TimeLimit", "NumNodes", "Requeue", "StdOut")}
