"""The fixture `cluster`, and saying loudly when there cannot be one."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from tools.slurm_cluster import packages
from tools.slurm_cluster.cluster import Cluster, up
from tools.slurm_cluster.processes import Pid

PLACE_OF_SKIPS = (__file__, 1)


@pytest.fixture(scope="session")
def clusters_possible() -> None:
    """Skips the test where no cluster can run; fails it instead where CI is true."""
    try:
        packages.require()
    except packages.NotPossible as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true wants every test to run, and no Slurm cluster can: {error}", pytrace=False)
        pytest.skip(f"no Slurm cluster: {error} ({error.hint})")


@pytest.fixture(scope="session")
def cluster(clusters_possible: None) -> Iterator[Cluster]:
    """A Slurm cluster of four hosts.

    After each test, what was stopped or broken is brought back and all jobs are cancelled.
    """
    made = up(owner=Pid.of(os.getpid()))
    yield made
    made.down()


@pytest.fixture(scope="session")
def cluster_without_accounting(clusters_possible: None) -> Iterator[Cluster]:
    """Another one that was configured without slurmdbd; left as found after each test too."""
    made = up(accounting=False, owner=Pid.of(os.getpid()))
    yield made
    made.down()


@pytest.fixture(autouse=True)
def _clusters_are_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around each test that has a cluster."""
    names = {"cluster", "cluster_without_accounting"} & set(request.fixturenames)
    clusters: list[Cluster] = [request.getfixturevalue(name) for name in sorted(names)]
    yield
    for cluster in clusters:
        cluster.restore()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that has a cluster, before `-m` chooses."""
    for item in items:
        if _has_cluster(item):
            item.add_marker("cluster")
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests skipped for want of a cluster have one place, so that they are one line at the end."""
    report = yield
    if report.skipped and _has_cluster(item) and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if "no Slurm cluster: " in reason:
            report.longrepr = (*PLACE_OF_SKIPS, reason)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The loud line."""
    for report in terminalreporter.stats.get("skipped", []):
        if tuple(report.longrepr[:2]) == PLACE_OF_SKIPS:
            reason = report.longrepr[2].partition("no Slurm cluster: ")[2]
            terminalreporter.write_line(f"NOTHING WAS TESTED ON SLURM: {reason}", red=True, bold=True)
            return


def _has_cluster(item: pytest.Item) -> bool:
    return "clusters_possible" in getattr(item, "fixturenames", ())
