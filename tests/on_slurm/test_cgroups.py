"""Tests jobs that Slurm confines to their CPUs and memory, and whose processes it finds by cgroup."""

import os
import re
from collections.abc import Iterator

import pytest

from tests.on_slurm.login import agents_of, log_of, settings
from tools.slurm_cluster import cgroups
from tools.slurm_cluster.cluster import Cluster, running
from tools.slurm_cluster.packages import NotPossible

SHOWS_CPUS = """
import os
print("cpus", *sorted(os.sched_getaffinity(0)))
"""
FILLS = """
import os, time
if os.environ["RANK"] == "1":
    kept = bytearray(2 << 30)
time.sleep(600)
"""
LEAVES_A_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "1234"])
    os._exit(0)
os.wait()
print("daemon started", flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.xdist_group("cgroups")


@pytest.fixture(scope="module")
def cluster(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    """Start a cluster whose jobs are confined, in place of the usual one."""
    try:
        cgroups.require()
    except NotPossible as error:
        pytest.skip(f"{error}")
    with running(slurm_version, num_hosts=2, with_cgroups=True) as made:
        yield made


def processes_of_jobs(cluster: Cluster) -> str:
    """Return the processes on all hosts, except Slurm's and this query's."""
    listed = [cluster.run(["ps", "-e", "-o", "args="], host=host, check=True).stdout for host in (1, 2)]
    own = re.compile(r"slurm|host_init|^ps |^sh -c cd|^unshare")
    return "\n".join(line for text in listed for line in text.splitlines() if not own.search(line))


@pytest.mark.skipif(os.cpu_count() == 1, reason="a host needs two CPUs for two ranks that share none")
def test_each_rank_has_its_own_cpu(login):
    script = login.script(SHOWS_CPUS)
    run = login.finish(login.submit("--nodes", "2", "--gpus-per-node", "2", "--", "python", script))
    shown = [log_of(run, rank) for rank in range(4)]
    assert all(re.fullmatch(r"cpus \d+\n", text) for text in shown), shown
    assert shown[0] != shown[1]
    assert shown[2] != shown[3]


def test_a_run_is_requeued_cancelled_and_resumed(login):
    run = login.submit_listeners("--nodes", "2", "--gpus-per-node", "1")
    for command, attempt in ((["requeue"], 2), (["cancel", "--wait"], 2), (["resume"], 3)):
        done = login.trainkit(*command, str(run.path))
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            login.wait_for_log(run, f"attempt {attempt} rank {rank}", rank, attempt)
    assert login.wait_for_end(run, 1)["reason"].startswith("saved after SIGUSR2")
    assert login.wait_for_end(run, 2)["state"] == "cancelled"
    assert login.wait_for_end(run, 2)["reason"] == "saved after SIGTERM"


def test_a_kill_for_memory_is_named(login):
    limits = settings("resources.mem=300M", "requeue.max_crashes=0")
    command = ("--", "python", login.script(FILLS))
    shape = ("--nodes", "1", "--gpus-per-node", "2", "--per")
    for run in [login.submit(*shape, per, *limits, *command) for per in ("gpu", "node")]:
        end = login.wait_for_end(run)
        assert (end["state"], end["exit_code"]) == ("failed", 137), login.logs_and_attempts(run)
        assert end["verdict"]["type"] == "OutOfMemory", login.logs_and_attempts(run)
        assert end["verdict"]["host"] == agents_of(run)[0][1]
        shown = login.trainkit("status", str(run.path)).stdout
        assert "\nhint: raise resources.mem" in shown.partition("OutOfMemory: ")[2]


def test_no_process_is_left(login):
    script = login.script(LEAVES_A_DAEMON)
    run = login.submit("--nodes", "2", "--gpus-per-node", "1", "--", "python", script)
    for rank in range(2):
        login.wait_for_log(run, "daemon started", rank)
    assert processes_of_jobs(login.cluster).count("sleep 1234") == 2
    assert login.trainkit("cancel", str(run.path), "--now").returncode == 0
    login.wait_until_idle()
    assert processes_of_jobs(login.cluster) == ""
