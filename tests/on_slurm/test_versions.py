"""Tests what differs on newer versions of Slurm: signals, variables of shells and steps, states and logs."""

from collections.abc import Iterator

import pytest

from tests.on_slurm import (
    test_cgroups,
    test_interactive,
    test_signals,
    test_steps,
    test_trouble,
)
from tests.slurm import test_on_cluster
from tests.support.tmux import needs_tmux
from tools.slurm_cluster.cluster import Cluster, running
from tools.slurm_cluster.plugin import require_cluster
from trainkit.scheduler import JobState

# The tests of a version stay together, so that one process starts its cluster.
pytestmark = pytest.mark.slow(seconds=10)
VERSIONS = [
    pytest.param(version, marks=pytest.mark.xdist_group(f"Slurm {version}")) for version in ("24.11", "26.05")
]


@pytest.fixture(scope="module", params=VERSIONS)
def slurm_version(request: pytest.FixtureRequest) -> str:
    """Return a version of Slurm, in place of the installed one."""
    version: str = request.param
    return version


@pytest.fixture(scope="module")
def clusters_possible(slurm_version: str) -> None:
    """Skip these tests if the packages of a version are not available, or fail them if CI=true."""
    require_cluster(slurm_version)


@pytest.fixture(scope="module")
def cluster(clusters_possible: None, slurm_version: str) -> Iterator[Cluster]:
    """Return a cluster with this version."""
    with running(slurm_version) as made:
        yield made


@pytest.fixture
def its_commands(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process use the commands of that version too."""
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("its_commands")
def test_it_is_that_version(cluster, login, slurm_version):
    assert login.slurm_version == slurm_version
    test_on_cluster.test_discover_cluster(cluster)


BOTH = [
    test_cgroups.test_a_run_is_requeued_cancelled_and_resumed,
    test_steps.test_what_a_process_is_in_the_batch_shell_and_in_steps,
    pytest.param(test_interactive.test_a_shell_in_an_allocation_of_two_nodes, marks=needs_tmux),
    test_trouble.test_the_log_folder_is_deleted_before_the_start,
]


@pytest.mark.parametrize("test", BOTH, ids=lambda test: test.__name__)
def test_as_on_the_installed_version(login, test):
    test(login)


@pytest.mark.parametrize("slurm_version", VERSIONS[-1:], indirect=True)
def test_preemptions_on_the_newest(login):
    test_signals.test_preemptions_are_neither_crashes_nor_faults_of_nodes(login)


@pytest.mark.usefixtures("its_commands")
def test_states_of_jobs(cluster, tmp_path):
    for body, state, code, number in (
        ("exit 0\n", JobState.COMPLETED, 0, None),
        ("exit 75\n", JobState.FAILED, 75, None),
        ("kill -9 $$\n", JobState.FAILED, 0, 9),
    ):
        test_on_cluster.test_ends(cluster, tmp_path, body, state, code, number)
    test_on_cluster.test_a_running_job(cluster, tmp_path)
    cluster.cancel_all()
    test_on_cluster.test_requeued_is_not_the_end(cluster, tmp_path)
