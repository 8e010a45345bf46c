"""Tests which jobs ``--after`` waits for."""

import json
from pathlib import Path

import pytest

from tests.support.groups import make_group
from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.launch import dependency
from trainkit.launch.dependency import dependencies, dependency_ids, with_dependency
from trainkit.observe.group import TrialStatus
from trainkit.plan.launch import Batch, LaunchPlan, Layout, SlurmRequest
from trainkit.run.files import write_json
from trainkit.run.group import create_task_run
from trainkit.run.record import change_newest
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob


def plan(slurm: SlurmRequest | None) -> LaunchPlan:
    return LaunchPlan(
        backend="local" if slurm is None else "sbatch",
        num_nodes=1,
        workers_per_node=1,
        device="cpu",
        layout=Layout(),
        batch=Batch(1, 1, 1, 1),
        lr=0.1,
        threads_per_worker=None,
        grace_s=1.0,
        reasons={},
        slurm=slurm,
    )


def run(folder: str, state: str, job_id: str | None, reason: str | None = None) -> TrialStatus:
    return TrialStatus(0, {}, state, reason, job_id, None, folder)


def tasks(*states: str) -> list[TrialStatus]:
    return [run(f"runs/g/{index}", state, f"12_{index}") for index, state in enumerate(states)]


@pytest.mark.parametrize("state", ["pending", "starting", "running", "stopping", "requeueing"])
def test_a_run_that_may_finish(state: str) -> None:
    assert dependency_ids("first", [run("runs/first", state, "12")]) == ["12"]


def test_a_run_that_has_finished_is_not_waited_for() -> None:
    assert dependency_ids("first", [run("runs/first", "finished", "12")]) == []
    assert dependency_ids("first", [run("runs/first", "finished", "local-12")]) == []


RESUME = "resume it first: `trainkit resume 'runs/my first'`"


@pytest.mark.parametrize(
    ("runs", "message", "hint"),
    [
        *(
            ([run("runs/my first", state, "12", "exit code 3")], f"my first is {state} (exit code 3)", RESUME)
            for state in ("failed", "cancelled", "stopped", "died", "incomplete")
        ),
        (
            [run("runs/1", "unknown", "12")],
            "1 is unknown",
            "`trainkit status runs/1` shows",
        ),
        (
            [run("runs/1", "running", "local-12")],
            "1 runs on this machine, so Slurm cannot wait for it",
            "`trainkit logs runs/1 -f` returns when it has ended",
        ),
        (
            tasks("failed", "running", "died", "failed", "cancelled", "failed"),
            "g/0 is failed; 5 of 6 runs will not finish",
            "resume it first: `trainkit resume runs/g/0`",
        ),
    ],
)
def test_what_cannot_finish_is_refused(runs: list[TrialStatus], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        dependency_ids("name", runs, ["12"])
    assert caught.value.message == f"--after name: runs/{message}"
    assert caught.value.hint.startswith(hint)


def test_a_whole_array_is_one_dependency() -> None:
    assert dependency_ids("g", tasks("finished", "running", "pending"), ["12"]) == ["12"]
    assert dependency_ids("g", tasks("finished", "finished"), ["12"]) == []


def test_a_point_that_was_started_again_is_waited_for_by_its_own_job() -> None:
    # The array's task has failed, so afterok of the array would never be satisfied.
    runs = [*tasks("running", "finished"), run("runs/g/2", "running", "99")]
    assert dependency_ids("g", runs, ["12"]) == ["12_0", "99"]


def test_the_plan_says_what_it_waits_for() -> None:
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
def test_a_point_on_another_cluster_may_have_the_id_of_its_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_points: tuple[int, ...]
) -> None:
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


def test_a_run_on_this_machine_waits_for_folders() -> None:
    after = with_dependency(plan(None), ["a"], ["/runs/a"])
    assert (after.after, [*after.reasons]) == (("/runs/a",), ["after"])
    said(after.reasons["after"])
    assert LaunchPlan.from_dict(json.loads(after.to_text())) == after
    assert "after" not in plan(None).to_dict()
