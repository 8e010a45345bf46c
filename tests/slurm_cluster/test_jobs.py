"""What clusters do to jobs: accounting, and hosts and daemons that fail; `tests.slurm` preempts jobs."""

from __future__ import annotations

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
    """The id of a batch job that writes to `folder`/log."""
    (folder / "job.sh").write_text(script)
    argv = ["sbatch", "--parsable", f"--output={folder}/log", *options, f"{folder}/job.sh"]
    return cluster.run(argv, timeout_s=150, check=True).stdout.strip()


def wait_for_log(folder: Path, text: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not (folder / "log").exists() or text not in (folder / "log").read_text():
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def accounted(cluster: Cluster, job_id: str, timeout_s: float = 20) -> str:
    """The state of a job in sacct, which lags."""
    deadline = time.monotonic() + timeout_s
    argv = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={job_id}",
        "--format=Account,State",
    ]
    while "COMPLETED" not in (shown := cluster.run(argv, timeout_s=150, check=True).stdout):
        assert time.monotonic() < deadline, shown
        time.sleep(0.2)
    return shown.strip()


def test_arrays_accounts_and_limits(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, "#!/bin/sh\ntrue\n", "--array=0-3", "--account=teaching")
    for task in range(4):
        cluster.wait_for_job(f"{job_id}_{task}", "COMPLETED", timeout_s=150)
    assert accounted(cluster, f"{job_id}_3") == "teaching|COMPLETED"
    for wrong in ("--account=none", "--qos=none", "--partition=none"):
        assert cluster.run(["sbatch", wrong, f"{tmp_path}/job.sh"], timeout_s=150).returncode == 1
    assert cluster.run(["sbatch", "--qos=short", f"{tmp_path}/job.sh"], timeout_s=150).returncode == 0


def test_hosts_without_power_and_without_network(cluster: Cluster, tmp_path: Path) -> None:
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


def test_the_daemon_of_a_host_dies_and_its_job_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    script = f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo done\n"
    job_id = submit(cluster, tmp_path, script, "--nodelist", cluster.hosts[1])
    cluster.wait_for_job(job_id, "RUNNING", timeout_s=150)
    cluster.kill_slurmd(2)
    (tmp_path / "go").touch()
    wait_for_log(tmp_path, "done")
    cluster.start_slurmd(2)
    cluster.wait_for_job(job_id, "COMPLETED", timeout_s=150)


def test_scheduler_and_accounting_stop_and_come_back(cluster: Cluster, tmp_path: Path) -> None:
    begins = f"touch {tmp_path}/begun-$SLURM_PROCID"
    step = f"srun sh -c '{begins}; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done'"
    job_id = submit(cluster, tmp_path, f"#!/bin/sh\n{step}; echo done\n", "-N2")
    cluster.wait_for_job(job_id, "RUNNING", timeout_s=150)
    deadline_s = time.monotonic() + 150
    while len(list(tmp_path.glob("begun-*"))) < 2:  # a step that is not there yet would wait, and say so
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    cluster.stop_accounting()
    cluster.stop_slurmctld()
    (tmp_path / "go").touch()
    assert cluster.run(["scontrol", "ping"], timeout_s=150).returncode == 1
    cluster.start_slurmctld()
    # What the controller did not hear while it was away, slurmstepd repeats after a minute.
    cluster.wait_for_job(job_id, "COMPLETED", timeout_s=150)
    assert (tmp_path / "log").read_text() == "done\n"
    refused = cluster.run(["sacct"], timeout_s=150)
    assert refused.returncode == 1
    assert "Connection refused" in refused.stderr
    cluster.start_accounting()
    assert accounted(cluster, job_id) == "research|COMPLETED"
