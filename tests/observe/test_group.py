"""Tests the status of a group, computed from its files and from Slurm's answer."""

import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.groups import SUBMITTED_AT, make_group
from tests.support.said import said
from trainkit.control import cancel as control_cancel
from trainkit.control.cancel import cancel_group
from trainkit.observe.group import GroupFiles, GroupStatus, most_relevant
from trainkit.run.end import Best
from trainkit.run.events import log_event
from trainkit.run.files import append_jsonl, read_json, to_json, write_json
from trainkit.run.group import RunGroup, Trial, create_task_run
from trainkit.run.record import add_slurm_attempt, claim_entry
from trainkit.run.rundir import RunDir, run_lock
from trainkit.scheduler import JobState
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.jobs import SlurmJob

NOW = datetime(2026, 1, 1, 0, 0, 30, tzinfo=timezone.utc)
LRS = {index: {"optimizer.lr": 0.1 * (index + 1)} for index in range(4)}


def jobs(**states: JobState) -> dict[str, SlurmJob]:
    """Return Slurm's answer about tasks, which are named by `_INDEX`."""
    return {f"12{task}": SlurmJob(f"12{task}", one, slurm_state=one.name) for task, one in states.items()}


@pytest.fixture
def group(tmp_path: Path) -> RunGroup:
    return make_group(tmp_path, LRS)


def status(group: RunGroup, known: dict[str, SlurmJob] | None) -> GroupStatus:
    return GroupFiles(group).status(known, NOW)


def states(group: RunGroup, known: dict[str, SlurmJob] | None) -> list[str]:
    return [trial.state for trial in status(group, known).trials]


def started(group: RunGroup, index: int) -> RunDir:
    run = group.run(index)
    create_task_run(run)
    claim_entry(run, 1, 1)
    return run


def ended(run: RunDir, state: str, best: float | None = None, attempt: int = 1, **more: Any) -> None:
    value = None if best is None else {"metric": "val_loss", "value": best, "step": 5}
    end = {"state": state, "action": state, "exit_code": 0, "reason": f"it {state}", "best": value, **more}
    write_json(run.attempt(attempt).end_file, end)


def test_points_without_a_folder_are_what_slurm_says(group):
    known = jobs(_0=JobState.PENDING, _1=JobState.RUNNING, _2=JobState.FAILED, _3=JobState.CANCELLED)
    assert states(group, known) == ["pending", "starting", "died", "cancelled"]
    assert [trial.job_id for trial in status(group, known).trials] == ["12_0", "12_1", "12_2", "12_3"]
    assert states(group, None) == ["unknown"] * 4
    assert list(group.path.glob("[0-9]*")) == []
    known = {"12_0": SlurmJob("12_0", JobState.PENDING, "PENDING", "DependencyNeverSatisfied")}
    assert "will never start" in str(status(group, known).trials[0].reason)


def test_what_is_forgotten_is_not_taken_for_finished(group):
    started(group, 0)
    known = jobs(_0=JobState.UNKNOWN, _1=JobState.UNKNOWN, _2=JobState.CANCELLED, _3=JobState.RUNNING)
    assert states(group, known) == ["died", "died", "cancelled", "starting"]
    group.update(cancelled_at=SUBMITTED_AT)
    assert states(group, known) == ["died", "cancelled", "cancelled", "starting"]


def test_points_that_run_and_that_have_ended(group):
    ended(started(group, 0), "finished", 2.5)
    running = started(group, 1)
    append_jsonl(running.metrics_file, {"step": 1, "loss": 3.0})
    log_event(running, 1, "evaluated", step=7, val_loss=2.25)
    ended(started(group, 2), "stopped", action="requeue", reason="saved")
    ended(started(group, 3), "failed", None)
    known = jobs(_1=JobState.RUNNING, _2=JobState.REQUEUED)
    seen = status(group, known)
    assert [trial.state for trial in seen.trials] == ["finished", "running", "requeueing", "failed"]
    assert seen.states == {"failed": 1, "running": 1, "requeueing": 1, "finished": 1}
    assert (seen.best.index, seen.best.best) == (1, Best("val_loss", 2.25, 7))
    assert seen.age_s == 30.0
    assert [trial.index for trial in most_relevant(seen, 3)] == [3, 1, 2]
    assert GroupFiles(group).open_ids == ["12_1", "12_2"]


