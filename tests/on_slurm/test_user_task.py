"""Tests that the tutorial's task, in a separate folder, is preempted on two hosts and continues exactly."""

from __future__ import annotations

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import settings
from tests.on_slurm.survival import RESTART_S, wait_for_steps, wait_until_over
from tests.support.tasks import write_tutorial

pytestmark = pytest.mark.xdist_group("survive")
VALUES = (
    *("device=cpu", "precision.dtype=fp32", "resources.gpus_per_node=1", "resources.cpus_per_gpu=1"),
    *("parallel.dp_shard=2", "data.num_workers=1", "train.device_batch_size=8", "train.global_batch_size=16"),
    *("train.steps=40", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=10"),
    *("resources.time='10'", "requeue.grace_s=20", "logging.tensorboard=false"),
)


@pytest.mark.slow(seconds=25)
def test_preempted(login, tmp_path_factory):
    config = write_tutorial(login.folder)
    folder = tmp_path_factory.mktemp("whole")
    alone = survival.undisturbed(folder, write_tutorial(folder), 2, [*VALUES, "data.num_workers=0"])
    login.script(survival.WAITS_IN_EACH_STEP, "sitecustomize.py")
    run = login.submit("--nodes", "2", "--partition", "low", *settings(*VALUES), config=config)
    wait_for_steps(run, 1, 5)
    survival.preempt(login.cluster)
    assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    assert run.attempt_numbers() == [1, 2]
    assert survival.computed_twice(run) == []
    assert survival.curve(run) == survival.curve(alone)
    login.wait_until_idle()


def test_the_tutorial_is_short(tmp_path):
    config = write_tutorial(tmp_path)
    lines = [line for line in (config.parent / "curves.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 60
