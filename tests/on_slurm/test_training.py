"""Tests the quickstart on several hosts: it has the losses of one process, whatever starts the ranks."""

import shutil
from pathlib import Path

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import HOLD, Login, agents_of, settings
from tests.support.runs import losses
from tests.support.tasks import write_tutorial

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
SHORT = settings(
    *("train.steps=3", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=null"),
    *("data.seq_len=64", "resources.cpus_per_gpu=1", "logging.tensorboard=false"),
)


def test_four_ranks_on_two_hosts_without_the_folder_of_submission(login, tmp_path):
    """The run uses submitit with two ranks per node. The README trains with sbatch and one task per rank."""
    there = login.folder / "there"
    there.mkdir()
    elsewhere = Login(login.cluster, there)
    elsewhere.env = login.env
    shape = ("--nodes", "2", "--gpus-per-node", "2", "--backend", "submitit", "--per", "node")
    place = ("--run-dir", str(login.folder / "run"), *HOLD)
    run = elsewhere.submit(*place, *shape, *settings("device=cpu"), *SHORT, config=QUICKSTART)
    shutil.rmtree(there)
    login.run(["scontrol", "release", login.job_id(run)], check=True)
    login.finish(run)
    assert agents_of(run) == list(enumerate(login.cluster.hosts[:2]))
    assert len(list(run.attempt(1).logs_dir.glob("rank-*.log"))) == 4
    expected = losses(survival.undisturbed(tmp_path, run.config_file).path)
    assert len(expected) == 3
    assert losses(run.path) == pytest.approx(expected, rel=0, abs=1e-5)


def test_the_tutorial_is_short(tmp_path):
    config = write_tutorial(tmp_path)
    lines = (config.parent / "curves.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 60
