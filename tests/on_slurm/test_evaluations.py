"""Tests evaluations of checkpoints in jobs of their own, on a real Slurm."""

import json

import pytest

from tests.on_slurm.login import events, settings, wait_for
from tests.support.published import PUBLISHES, WRITES
from trainkit.capabilities.evaluations.records import read_evaluations
from trainkit.run.rundir import RunDir


def submit(login, *more: str) -> RunDir:
    login.script(PUBLISHES, "publishes.py")
    options = [f"on_checkpoint.command={json.dumps(WRITES)}", "on_checkpoint.resources.time=00:05:00", *more]
    return login.submit(*settings(*options), "--", "python", "publishes.py")


def states(run: RunDir) -> dict[int, str]:
    return {step: one.state for step, one in read_evaluations(run).items()}


@pytest.mark.slow(seconds=40)
def test_each_checkpoint_has_a_job(login):
    """Jobs that wait while the run ends are evaluated, because they do not belong to the run's job."""
    run = submit(login, "on_checkpoint.keep_best_by={metric: acc}")
    wait_for(lambda: states(run) == dict.fromkeys((1, 2, 3), "done"), "three evaluations")
    found = read_evaluations(run)
    jobs = {one.job_id for one in found.values()}
    assert len(jobs) == 3
    assert None not in jobs
    assert json.loads(login.trainkit("status", str(run.path), "--json").stdout)["state"] == "running"
    assert {step: one.metrics for step, one in found.items()} == {n: {"acc": float(n)} for n in (1, 2, 3)}
    (run.path / "finish").touch()
    assert login.trainkit("wait", str(run.path)).returncode == 0


@pytest.mark.slow(seconds=40)
def test_a_job_that_cannot_submit(login):
    """The run continues, says once what to do, and its checkpoints are evaluated on the login node."""
    run = submit(login, "on_checkpoint.resources.partition=nowhere")
    wait_for(lambda: "evaluation_not_submitted" in events(run), "a refused submission")
    found = json.loads(login.trainkit("status", str(run.path), "--json").stdout)
    assert found["state"] == "running"
    assert [one for one in found["warnings"] if "nowhere" in one or "partition" in one]
    assert [one for one in found["warnings"] if "--follow` on the login node submits them" in one]
    (run.path / "finish").touch()
    assert login.trainkit("wait", str(run.path)).returncode == 0
    assert events(run).count("evaluation_not_submitted") == 1
    refused = login.trainkit("eval", str(run.path), "--all")
    assert refused.returncode == 2
    assert "an evaluation could not be submitted" in refused.stderr
    assert login.trainkit("eval", str(run.path), "--all", "--here").returncode == 0
    assert states(run) == dict.fromkeys((1, 2, 3), "done")
