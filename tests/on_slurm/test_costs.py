"""Tests how often a running job uses the controller and the file system, as in `benchmarks.cluster_256`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.cluster_256 import Opens, Table, idle, lose_host, new_login, start
from tools.slurm_cluster.cluster import Cluster, running

NUM_HOSTS = 8
"""Large enough that a Slurm step is a tree, where a host waits a minute for a lost one."""


@pytest.fixture
def eight_hosts(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    with running(slurm_version, num_hosts=NUM_HOSTS) as made:
        yield made


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("seed", [2])
def test_a_run_costs_little_and_goes_on_without_a_lost_host(eight_hosts, seed):
    with Opens(eight_hosts.folder / "home") as opens:
        table, login = Table(NUM_HOSTS), new_login(eight_hosts, opens.folder)
        job = start(login, table, opens, "shrink", f"2-{NUM_HOSTS}")
        idle(job, table, opens, seconds=3)
        lose_host(job, table, "shrink", random.Random(seed).randint(2, NUM_HOSTS))
    assert table.missed == []
