"""The quickstart on four hosts: the losses of one machine, whatever starts the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_slurm.login import BACKENDS, Login, agents_of, settings
from tests.support.runs import losses
from tools.slurm_cluster.cluster import Cluster
from trainkit.rundir import RunDir

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
SHORT = settings(
    *("train.steps=3", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=null"),
    "logging.tensorboard=false",
)
TIMEOUT_S = 600.0


def quickstart(login: Login, *args: str) -> RunDir:
    """A run of the quickstart with eight ranks, when it has finished."""
    command = ["submit", str(QUICKSTART), "--set", "device=cpu", *SHORT, *args, "--follow"]
    done = login.trainkit(*command, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    run = RunDir(done.stdout.splitlines()[0])
    assert len(list(run.attempt(1).logs_dir.glob("rank-*.log"))) == 8
    return run


@pytest.fixture(scope="module")
def local_losses(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of eight processes on this machine."""
    login = Login(cluster, tmp_path_factory.mktemp("local"))
    return losses(quickstart(login, "--backend", "local", "--gpus-per-node", "8").path)


@pytest.mark.parametrize("per", ["gpu", "node"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_ranks_on_four_hosts(
    login: Login, local_losses: dict[int, float], backend: str, per: str
) -> None:
    run = quickstart(login, "--nodes", "4", "--gpus-per-node", "2", "--backend", backend, "--per", per)
    each = 2 if per == "gpu" else 1
    assert agents_of(run) == [pair for pair in enumerate(login.cluster.hosts) for _ in range(each)]
    assert len(local_losses) == 3
    assert losses(run.path) == pytest.approx(local_losses, rel=0, abs=1e-5)
