"""Provides the fixtures of tests that type `trainkit` on a real cluster."""

from pathlib import Path

import pytest

from tests.on_slurm.login import Login
from tools.slurm_cluster.cluster import Cluster


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Login:
    """Return a folder on the login node with a small config. Its jobs are cancelled after the test."""
    return Login(cluster, tmp_path)
