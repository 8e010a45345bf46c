"""Tests runs in time slices: jobs that end at their time limit, up to a total."""

import pytest

from tests.on_slurm.login import settings, wait_for
from trainkit.run.end import read_end
from trainkit.run.events import read_events
from trainkit.run.record import read_job

GRACE_S = 15
"""The longest grace time for a job of one minute, the minimum in Slurm.

Slurm may send the signal up to 30 s early.
"""


@pytest.mark.slow(seconds=70)
def test_slices_end_with_their_total(login):
    run = login.submit(
        *("--nodes", "1", "--gpus-per-node", "1", *settings(f"requeue.grace_s={GRACE_S}")),
        *("--partition", "debug,high", "--time", "00:01:20", "--slice", "1", "--", "python", "listens.py"),
    )
    assert login.cluster.job(login.job_id(run))["TimeLimit"] == "00:01:00"

    def last() -> int | None:
        number = run.attempt_numbers()[-1]
        end = read_end(run.attempt(number))
        return None if end is None or end.resumes else number

    wait_for(lambda: last() is not None, "the end of the last slice", 400.0)
    ends = [read_end(run.attempt(number)) for number in run.attempt_numbers()]
    assert len(ends) > 1, login.logs_and_attempts(run)
    assert {end.cause for end in ends if end is not None} == {"timeout"}, login.logs_and_attempts(run)
    assert ends[0] is not None
    assert ends[0].reason.startswith("saved after SIGUSR2")
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
