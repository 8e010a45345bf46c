"""Tests two clusters with one slurmdbd: a job runs on the first free one, and commands find it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.login import HOLD, Login
from tests.on_slurm.test_groups import submit, wait_for_states
from tests.on_slurm.test_interactive import terminal
from tests.support.tmux import needs_tmux
from tools.slurm_cluster.cluster import Cluster, running
from trainkit.run.group import RunGroup
from trainkit.run.record import read_job

pytestmark = pytest.mark.slow(seconds=25)
SHAPE = ("--nodes", "2", "--gpus-per-node", "1")


@pytest.fixture(scope="module")
def cluster(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    """Return the cluster of the login node."""
    with running(slurm_version, num_hosts=2) as made:
        yield made


@pytest.fixture(scope="module")
def second(cluster: Cluster, slurm_version: str | None) -> Iterator[Cluster]:
    with running(slurm_version, num_hosts=2, accounting_of=cluster) as made:
        yield made


@pytest.fixture
def other(second: Cluster, tmp_path: Path) -> Iterator[Login]:
    """Return the second cluster, as its users see it."""
    folder = tmp_path / "other"
    folder.mkdir()
    yield Login(second, folder)
    second.cancel_all()


def named(login: Login, other: Login) -> tuple[str, str]:
    return "--clusters", f"{login.cluster.name},{other.cluster.name}"


@needs_tmux
def test_a_run_is_where_there_is_room(login, other):
    with login.other_job("--nodes=2"):
        run = login.submit(*SHAPE, *named(login, other), "--", "python", "listens.py")
        (job_id,) = other.jobs()
        assert [(entry.job_id, entry.cluster) for entry in read_job(run).attempts] == [
            (job_id, other.cluster.name)
        ]
        login.wait_for_log(run, "attempt 1 rank 1", rank=1)
        seen = login.status(run)
        assert (seen["state"], seen["job_id"], seen["cluster"]) == ("running", job_id, other.cluster.name)
        assert "cluster" not in other.status(run)
        assert f" as {job_id} on {other.cluster.name}," in login.trainkit("status", str(run.path)).stdout

        assert login.trainkit("requeue", str(run.path)).returncode == 0
        login.wait_for_log(run, "attempt 2 rank 0", attempt=2)
        assert login.wait_for_end(run)["cause"] == "asked"
        assert other.jobs() == [job_id], "it has requeued itself, where it is"
        assert login.status(run)["state"] == "running"

        with terminal(login, "attach", str(run.path), "--node", "1") as shell:
            assert shell.ask("hostname") == other.cluster.hosts[1]
        done = login.trainkit("cancel", str(run.path), "--wait")
        assert (done.stdout + done.stderr).endswith(f"{run.name}: {job_id} has ended\n")
        other.wait_until_idle()
        assert len(login.jobs()) == 1, "that of somebody else, here"

    with other.other_job("--nodes=2"):
        done = login.trainkit("resume", str(run.path))
        assert f" cluster {login.cluster.name}\n" in done.stderr
        login.wait_for_log(run, "attempt 3 rank 0", attempt=3)
        assert "cluster" not in login.status(run)
        assert other.status(run)["cluster"] == login.cluster.name
        assert other.trainkit("cancel", str(run.path), "--now").returncode == 0
        login.wait_until_idle()


def test_a_group(login, other):
    one = ("--nodes", "1", "--gpus-per-node", "1", *named(login, other))
    with login.other_job("--nodes=2"):
        sweep = ("--sweep", "seed=1,2,3", "--array", "%2", "--", "python", "listens.py")
        group = submit(login, *one, *sweep)
        wait_for_states(login, group, running=2, pending=1)
        assert RunGroup(group.path).record.cluster == other.cluster.name
        first = group.run(0)
        assert login.trainkit("cancel", str(first.path), "--wait").returncode == 0
        assert login.trainkit("resume", str(first.path)).returncode == 0
        done = login.trainkit("cancel", str(group.path), "--wait")
        assert done.returncode == 0, done.stderr
        wait_for_states(login, group, cancelled=3)
        other.wait_until_idle()


@needs_tmux
def test_a_shell_there(login, other):
    shape = ("--nodes", "1", "--gpus-per-node", "1", "--time", "5", "--clusters", other.cluster.name)
    with terminal(login, "shell", str(login.config), *shape) as shell:
        shell.wait_for("Granted job allocation")
        assert shell.ask("hostname") == other.cluster.hosts[0]
        assert login.jobs() == []


def test_a_cluster_that_is_away(login, other):
    alone = ("--clusters", other.cluster.name)
    here, there = login.submit(*HOLD, "--", "true"), login.submit(*alone, *HOLD, "--", "true")
    other.cluster.stop_slurmctld()
    try:
        assert (login.status(here)["state"], login.status(there)["state"]) == ("pending", "unknown")
        again = ("submit", str(login.config), *alone, "--", "true")
        for words in (("cancel", str(there.path)), again):
            done = login.trainkit(*words)
            assert done.returncode == 3, done.stderr
            assert "sacctmgr show clusters" in done.stderr
        run = login.submit(*named(login, other), "--", "true")
        assert read_job(run).attempts[0].cluster == login.cluster.name
    finally:
        other.cluster.start_slurmctld()
    for found in (there, here):
        assert login.trainkit("cancel", str(found.path)).returncode == 0
    other.wait_until_idle()
