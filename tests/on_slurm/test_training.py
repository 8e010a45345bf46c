"""Tests the quickstart on several hosts: it has the losses of one process, whatever starts the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_slurm.login import Login, agents_of, settings
from tests.support.runs import losses
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
    """The run uses submitit with two ranks per node.

    The README trains with sbatch and one task per rank.
    """
    alone = quickstart(login, 1, "--backend", "local", "--gpus-per-node", "1", "--name", "alone")
    shape = ("--nodes", "2", "--gpus-per-node", "2")
    run = quickstart(login, 4, *shape, "--backend", "submitit", "--per", "node")
    assert agents_of(run) == list(enumerate(login.cluster.hosts[:2]))
    expected = losses(alone.path)
    assert len(expected) == 3
    assert losses(run.path) == pytest.approx(expected, rel=0, abs=1e-5)