def test_points_that_have_run_for_long_take_no_longer(group, monkeypatch):
    for index in LRS:
        metrics = "".join(f'{{"attempt": 1, "step": {step}, "loss": 2.5}}\n' for step in range(500))
        started(group, index).metrics_file.write_text(metrics)
    parsed = Mock(wraps=json.loads)
    monkeypatch.setattr(json, "loads", parsed)
    seen = status(group, jobs(**{f"_{index}": JobState.RUNNING for index in LRS}))
    assert [trial.best for trial in seen.trials] == [Best("loss", 2.5, 499)] * 4
    assert parsed.call_count < 100


def test_a_copy_of_a_group_has_ended_too(group, tmp_path):
    ended(started(group, 0), "finished")
    copy = shutil.copytree(group.path, tmp_path / "copy", symlinks=True)
    latest = copy / "0/attempts/latest"
    latest.unlink()
    shutil.copytree(copy / "0/attempts/001", latest, symlinks=True)  # `cp -L` and scp copy in this way
    assert states(RunGroup(copy), None)[0] == "finished"


def test_a_point_that_was_started_again_on_its_own(group):
    run = started(group, 0)
    ended(run, "failed")
    with run_lock(run):
        run.attempt(2).create()
        add_slurm_attempt(run, 2, "99", "requeue", "sbatch")
    look = GroupFiles(group)
    assert look.open_ids == ["99", "12_1", "12_2", "12_3"]
    trial = look.status({"99": SlurmJob("99", JobState.PENDING)}, NOW).trials[0]
    assert (trial.state, trial.job_id) == ("pending", "99")


def test_damaged_and_unreadable_files_are_passed_over(group, monkeypatch):
    run = started(group, 0)
    run.job_file.write_text('{"attempts": [3')
    run.attempt(1).end_file.write_text("[]")
    (group.path / "99").mkdir()
    ended(started(group, 1), "finished", 2.0)
    known, expected = jobs(_0=JobState.RUNNING, _1=JobState.COMPLETED), ["starting", "finished"]
    assert states(group, known)[:2] == expected
    refuse = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("trainkit.observe.group.read_events", refuse)
    assert states(group, known)[:2] == expected


@pytest.mark.slow(seconds=3)  # slow tests are measured alone, not next to others on the same cores
@pytest.mark.parametrize(("num_points", "num_ended"), [(2_000, 0), (500, 500)])
def test_many_points_cost_little_more_than_reading_them(tmp_path, num_points, num_ended, monkeypatch):
    # Processor time does not measure threads that wait for each other.
    monkeypatch.setattr("trainkit.observe.group.NUM_READERS", 1)
    group = make_group(tmp_path, {0: {"seed": 0}})
    trials = [Trial(index, {"seed": index}) for index in range(num_points)]
    write_json(group.sweep_file, group.record.to_dict(trials))
    for index in range(num_ended):
        run = RunDir(group.path / str(index))
        run.attempt(1).path.mkdir(parents=True)
        run.attempt(1).make_latest()
        ended(run, "finished", 2.5, reason="x" * 80)
        entry = {"attempt": 1, "job_id": f"12_{index}", "backend": "sbatch", "code": ["x" * 80] * 20}
        write_json(run.job_file, {"attempts": [entry]})
    known = jobs(**{f"_{index}": JobState.PENDING for index in range(num_ended, num_points)})

    def spent_s(work: Callable[[], object]) -> float:
        began_s = time.process_time()
        work()
        return time.process_time() - began_s

    def read() -> None:
        for index in range(num_ended):
            json.loads((group.path / str(index) / "job.json").read_text())
            json.loads((group.path / str(index) / "attempts/001/end.json").read_text())

    def show() -> None:
        texts.append(json.dumps(GroupFiles(fresh).status(known, NOW + timedelta(seconds=1)).to_dict()))

    texts, took_s, least_s = list[str](), [], []
    while not took_s or min(took_s) >= min(least_s):  # only noise of other processes needs another round
        assert len(took_s) < 12, (took_s, least_s)
        fresh = RunGroup(group.path)
        gc.collect()  # objects of other tests must not be collected during the measurement
        reading_s = spent_s(read)
        took_s.append(spent_s(show))
        answer_s = spent_s(lambda: json.loads(json.dumps(json.loads(texts[-1]), indent=2)))
        # A little more than the time for reading the two files of each trial and printing the answer.
        least_s.append(3 * answer_s + 1.5 * reading_s)
    found = json.loads(texts[-1])
    assert found["states"] == {"finished" if num_ended else "pending": num_points}
    assert len(found["points"]) == num_points


