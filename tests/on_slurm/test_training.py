"""Tests the quickstart on several hosts: it has the losses of one process, whatever starts the ranks."""

from pathlib import Path

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import Login, agents_of, settings
from tests.on_slurm.survival import RESTART_S, wait_for_steps, wait_until_over
from tests.support.runs import losses
from tests.support.tasks import write_tutorial
from trainkit.run.rundir import RunDir

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
SHORT = settings(
    *("train.steps=3", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=null"),
    *("data.seq_len=64", "resources.cpus_per_gpu=1", "logging.tensorboard=false"),
)
TIMEOUT_S = 600.0


def quickstart(login: Login, num_ranks: int, *args: str) -> RunDir:
    """Return a run of the quickstart, once it has finished."""
    command = ["submit", str(QUICKSTART), "--set", "device=cpu", *SHORT, *args, "--follow"]
    done = login.trainkit(*command, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    run = RunDir(done.stdout.splitlines()[0])
    assert len(list(run.attempt(1).logs_dir.glob("rank-*.log"))) == num_ranks
    return run


def test_four_ranks_on_two_hosts(login):
    """The run uses submitit with two ranks per node. The README trains with sbatch and one task per rank."""
    alone = quickstart(login, 1, "--backend", "local", "--gpus-per-node", "1", "--name", "alone")
    shape = ("--nodes", "2", "--gpus-per-node", "2")
    run = quickstart(login, 4, *shape, "--backend", "submitit", "--per", "node")
    assert agents_of(run) == list(enumerate(login.cluster.hosts[:2]))
    expected = losses(alone.path)
    assert len(expected) == 3
    assert losses(run.path) == pytest.approx(expected, rel=0, abs=1e-5)


VALUES = (
    *("device=cpu", "precision.dtype=fp32", "resources.gpus_per_node=1", "resources.cpus_per_gpu=1"),
    *("parallel.dp_shard=2", "data.num_workers=1", "train.device_batch_size=8", "train.global_batch_size=16"),
    *("train.steps=40", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=10"),
    *("resources.time='10'", "requeue.grace_s=20", "logging.tensorboard=false"),
)


@pytest.mark.xdist_group("survive")
@pytest.mark.slow(seconds=25)
def test_a_task_in_a_folder_of_its_own_is_preempted(login, tmp_path_factory):
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
    lines = (config.parent / "curves.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 60
