"""Tests runs in a folder that each host sees as an NFS client: no start waits for a cache to expire."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.on_slurm.login import Login, log_of
from tests.on_slurm.survival import events_of, time_of
from tests.support.nfs import FAST_S, mounted_by, nfs_clients
from tools.slurm_cluster.cluster import Cluster
from trainkit.run.rundir import RunDir

MOUNT = """
import sys
from pathlib import Path
from tests.support.nfs import mount
mount(int(sys.argv[1]), Path(sys.argv[2]))
"""
FAILS_ONCE = """
import os, sys, time
print("started at", time.time(), flush=True)
time.sleep(5)  # long enough for the agents to look at the run folder
sys.exit(int(os.environ["TRAINKIT_JOB_ATTEMPT"] == "1"))
"""


@pytest.fixture
def nfs(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Return a folder that the login node and all hosts mount at the same path, each as a separate client."""
    server, shared = tmp_path / "server", tmp_path / "home"
    server.mkdir()
    with ExitStack() as stack:
        stack.enter_context(nfs_clients(server, shared))
        for index in range(1, len(cluster.hosts) + 1):
            stack.enter_context(mounted_by(server, lambda fd, host=index: _mount(cluster, host, fd, shared)))
            stack.callback(cluster.run, ["umount", "--lazy", str(shared)], host=index)
        yield shared


def _mount(cluster: Cluster, host: int, descriptor: int, folder: Path) -> None:
    root = str(Path(__file__).parents[2])
    argv = cluster.command_line([sys.executable, "-c", MOUNT, str(descriptor), str(folder)], host, root)
    subprocess.run(argv, env=cluster.environ, pass_fds=[descriptor], check=True, timeout=30, cwd=root)


def test_a_run_starts_and_restarts_at_once(cluster, nfs):
    login = Login(cluster, nfs)
    login.script(FAILS_ONCE)
    run = login.submit("--nodes", "2", "--gpus-per-node", "1", "--", "python", "script.py")
    run = RunDir(nfs.with_name("server") / run.path.relative_to(nfs))  # the server has no cache
    login.wait_for_end(run, attempt=2)
    for attempt, started in enumerate(events_of(run, "started"), 1):
        for rank in range(2):
            began_s = float(log_of(run, rank, attempt).split("started at ")[1].split()[0])
            assert began_s - time_of(started) < FAST_S, login.logs_and_attempts(run)
