"""Tests that hosts are separate: names, disks and processes. `on_slurm` tests the rest with jobs."""

import time
from pathlib import Path

from tools.slurm_cluster.network import MACHINE_INDEX


def test_local_disks_are_private_and_others_shared(cluster, tmp_path):
    show = f"hostname > /var/tmp/mine; hostname > /dev/shm/mine; hostname > {tmp_path}/$SLURM_NODEID"
    cluster.run(["srun", "-N4", "sh", "-c", show], check=True)
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(4)] == cluster.hosts
    for index, name in enumerate(cluster.hosts, start=1):
        assert (cluster.local_disk(index) / "mine").read_text() == f"{name}\n"
        shown = cluster.run(["cat", "/var/tmp/mine", "/dev/shm/mine"], host=index, check=True).stdout
        assert shown == f"{name}\n{name}\n"
    assert not Path("/var/tmp/mine").exists()


def test_processes_of_other_hosts_are_not_seen(cluster):
    cluster.run(
        ["sbatch", "--nodelist", cluster.hosts[1], "--output=/dev/null", "--wrap=sleep 987"], check=True
    )

    def is_seen(host: int) -> bool:
        return "sleep 987" in cluster.run(["ps", "-e", "-o", "args"], host=host, check=True).stdout

    deadline_s = time.monotonic() + 20
    while not is_seen(2):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert not is_seen(1)


def test_names_are_known_on_the_machine_and_on_the_hosts(cluster):
    names = [*cluster.hosts, cluster.state.machine]
    for host in (None, 1):
        found = cluster.run(["getent", "ahostsv4", names[3]], host=host, check=True).stdout.split()[0]
        assert found == cluster.address(4)
    took_s = []
    for _ in range(5):  # an unreachable name server takes a while in every round
        began = time.monotonic()
        shown = cluster.run(["getent", "hosts", names[-1]], host=1, check=True).stdout
        assert shown.split()[0] == cluster.address(MACHINE_INDEX)
        mapped = cluster.run(["getent", "hosts", f"::ffff:{cluster.address(2)}"], host=1, check=True).stdout
        assert mapped.split()[1] == f"{cluster.hosts[1]}.mapped"
        assert cluster.run(["getent", "hosts", "no-such-host"], host=1).returncode == 2
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 2
