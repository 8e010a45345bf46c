"""Tests that a slowed-down host is named, with one run of the campaign `benchmarks/slow_host.py`."""

from __future__ import annotations

import pytest

from benchmarks.slow_host import MAX_STEPS_LATER, slow_one
from tools.slurm_cluster import cgroups


@pytest.mark.slow(seconds=30)
@pytest.mark.skipif(not (cgroups.ROOT / "cpu/cpu.cfs_quota_us").exists(), reason="needs cgroup v1")
def test_a_slow_host_is_named_within_30_steps(login):
    # This share is less than a rank gets on a busy machine.
    seen = slow_one(login, 3, cpus=0.04, before=30, num_layers=2)
    # Other work on the machine may have slowed down other ranks too.
    assert seen.steps_later is not None, seen.line
    assert 0 < seen.steps_later <= MAX_STEPS_LATER, seen.line
    [first, *_] = [event for event in seen.events if event["host"] == seen.slowed_host]
    assert (first["event"], first["rank"], first["phase"]) == ("slow_rank", 2, "compute")
