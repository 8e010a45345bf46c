"""The cluster is one: hosts, jobs, GPUs, preemption, accounting."""

from __future__ import annotations

from tests.cluster.cluster import Cluster


def test_four_hosts_of_two_tasks(cluster: Cluster) -> None:
    shown = cluster.run(["srun", "-N4", "--ntasks-per-node=2", "hostname"], check=True).stdout
    assert sorted(shown.split()) == sorted(cluster.hosts * 2)
