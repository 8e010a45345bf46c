"""Tests runs in time slices: jobs up to a total, and a job that Slurm shortens to fit a gap."""

import pytest

from tests.on_slurm.login import settings, wait_for
from trainkit.run.end import read_end
from trainkit.run.events import read_events
from trainkit.run.record import read_job

ONE_RANK = ("--nodes", "1", "--gpus-per-node", "1", *settings("device=cpu"))
GRACE_S = 15
"""The longest grace time for a job of one minute, the minimum in Slurm.

Slurm may send the signal up to 30 s early.
"""
RUN = ("--", "python", "listens.py")


@pytest.mark.slow(seconds=70)
def test_slices_end_with_their_total(login):
    run = login.submit(
        *(*ONE_RANK, *settings(f"requeue.grace_s={GRACE_S}"), "--partition", "debug,high"),
        *("--time", "00:01:20", "--slice", "1", *RUN),
    )
    job = login.cluster.job(login.job_id(run))
    assert job["TimeLimit"] == "00:01:00"

    def last() -> int | None:
        number = run.attempt_numbers()[-1]
        end = read_end(run.attempt(number))
        return None if end is None or end.resumes else number

    wait_for(lambda: last() is not None, "the end of the last slice", 400.0)
    ends = [read_end(run.attempt(number)) for number in run.attempt_numbers()]
    assert len(ends) > 1, login.logs_and_attempts(run)
    assert {end.cause for end in ends if end is not None} == {"timeout"}, login.logs_and_attempts(run)
    final = ends[-1]
    assert final is not None
    assert (final.state, final.action) == ("stopped", "stopped")
    assert "the run has used up the 00:01:20 of resources.time" in final.reason
    assert {entry.job_id for entry in read_job(run).attempts} == {login.job_id(run)}
    assert all(event.text("partition") in ("debug", "high") for event in read_events(run, "started"))
    status = login.status(run)
    assert status["partition"] in ("debug", "high")
    assert status["total_s"] == 80
    assert 80 - 2 * GRACE_S <= status["slices_s"] <= 80
    shown = login.trainkit("status", str(run.path)).stdout
    assert f" in {len(ends)} attempts; slices 00:0" in shown
    assert f"on cpu, partition {status['partition']}" in shown


@pytest.mark.slow(seconds=100)
def test_a_job_that_slurm_shortens_saves_before_its_own_end(login):
    busy = ("--partition=high", "--time=3")
    with login.other_job("--nodes=3", *busy):
        with login.other_job("--nodes=4", *busy, waits=True):
            shape = (*ONE_RANK, *settings("requeue.grace_s=15"), "--partition", "high")
            run = login.submit(*shape, "--time", "60", "--time-min", "1", *RUN)
            login.wait_for_log(run, "rank 0")
            job = login.cluster.job(login.job_id(run))
            assert job["TimeMin"] == "00:01:00"
            assert job["TimeLimit"] in ("00:01:00", "00:02:00")  # the gap has three minutes
        end = login.wait_for_end(run)
        assert (end["action"], end["cause"]) == ("requeue", "timeout"), login.logs_and_attempts(run)
        assert end["reason"].startswith("saved after SIGUSR2")
        login.wait_for_log(run, "rank 0", attempt=2)
