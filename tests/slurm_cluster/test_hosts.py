"""Hosts are hosts: names, addresses, disks, processes and GPUs of their own, and a shared disk."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tools.slurm_cluster.cluster import Cluster

LISTEN = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
server.settimeout(20)
client, address = server.accept()
print(client.recv(100).decode(), "from", address[0])
"""
SEND = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).sendall(socket.gethostname().encode())
"""


def test_two_tasks_on_each_of_four_hosts(cluster: Cluster) -> None:
    show = (
        "echo $SLURM_PROCID $(hostname) $(cat /proc/sys/kernel/random/boot_id) $(ls /sys/class/net | xargs)"
    )
    lines = cluster.run(
        ["srun", "-N4", "--ntasks-per-node=2", "sh", "-c", show], check=True
    ).stdout.splitlines()
    tasks = sorted((line.split() for line in lines), key=lambda task: int(task[0]))
    assert [task[1] for task in tasks] == [name for name in cluster.hosts for _ in range(2)]
    assert len({task[2] for task in tasks}) == 4
    assert {tuple(task[3:]) for task in tasks} == {("eth0", "lo")}


def test_local_disks_are_private_and_others_shared(cluster: Cluster, tmp_path: Path) -> None:
    show = f"hostname > /var/tmp/mine; hostname > /dev/shm/mine; hostname > {tmp_path}/$SLURM_NODEID"
    cluster.run(["srun", "-N4", "sh", "-c", show], check=True)
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(4)] == cluster.hosts
    for index, name in enumerate(cluster.hosts, start=1):
        assert (cluster.local_disk(index) / "mine").read_text() == f"{name}\n"
        shown = cluster.run(["cat", "/var/tmp/mine", "/dev/shm/mine"], host=index, check=True).stdout
        assert shown == f"{name}\n{name}\n"
    assert not Path("/var/tmp/mine").exists()


def test_processes_of_other_hosts_are_not_seen(cluster: Cluster) -> None:
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


@pytest.mark.parametrize("to", ["10.213", "name"])
def test_tcp_between_hosts(cluster: Cluster, to: str) -> None:
    target = cluster.hosts[2] if to == "name" else cluster.address(3)
    listen = cluster.command_line(["python3", "-c", LISTEN, "29500"], 3, "/")
    server = subprocess.Popen(listen, env=cluster.environ, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while cluster.run(["python3", "-c", SEND, target, "29500"], host=1).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.communicate(timeout=20)[0] == f"{cluster.hosts[0]} from {cluster.address(1)}\n"
    finally:
        server.kill()
        server.wait()


def test_names_are_known_on_the_machine_and_on_the_hosts(cluster: Cluster) -> None:
    names = [*cluster.hosts, cluster.state.machine]
    for host in (None, 1):
        found = cluster.run(["getent", "ahostsv4", names[3]], host=host, check=True).stdout.split()[0]
        assert found == cluster.address(4)
    took_s = []
    for _ in range(5):  # a name server that is asked and does not answer takes its time in every round
        began = time.monotonic()
        shown = cluster.run(["getent", "hosts", names[-1]], host=1, check=True).stdout
        assert shown.split()[0] == cluster.address(254)
        mapped = cluster.run(["getent", "hosts", f"::ffff:{cluster.address(2)}"], host=1, check=True).stdout
        assert mapped.split()[1] == f"{cluster.hosts[1]}.mapped"
        assert cluster.run(["getent", "hosts", "no-such-host"], host=1).returncode == 2
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 2


def test_gpus_are_given_to_jobs(cluster: Cluster) -> None:
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE"]
    lines = cluster.run(["srun", "-N4", "--gpus-per-node=2", *show], check=True).stdout.splitlines()
    assert lines == ["0,1 2"] * 4
    refused = cluster.run(["srun", "--gpus-per-node=5", *show])
    assert refused.returncode == 1
    assert "Requested node configuration is not available" in refused.stderr


def test_srun_from_a_host_and_salloc_from_the_machine(cluster: Cluster) -> None:
    """Both need a way back to where they were started."""
    assert cluster.run(["srun", "-N4", "true"], host=2, timeout_s=20).returncode == 0
    done = cluster.run(["salloc", "-N2", "srun", "hostname"], timeout_s=20, check=True)
    # Which two is Slurm's own choice: those of the step before may still be completing.
    ran_on = done.stdout.split()
    assert len(set(ran_on)) == len(ran_on) == 2
    assert set(ran_on) <= set(cluster.hosts)
