"""Tests failing hosts and daemons of a cluster. `on_slurm` tests the effect on jobs."""

import time
from pathlib import Path

from tools.slurm_cluster.cluster import Cluster

STEP = """\
#!/bin/sh
#SBATCH --open-mode=append
srun sh -c 'trap "echo term; exit 3" TERM; echo start $SLURM_RESTART_COUNT; while :; do sleep 0.1; done'
sleep 1000
"""


def submit(cluster: Cluster, folder: Path, script: str, *options: str) -> str:
    """Submit a batch job that writes to `folder`/log, and return its id."""
    (folder / "job.sh").write_text(script)
    argv = ["sbatch", "--parsable", f"--output={folder}/log", *options, f"{folder}/job.sh"]
    return cluster.run(argv, timeout_s=150, check=True).stdout.strip()


def wait_for_log(folder: Path, text: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not (folder / "log").exists() or text not in (folder / "log").read_text():
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_hosts_without_power_and_without_network(cluster, tmp_path):
    job_id = submit(cluster, tmp_path, STEP, "-N4")
    wait_for_log(tmp_path, "start")
    began = time.monotonic()
    cluster.kill_host(3)
    cluster.cut_off(4)
    cluster.wait_for_nodes([3, 4], r"down\*", timeout_s=150)
    assert time.monotonic() - began < 30
    assert set(cluster.node_states()) == set(cluster.hosts)
    cluster.wait_for_job(job_id, "PENDING", timeout_s=150)
    cluster.revive_host(3)
    cluster.reconnect(4)
    cluster.wait_for_job(job_id, "RUNNING", timeout_s=150)
    wait_for_log(tmp_path, "start 1")


def test_the_daemon_of_a_host_dies_and_its_job_goes_on(cluster, tmp_path):
    script = f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo done\n"
    job_id = submit(cluster, tmp_path, script, "--nodelist", cluster.hosts[1])
    cluster.wait_for_job(job_id, "RUNNING", timeout_s=150)
    cluster.kill_slurmd(2)
    (tmp_path / "go").touch()
    wait_for_log(tmp_path, "done")
    cluster.start_slurmd(2)
    cluster.wait_for_job(job_id, "COMPLETED", timeout_s=150)
