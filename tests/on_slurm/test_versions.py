"""The same on a newer Slurm: training, preemption, requeue, cancel, steps, and what `status` reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm import test_commands, test_signals, test_steps
from tests.on_slurm.login import BACKENDS, Login, settings
from tests.slurm import test_control_on_cluster, test_jobs_on_cluster
from tests.support.runs import losses
from tools.slurm_cluster.cluster import Cluster, up
from tools.slurm_cluster.plugin import require_cluster
from tools.slurm_cluster.processes import Pid
from trainkit.slurm.states import JobState

VERSION = "24.11"

# One process starts this cluster, whatever the number of processes.
pytestmark = pytest.mark.xdist_group("newer Slurm")


@pytest.fixture(scope="module")
def clusters_possible() -> None:
    """Skip these tests where the packages of this version cannot be had; fail them instead if CI=true."""
    require_cluster(VERSION)


@pytest.fixture(scope="module")
def cluster(clusters_possible: None) -> Iterator[Cluster]:
    """A cluster with this version, in place of the installed one."""
    made = up(owner=Pid.of(os.getpid()), slurm=VERSION)
    yield made
    made.down()


def test_it_is_that_version(cluster: Cluster) -> None:
    assert cluster.run(["sbatch", "--version"], check=True).stdout.startswith(f"slurm-wlm {VERSION}.")
    test_control_on_cluster.test_discover_cluster(cluster)


@pytest.mark.slow(seconds=40)
def test_both_backends_train_on_two_hosts(login: Login) -> None:
    shape = ("--nodes", "2", "--gpus-per-node", "1")
    short = [*test_signals.ENDLESS, *settings("train.steps=3")]
    runs = [login.submit(*shape, *short, "--backend", backend) for backend in BACKENDS]
    curves = [losses(login.finish(run).path) for run in runs]
    assert list(curves[0]) == [1, 2, 3]
    assert curves[0] == curves[1]
    assert [login.status(run)["state"] for run in runs] == ["finished"] * 2


def test_ranks_have_everything_that_trainers_read(login: Login) -> None:
    test_commands.test_a_command_is_a_rank_with_everything_that_trainers_read(login)


@pytest.mark.slow(seconds=30)
def test_a_preemption_saves_and_requeues(login: Login) -> None:
    test_signals.test_a_preemption_that_tells_only_the_ranks_saves(login)


@pytest.mark.slow(seconds=40)
def test_a_requeued_and_a_resumed_run_repeat_no_step(login: Login) -> None:
    test_signals.test_a_requeued_job_goes_on_as_the_next_attempt(login)


def test_cancel_saves(login: Login) -> None:
    test_signals.test_cancel_saves(login)


def test_srun_trainkit_run(login: Login) -> None:
    (login.folder / "nano.yaml").write_text(test_steps.NANO)
    test_steps.test_srun_trainkit_run(login)


def test_states_of_jobs(cluster: Cluster, tmp_path: Path) -> None:
    for body, state, code in (("exit 0\n", JobState.COMPLETED, 0), ("exit 75\n", JobState.FAILED, 75)):
        test_jobs_on_cluster.test_ends(cluster, tmp_path, body, state, code, None)
    test_jobs_on_cluster.test_a_running_job(cluster, tmp_path)
    cluster.cancel_all()
    test_jobs_on_cluster.test_requeued_is_not_the_end(cluster, tmp_path)
