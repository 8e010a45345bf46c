"""Makes some broken runs again on the cluster, and checks the causes from `trainkit diagnose`."""

from __future__ import annotations

import random

import pytest

from tests.on_slurm.broken_runs import BROKEN, diagnosed, make

QUICK = (
    *("cancel-now", "scancel-by-hand", "rank-killed", "command-rank-killed", "exception-on-one-rank"),
    *("torchrun-import", "port-taken", "import-on-one-host", "data-on-one-host", "interface-missing"),
)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("name", random.Random(18).sample(QUICK, 4))
def test_the_cause_and_the_first_rank(cluster, tmp_path, name):
    login, run = make(name, cluster, tmp_path)
    found = diagnosed(login, run, 1)
    assert BROKEN[name].is_right(found, cluster.hosts), found
