"""Tests which steps a replay computes, and which requests it refuses before it starts."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.capabilities.replay.test_compare import PLAN, add_attempt, record, start
from tests.support.said import said
from trainkit.capabilities.replay import ReplayPart, replay
from trainkit.capabilities.replay.replay import ReplayPlan, plan_replay
from trainkit.cli.options import config_flags
from trainkit.errors import ConfigError, UsageError
from trainkit.launch.repeat import REPLAY_FILE
from trainkit.plan.launch import Batch, LaunchPlan, Layout, WorkerEnvironment
from trainkit.plan.workload import Workload
from trainkit.run.files import write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

CONFIG = "name: t\ndevice: cpu\ntrain: {steps: 40}\nparallel: {dp_shard: 2}\n"
SMALL = replace(PLAN, layout=Layout(dp_shard=2), num_nodes=1, batch=Batch(4, 1, 8, 512))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run that has computed 10 steps on two ranks, with checkpoints after steps 4 and 8."""
    run = RunDir(tmp_path / "run")
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.config_file.write_text(CONFIG)
    attempt.plan_file.write_text(SMALL.to_text())
    start(run, 1, 0)
    for step in range(1, 11):
        record(run, step, step_s=60.0)
    for step in (4, 8):
        run.checkpoint_dir(step).mkdir(parents=True)
    monkeypatch.setattr(replay, "find_damage", lambda checkpoint, reads_tensors: "")
    return run


def planned(run: RunDir, first: int, last: int | None = None, layout: str = "same") -> ReplayPlan:
    return plan_replay(run, first, first if last is None else last, layout, {})


def test_the_nearest_checkpoint_and_the_cost(run: RunDir) -> None:
    for first, last, begin in ((1, 1, 0), (4, 4, 0), (5, 5, 4), (8, 9, 4), (9, 9, 8), (20, 20, 8)):
        assert planned(run, first, last).start_step == begin
    with pytest.raises(UsageError, match="has not computed step 21: its last recorded step is 10"):
        planned(run, 21)  # any step up to 20 may have been the last, because the last step was not recorded
    cost = planned(run, 4).cost
    said(cost)
    # One checkpoint was removed.
    run.checkpoint_dir(8).rmdir()
    said(planned(run, 10).cost)


def test_other_layouts_keep_the_global_batch_and_the_learning_rate(run: RunDir) -> None:
    for layout, expected in (
        ("single", Layout()),
        ("tp=2", Layout(tp=2)),
        ("dp_replicate=2,dp_shard=1", None),
    ):
        found = planned(run, 9, layout=layout)
        assert found.plan.layout == (expected or Layout(dp_replicate=2))
        assert (found.plan.batch.global_batch_size, found.plan.lr) == (8, SMALL.lr)
        assert found.plan.part(ReplayPart) == ReplayPart((9, 9))
    assert planned(run, 9).plan.layout == SMALL.layout
    with pytest.raises(ConfigError):
        planned(run, 9, layout="tp=3")
    with pytest.raises(UsageError, match="2 nodes with 2 ranks each do not have the 2 ranks of the run"):
        plan_replay(run, 9, 9, "same", config_flags({"nodes": 2, "gpus_per_node": 2}))
    assert (
        plan_replay(run, 9, 9, "same", config_flags({"nodes": 2, "gpus_per_node": 1})).plan.layout
        == SMALL.layout
    )
    assert plan_replay(run, 9, 9, "dp_shard=-1", config_flags({"gpus_per_node": 1})).plan.layout == Layout()
    with pytest.raises(UsageError, match="the section parallel has no key tpp"):
        planned(run, 9, layout="tpp=2")


def test_a_replay_reports_to_nobody_and_never_restarts(run: RunDir) -> None:
    also = "logging: {mlflow: true}\nnotify: {webhook: HOOK}\nrequeue: {follow_ups: 2}\n"
    run.attempt(1).config_file.write_text(CONFIG + also)
    parts = {"trackers": {"names": ["mlflow"]}, "notifications": {"on": ["finished"], "webhook": "HOOK"}}
    run.attempt(1).plan_file.write_text(replace(SMALL, parts=parts).to_text())
    for layout in ("same", "single"):
        found = planned(run, 9, layout=layout)
        assert ({*parts} & {*found.plan.parts}, found.plan.requeue.on) == (set(), ())
        assert found.config.notify.webhook is None
        assert (found.config.logging.trackers, found.config.requeue.follow_ups) == ({}, 0)


