"""Tests which jobs ``--after`` waits for."""

import json

import pytest

from tests.support.groups import make_group
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.launch import dependency
from trainkit.launch.dependency import dependencies, dependency_ids, with_dependency
from trainkit.observe.group import TrialStatus
from trainkit.plan.launch import LaunchPlan, SlurmRequest
from trainkit.run.files import write_json
from trainkit.run.group import create_task_run
from trainkit.run.record import change_newest
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob


def plan(slurm: SlurmRequest | None) -> LaunchPlan:
    return launch_plan(backend="local" if slurm is None else "sbatch", slurm=slurm)


def run(folder: str, state: str, job_id: str | None, reason: str | None = None) -> TrialStatus:
    return TrialStatus(0, {}, state, reason, job_id, None, folder)


def tasks(*states: str) -> list[TrialStatus]:
    return [run(f"runs/g/{index}", state, f"12_{index}") for index, state in enumerate(states)]


OPEN = ("pending", "starting", "running", "stopping", "requeueing")


@pytest.mark.parametrize(
    ("runs", "array", "expected"),
    [
        *(([run("runs/first", state, "12")], [], ["12"]) for state in OPEN),
        *(([run("runs/first", "finished", job)], [], []) for job in ("12", "local-12")),
        # A whole array is one dependency.
        (tasks("finished", "running", "pending"), ["12"], ["12"]),
        (tasks("finished", "finished"), ["12"], []),
        # The array's task has failed, so afterok of the array would never be satisfied.
        ([*tasks("running", "finished"), run("runs/g/2", "running", "99")], ["12"], ["12_0", "99"]),
    ],
)
def test_which_jobs_are_waited_for(runs, array, expected):
    assert dependency_ids("first", runs, array) == expected


@pytest.mark.parametrize(
    "runs",
    [
        *(
            [run("runs/my first", state, "12", "exit code 3")]
            for state in ("failed", "cancelled", "stopped", "died", "incomplete")
        ),
        [run("runs/1", "unknown", "12")],
        [run("runs/1", "running", "local-12")],
        tasks("failed", "running", "died", "failed", "cancelled", "failed"),
    ],
    ids=lambda runs: f"{len(runs)} {runs[0].state}",
)
def test_what_cannot_finish_is_refused(runs):
    with pytest.raises(UsageError) as caught:
        dependency_ids("name", runs, ["12"])
    said(f"{caught.value.message}\nhint: {caught.value.hint}")


def test_the_plan_says_what_it_waits_for():
    before = plan(SlurmRequest({"job-name": "x"}))
    after = with_dependency(before, ["a", "b"], ["12", "13", "12"])
    assert after.slurm.sbatch == {"job-name": "x", "dependency": "afterok:12:13"}
    assert [*after.reasons] == ["after"]
    said(after.reasons["after"])
    assert before.slurm == SlurmRequest({"job-name": "x"})
    at_once = with_dependency(before, ["a"], [])
    assert (at_once.slurm, [*at_once.reasons]) == (before.slurm, ["after"])
    said(at_once.reasons["after"])


@pytest.mark.parametrize("open_points", [(0, 1), (0,), (1,)])
def test_a_point_on_another_cluster_may_have_the_id_of_its_array(tmp_path, monkeypatch, open_points):
    (tmp_path / "slurm.conf").write_text("ClusterName=west\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    group = make_group(tmp_path, {0: {"seed": 1}, 1: {"seed": 2}}, cluster="east")
    for index in group.trials:
        create_task_run(group.run(index))
        if index not in open_points:
            write_json(group.run(index).attempt(1).end_file, {"state": "finished", "action": "finished"})
    # This is the state after `trainkit resume` on this cluster, where another job has the id of the array.
    change_newest(group.run(1), job_id="12", cluster="west")
    monkeypatch.setattr(
        dependency, "query_jobs", lambda ids: {job: SlurmJob(job, JobState.RUNNING) for job in ids}
    )
    waits_for = dependencies([str(group.path)], print, on_slurm=True)
    assert waits_for == [("12_0;east", "12")[index] for index in open_points]
    if len(open_points) > 1:
        with pytest.raises(UsageError, match="a job can wait only for jobs on its own cluster") as caught:
            with_dependency(plan(SlurmRequest({}, clusters=("east",))), ["g"], waits_for)
        said(caught.value.message)


def test_a_run_on_this_machine_waits_for_folders():
    after = with_dependency(plan(None), ["a"], ["/runs/a"])
    assert (after.after, [*after.reasons]) == (("/runs/a",), ["after"])
    said(after.reasons["after"])
    assert LaunchPlan.from_dict(json.loads(after.to_text())) == after
    assert "after" not in plan(None).to_dict()
