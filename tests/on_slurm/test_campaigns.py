"""Tests one short round of each campaign in `benchmarks` that needs a cluster."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster_256 import Opens, Table, idle, lose_host, new_login, start
from tests.on_slurm.broken_runs import BROKEN, diagnosed, make
from tools.slurm_cluster.cluster import Cluster, running

CAMPAIGN = Path(__file__).resolve().parents[2] / "benchmarks/port_clashes.py"


def test_two_jobs_and_two_steps_of_one_job_at_once(login):
    """Half of the ports are taken, as in the longer campaign in benchmarks/."""
    argv = [sys.executable, str(CAMPAIGN), "--starts", "1", "--seed", "7", "--folder", str(login.folder)]
    done = login.run(argv, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["sets_of_ranks"], figures["clashes"]) == (4, 0)
    assert done.stdout.count("13384 of 26768 ports are taken") == 2


NUM_HOSTS = 8
"""Large enough that a Slurm step is a tree, where a host waits a minute for a lost one."""


@pytest.fixture
def eight_hosts(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    with running(slurm_version, num_hosts=NUM_HOSTS) as made:
        yield made


@pytest.mark.slow(seconds=30)
def test_a_run_costs_little_and_goes_on_without_a_lost_host(eight_hosts):
    with Opens(eight_hosts.folder / "home") as opens:
        table, login = Table(NUM_HOSTS), new_login(eight_hosts, opens.folder)
        job = start(login, table, opens, "shrink", f"2-{NUM_HOSTS}")
        idle(job, table, opens, seconds=3)
        lose_host(job, table, "shrink", 2)
    assert table.missed == []


@pytest.mark.slow(seconds=10)
def test_the_cause_and_the_first_rank(cluster, tmp_path):
    """`python -m tests.on_slurm.broken_runs` makes the others."""
    login, run = make("data-on-one-host", cluster, tmp_path)
    found = diagnosed(login, run, 1)
    assert BROKEN["data-on-one-host"].is_right(found, cluster.hosts), found
