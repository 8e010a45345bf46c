"""Tests a run whose job gets as many nodes as are free: two, then four, then fewer, with one curve."""

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import settings, wait_for
from tests.on_slurm.survival import RESTART_S, wait_for_steps, wait_until_over
from trainkit.run.end import read_end
from trainkit.run.events import read_events, read_metrics
from trainkit.run.record import read_job

GROWS_SOON = """
if {"trainkit.job.supervisor", "submitit.core._submit"} & set(sys.orig_argv):
    from trainkit.capabilities.growth import growth_watch as growth
    growth.ASK_EVERY_S, growth.REQUEUE_S = 2.0, -1e6
"""
"""The rest of a sitecustomize.py with which a run often requests more nodes, and restarts for any gain."""
COMMAND = ("--gpus-per-node", "1", *settings("device=cpu"), "--", "python", "listens.py")
"""Options and arguments for ranks that compute nothing."""


@pytest.mark.slow(seconds=70)
def test_a_run_takes_what_there_is_grows_and_loses_a_host(login, tmp_path):
    """The run uses submitit and a list of sizes. The next test uses sbatch and a range."""
    config = survival.range_config(login.folder)
    site = login.folder / "sitecustomize.py"
    site.write_text(site.read_text() + GROWS_SOON)
    shape = ("--nodes", "1,2,4", "--backend", "submitit", "--per", "node", "--partition", "high")
    with login.other_job("--partition=high", "--nodes=2"):
        run = login.submit(*shape, *settings("resources.grow=true"), config=config)
        stays = "does not grow: 4 nodes would be free in 4h"  # the other job must end at that time
        wait_for(lambda: stays in str([one.reason for one in read_events(run, "growth")]), stays)
        status = login.status(run)
        assert stays in str(status["growth"])
        assert status["num_nodes"] == 2
    wait_for_steps(run, 2, 5)
    login.cluster.kill_host(2)
    wait_for_steps(run, 3, 1)
    assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    sizes = [len(survival.hosts_of(run, number)) for number in run.attempt_numbers()]
    assert sizes == [2, 4, 2], "three hosts are left, but the list does not contain 3"
    assert [r["loss"] for r in read_metrics(run)] == pytest.approx(
        survival.losses_on_one(tmp_path, config), rel=1e-5
    )
    before = survival.steps_of(run, 1)
    assert survival.steps_of(run, 2)[0] == before[-1] + 1, "the run had time to save"
    grown, lost = (read_end(run.attempt(number)) for number in (1, 2))
    assert grown is not None
    assert lost is not None
    assert [(end.action, end.cause) for end in (grown, lost)] == [
        ("requeue", "grow"),
        ("restart", "node_fail"),
    ]
    assert grown.reason.startswith("grows to 4 nodes: ")
    assert {entry.job_id for entry in read_job(run).attempts} == {login.job_id(run)}


@pytest.mark.slow(seconds=30)
def test_a_run_that_has_lost_a_node_has_more_again(login):
    with login.other_job("--partition=high", "--nodes=1"):
        run = login.submit("--nodes", "1-4", "--partition", "high", *COMMAND)
        login.wait_for_log(run, "of 3")
        lost = survival.hosts_of(run, 1)[1]
        login.cluster.kill_host(login.cluster.hosts.index(lost) + 1)
        login.wait_for_log(run, "of 2", attempt=2)
    assert login.trainkit("requeue", str(run.path)).returncode == 0
    login.wait_for_log(run, "of 3", attempt=3)
    assert lost not in survival.hosts_of(run, 3)
    assert "nodes: 3, 2, 3" in login.trainkit("status", str(run.path)).stdout
