"""The fixture `cluster`, and saying loudly when there cannot be one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import packages
from tests.cluster.cluster import Cluster, up
from tests.cluster.processes import Pid

NOT_POSSIBLE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A Slurm cluster of four hosts.

    After each test, what was stopped or broken is brought back and all jobs are cancelled.
    """
    require_cluster(request.config)
    made = up(owner=Pid.of(os.getpid()))
    yield made
    made.down()


@pytest.fixture(autouse=True)
def _cluster_is_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around each test that has the cluster."""
    cluster = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if cluster is not None:
        cluster.restore()


def require_cluster(config: pytest.Config) -> None:
    """Skip the test where no cluster can run; fail it instead where CI is true."""
    try:
        packages.require()
    except packages.NotPossible as error:
        config.stash[NOT_POSSIBLE] = f"{error} ({error.hint})"
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true wants every test to run, and no Slurm cluster can: {error}", pytrace=False)
        pytest.skip(f"no Slurm cluster: {error}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that has the cluster, before `-m` chooses."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The loud line."""
    if reason := config.stash.get(NOT_POSSIBLE, ""):
        terminalreporter.write_line(f"NOTHING WAS TESTED ON SLURM: {reason}", red=True, bold=True)
