"""The quickstart on several hosts: the losses of one machine, whatever starts the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_slurm.login import Login, agents_of, settings
from tests.support.runs import losses
from tools.slurm_cluster.cluster import Cluster
from trainkit.rundir import RunDir

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
SHORT = settings(
    *("train.steps=3", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=null"),
    "logging.tensorboard=false",
)
TIMEOUT_S = 600.0

pytestmark = pytest.mark.xdist_group("quickstart on Slurm")


def quickstart(login: Login, *args: str) -> RunDir:
    """A run of the quickstart with four ranks, when it has finished."""
    command = ["submit", str(QUICKSTART), "--set", "device=cpu", *SHORT, *args, "--follow"]
    done = login.trainkit(*command, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    run = RunDir(done.stdout.splitlines()[0])
    assert len(list(run.attempt(1).logs_dir.glob("rank-*.log"))) == 4
    return run


@pytest.fixture(scope="module")
def local_losses(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of four processes on this machine."""
    login = Login(cluster, tmp_path_factory.mktemp("local"))
    return losses(quickstart(login, "--backend", "local", "--gpus-per-node", "4").path)


def test_four_ranks_on_two_hosts(login: Login, local_losses: dict[int, float]) -> None:
    """With submitit and two ranks a node; README's block trains with sbatch and one task a rank."""
    shape = ("--nodes", "2", "--gpus-per-node", "2")
    run = quickstart(login, *shape, "--backend", "submitit", "--per", "node")
    assert agents_of(run) == list(enumerate(login.cluster.hosts[:2]))
    assert len(local_losses) == 3
    assert losses(run.path) == pytest.approx(local_losses, rel=0, abs=1e-5)