def test_steps_that_had_other_values_since_the_checkpoint(run: RunDir) -> None:
    add_attempt(run, 2, 6, CONFIG.replace("40", "30") + "optimizer: {weight_decay: 0.2}\n", SMALL)
    record(run, 10, attempt=2)
    with pytest.raises(UsageError, match=r"attempt 1 computed step 5 .*weight_decay: 0.1 -> 0.2"):
        planned(run, 8)
    assert planned(run, 9).start_step == 8, "all since this checkpoint is of attempt 2"
    assert planned(run, 5).at.attempt.number == 1
    # These values do not change the computation of a step.
    run.attempt(2).config_file.write_text(CONFIG + "resources: {time: '5'}\ncheckpoint: {keep_last: 9}\n")
    assert planned(run, 8).start_step == 4
    run.attempt(2).plan_file.write_text(replace(SMALL, batch=Batch(8, 1, 16, 1024)).to_text())
    with pytest.raises(UsageError, match="global batch size: 8 -> 16"):
        planned(run, 8)


def test_a_run_that_began_with_the_checkpoint_of_another(run: RunDir) -> None:
    run.events_file.unlink()
    start(run, 1, 4)
    assert planned(run, 6).start_step == 4
    with pytest.raises(UsageError, match=r"no attempt of .* computed step 3"):
        planned(run, 3)
    for step in (4, 8):
        run.checkpoint_dir(step).rmdir()
    with pytest.raises(UsageError, match="no checkpoint before step 6, and it began with step 5"):
        planned(run, 6)


def test_runs_that_cannot_be_replayed(run: RunDir) -> None:
    plan = run.attempt(1).plan_file
    plan.write_text(replace(SMALL, workload=Workload(("python", "my train.py"))).to_text())
    with pytest.raises(
        UsageError, match=r"runs a command, .*my train.py.*, whose steps are unknown to trainkit"
    ):
        planned(run, 9)
    plan.write_text(replace(SMALL, device="cuda").to_text())
    with pytest.raises(UsageError, match=r"2 cuda ranks of the replay do not fit") as refused:
        planned(run, 9)
    assert "--submit" in refused.value.hint
    write_json(run.path / REPLAY_FILE, {"run": "/runs/one", "first": 1, "last": 2})
    with pytest.raises(UsageError, match="is a replay of /runs/one"):
        planned(run, 9)


def test_a_plan_of_a_replay_is_read_as_it_was_written(run: RunDir) -> None:
    plan = planned(run, 5, 6).plan
    assert LaunchPlan.from_dict(plan.to_dict()) == plan


def test_code_that_has_changed_since(run: RunDir) -> None:
    file = run.path.parent / "my_task.py"
    file.write_text("")
    os.utime(file, (0, 0))
    run.attempt(1).config_file.write_text(CONFIG + "task: my_task.py:MyTask\n")
    job = {"backend": "local", "name": "t", "cwd": str(run.path.parent), "attempts": []}
    write_json(run.job_file, job)
    assert planned(run, 9).warnings == ()
    file.touch()
    (warning,) = planned(run, 9).warnings
    said(warning)
    write_json(run.job_file, {**job, "code": {"workdir": str(run.path.parent)}})
    assert planned(run, 9).warnings == ()


def test_ranks_here_import_from_the_copy_of_the_code(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    paths = []

    def start(argv: object, *, environ: dict[str, str], **_: object) -> None:
        paths.append(environ["PYTHONPATH"])
        raise InterruptedError

    monkeypatch.setattr(replay, "start_child", start)
    code = {"workdir": "/runs/one/code", "import_path": ["/runs/one/code/src", "/runs/one/code"]}
    write_json(run.job_file, {"backend": "sbatch", "name": "t", "attempts": [], "code": code})
    run.attempt(1).logs_dir.mkdir()
    for env, end in (({}, "/mine"), ({"PYTHONPATH": "/set"}, "/set")):
        plan = replace(SMALL, environment=WorkerEnvironment(env))
        with pytest.raises(InterruptedError):
            replay._run_ranks(plan, run.attempt(1), read_job(run).code)
        assert paths[-1].endswith(f":/runs/one/code/src:/runs/one/code:{end}")


def test_a_checkpoint_stays_although_the_run_removes_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run.checkpoint_dir(8) / "manifest.json"
    file.write_text("{}")
    target = run.path.parent / "copy"
    replay._link_checkpoint(file.parent, target)
    shutil.rmtree(file.parent)
    assert (target / file.name).read_text() == "{}"

    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    again = run.path.parent / "again"
    replay._link_checkpoint(target, again)
    assert again.readlink() == target