def test_a_group_on_another_cluster_is_asked_of_that_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "slurm.conf").write_text("ClusterName=west\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    group = make_group(tmp_path, LRS)
    assert len(GroupFiles(group).open_ids) == 4
    started(group, 0)
    group.update(cluster="east")
    names = ["12_0", "12_1;east", "12_2;east", "12_3;east"]
    assert GroupFiles(group).open_ids == names, "the first trial was started here"
    # Jobs of other users have the same ids on this cluster.
    here = jobs(_0=JobState.RUNNING, _1=JobState.RUNNING, _2=JobState.RUNNING)
    assert states(group, here)[1:] == ["unknown"] * 3
    there = {f"{job};east": info for job, info in jobs(_1=JobState.RUNNING, _2=JobState.PENDING).items()}
    there["12_3;east"] = SlurmJob("12_3", JobState.UNKNOWN)
    assert states(group, here | there) == ["starting", "starting", "pending", "died"]
    trials = to_json(GroupFiles(group).status(here | there, NOW).trials)
    assert [trial.get("cluster") for trial in trials] == [None, "east", "east", "east"]
    assert "cluster" not in trials[0]
    done: list[tuple[str, Sequence[str]]] = []
    away: list[str] = []

    def query(ids: Sequence[str]) -> tuple[dict[str, SlurmJob], dict[str, SlurmUnreachable]]:
        answered = {job: (here | there)[job] for job in ids if job.partition(";")[2] not in away}
        return answered, {one: SlurmUnreachable("it is away") for one in away}

    monkeypatch.setattr(control_cancel, "query_clusters", query)
    for name in ("cancel_waiting", "cancel"):
        monkeypatch.setattr(control_cancel, name, lambda ids, name=name: done.append((name, ids)))
    monkeypatch.setattr(control_cancel, "send_signal", lambda ids, signal: done.append((signal, ids)))
    cancel_group(group, now=False, wait=False)
    # The first trial has a separate job, like a trial that was resumed.
    assert done == [("cancel_waiting", ["12;east", "12_0"]), ("SIGTERM", ["12;east", "12_0"])]
    for away[:], jobs_there in ((["east"], ["12_0"]), ([""], ["12;east"]), (["", "east"], [])):
        done.clear()
        group.update(cancelled_at=None)
        with pytest.raises(SlurmUnreachable, match="it is away"):
            cancel_group(group, now=False, wait=False)
        assert done == ([("cancel_waiting", jobs_there), ("SIGTERM", jobs_there)] if jobs_there else [])
        assert (group.record.cancelled_at is None) == (not jobs_there)
    said(capsys.readouterr().err)
    create_task_run(group.run(3))
    assert read_json(group.run(3).job_file)["attempts"][0]["cluster"] == "east"
    monkeypatch.setenv("SLURM_CLUSTERS", "east")
    assert GroupFiles(group).jobs == {0: "12_0;west", 1: "12_1", 2: "12_2", 3: "12_3"}
