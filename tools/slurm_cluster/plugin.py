"""Pytest plugin with the fixture `cluster`, and a prominent message if no cluster can run."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from tools.slurm_cluster import packages, releases
from tools.slurm_cluster.cluster import Cluster, running

PLACE_OF_SKIPS = (__file__, 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm",
        metavar="VERSION",
        choices=list(releases.RELEASES),
        help="the version of Slurm of the clusters; default: the installed one",
    )


@pytest.fixture(scope="session")
def slurm_version(pytestconfig: pytest.Config) -> str | None:
    """Return the version of Slurm that the clusters run; None means the installed version."""
    version: str | None = pytestconfig.getoption("--slurm")
    return version


@pytest.fixture(scope="session")
def clusters_possible(slurm_version: str | None) -> None:
    """Skip the test if no cluster can run on this machine, or fail the test if CI=true."""
    require_cluster(slurm_version)


def require_cluster(version: str | None) -> None:
    """Skip the current test if no cluster with this version can run, or fail the test if CI=true."""
    try:
        releases.require(version)
    except packages.NotPossible as error:
        if os.environ.get("CI") == "true":
            which = f"no cluster with Slurm {version}" if version else "no cluster"
            pytest.fail(f"CI=true requires the Slurm tests, but {which} can run: {error}", pytrace=False)
        pytest.skip(f"no Slurm {version + ' ' if version else ''}cluster: {error} ({error.hint})")


@pytest.fixture(scope="session")
def cluster(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    """Provide a Slurm cluster of four hosts.

    After each test, everything that was stopped or broken is restored and all jobs are cancelled.
    """
    with running(slurm_version) as made:
        yield made


@pytest.fixture(autouse=True)
def _cluster_is_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the cluster that a test has used."""
    cluster: Cluster | None = None
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
    yield
    if cluster is not None:
        cluster.restore()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses a cluster, before pytest applies `-m`."""
    for item in items:
        if _has_cluster(item):
            item.add_marker("cluster")
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give all skips caused by a missing cluster the same location, so that the summary merges them."""
    report = yield
    if report.skipped and _has_cluster(item) and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if "no Slurm cluster: " in reason:
            report.longrepr = (*PLACE_OF_SKIPS, reason)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a prominent line if the tests that need Slurm were skipped."""
    for report in terminalreporter.stats.get("skipped", []):
        if tuple(report.longrepr[:2]) == PLACE_OF_SKIPS:
            reason = report.longrepr[2].partition("no Slurm cluster: ")[2]
            terminalreporter.write_line(f"NOTHING WAS TESTED ON SLURM: {reason}", red=True, bold=True)
            return


def _has_cluster(item: pytest.Item) -> bool:
    return "clusters_possible" in getattr(item, "fixturenames", ())
