"""Tests that hosts are separate, and lose their power and network. `on_slurm` tests the rest with jobs."""

import time
from pathlib import Path

from tests.support.programs import wait_for
from tools.slurm_cluster.network import MACHINE_INDEX

STEP = """\
#!/bin/sh
#SBATCH --open-mode=append
srun sh -c 'trap "echo term; exit 3" TERM; echo start $SLURM_RESTART_COUNT; while :; do sleep 0.1; done'
sleep 1000
"""


def test_local_disks_are_private_and_others_shared(cluster, tmp_path):
    show = f"hostname > /var/tmp/mine; hostname > /dev/shm/mine; hostname > {tmp_path}/$SLURM_NODEID"
    cluster.run(["srun", "-N4", "sh", "-c", show], check=True)
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(4)] == cluster.hosts
    for index, name in enumerate(cluster.hosts, start=1):
        assert (cluster.local_disk(index) / "mine").read_text() == f"{name}\n"
        shown = cluster.run(["cat", "/var/tmp/mine", "/dev/shm/mine"], host=index, check=True).stdout
        assert shown == f"{name}\n{name}\n"
    assert not Path("/var/tmp/mine").exists()


def test_names_are_known_on_the_machine_and_on_the_hosts(cluster):
    for host in (None, 1):
        found = cluster.run(["getent", "ahostsv4", cluster.hosts[3]], host=host, check=True).stdout.split()[0]
        assert found == cluster.address(4)
    took_s = []
    for _ in range(5):  # an unreachable name server takes a while in every round
        began = time.monotonic()
        shown = cluster.run(["getent", "hosts", cluster.state.machine], host=1, check=True).stdout
        assert shown.split()[0] == cluster.address(MACHINE_INDEX)
        mapped = cluster.run(["getent", "hosts", f"::ffff:{cluster.address(2)}"], host=1, check=True).stdout
        assert mapped.split()[1] == f"{cluster.hosts[1]}.mapped"
        assert cluster.run(["getent", "hosts", "no-such-host"], host=1).returncode == 2
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 2


def test_hosts_without_power_and_without_network(cluster, tmp_path):
    script, log = tmp_path / "job.sh", tmp_path / "log"
    script.write_text(STEP)
    argv = ["sbatch", "--parsable", f"--output={log}", "-N4", str(script)]
    job_id = cluster.run(argv, timeout_s=150, check=True).stdout.strip()
    wait_for(lambda: log.exists() and "start" in log.read_text(), 20)
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
    wait_for(lambda: "start 1" in log.read_text(), 20)
