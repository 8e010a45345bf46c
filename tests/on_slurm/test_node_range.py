"""Tests runs that choose their nodes, grow, lose hosts, have hosts to spare or end with their slices."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.on_slurm import survival
from tests.on_slurm.broken_cases import changed_host
from tests.on_slurm.login import Login, agents_of, log_of, settings, wait_for
from tests.on_slurm.survival import RESTART_S, wait_for_steps, wait_until_over
from trainkit.cluster.bad_nodes import excluded, memory_file, note_failure
from trainkit.formats import time_text
from trainkit.run.end import read_end
from trainkit.run.events import read_events, read_metrics
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

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
    shape = ("--nodes", "1,2", "--backend", "submitit", "--per", "node", "--partition", "high")
    with login.other_job("--partition=high", "--nodes=3"):
        run = login.submit(*shape, *settings("resources.grow=true"), config=config)
        stays = "does not grow: 2 nodes would be free in 4h"  # the other job must end at that time
        wait_for(lambda: stays in str([one.reason for one in read_events(run, "growth")]), stays)
        status = login.status(run)
        assert stays in str(status["growth"])
        assert status["num_nodes"] == 1
    wait_for_steps(run, 2, 5)
    with login.other_job("--partition=high", "--nodes=2"):  # the run cannot grow again
        login.cluster.kill_host(login.cluster.hosts.index(survival.hosts_of(run, 2)[1]) + 1)
        wait_for_steps(run, 3, 1)
        assert wait_until_over(login, run, RESTART_S)["state"] == "finished", login.logs_and_attempts(run)
    sizes = [len(survival.hosts_of(run, number)) for number in run.attempt_numbers()]
    assert sizes == [1, 2, 1]
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
    assert grown.reason.startswith("grows to 2 nodes: ")
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


AUTO = ("--nodes", "auto", "--gpus-per-node", "1", "--set", "device=cpu")


@contextmanager
def maintenance(login: Login, in_minutes: int) -> Iterator[None]:
    """Reserve all hosts for an hour, beginning in some minutes."""
    when = (f"starttime=now+{in_minutes}minutes", "duration=60", "flags=maint", "users=root", "nodes=ALL")
    login.run(["scontrol", "create", "reservation", "reservationname=maintenance", *when], check=True)
    try:
        yield
    finally:
        login.run(["scontrol", "delete", "reservation=maintenance"], check=True)


@pytest.mark.slow(seconds=10)
def test_each_load_has_its_earliest_end(login):
    def chosen(*options: str) -> tuple[int, str, set[float]]:
        """Return nodes and partition of the plan, and the limits of the requests with the earliest end."""
        done = login.trainkit("check", "small.yaml", *AUTO, *options, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        ends = [offer for offer in found["offers"] if offer["end_time"] is not None]
        first = min(offer["end_time"] for offer in ends)
        sbatch = found["plan"]["slurm"]["sbatch"]
        taken = found["taken"]
        slice_ = time_text(int(taken["limit_s"])) if taken["is_slice"] else None
        assert found["config"]["resources"]["slice"] == slice_
        assert sbatch["time"] == (slice_ or found["config"]["resources"]["time"])
        best = [
            offer["limit_s"]
            for offer in ends
            if offer["end_time"] == first and offer["num_nodes"] == sbatch["nodes"]
        ]
        assert best
        return sbatch["nodes"], sbatch["partition"], {*best}

    (login.folder / "small.yaml").write_text("name: small\ntrain: {global_batch_size: 16}\n")
    high = ("--partition", "high", "--time", "60")
    assert chosen(*high) == (4, "high", {3600})
    # one slice fits before the maintenance, and the others run after it
    with maintenance(login, in_minutes=90):
        assert chosen("--partition", "high", "--time", "08:00:00") == (4, "high", {3600})
    with maintenance(login, in_minutes=30):
        assert chosen(*high, "--time-min", "20") == (4, "high", {1200})
    with login.other_job("--partition=high", "--nodes=2", "--time=10"):  # the run should wait for this job
        assert chosen(*high) == (4, "high", {3600})
    with login.other_job("--partition=low", "--nodes=4"):
        assert chosen("--partition", "low,high", "--time", "60") == (4, "high", {3600})


@pytest.mark.slow(seconds=20)
def test_the_job_has_the_nodes_that_were_chosen(login):
    with login.other_job("--partition=high", "--nodes=2"):
        given = (*AUTO, "--backend", "submitit", "--partition", "high", "--time", "60")
        words = ("--json", "--", "python", "listens.py")
        done = login.trainkit("submit", str(login.config), *given, *words)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        run = RunDir(found["run_dir"])
        assert (found["taken"]["num_nodes"], found["reason"]) == (2, None)
        assert {offer["num_nodes"] for offer in found["offers"]} >= {1, 2}
        login.wait_for_log(run, "of 2")
        # Slurm counts only the remaining nodes of a job that is completing
        job = login.cluster.job(login.job_id(run))
        assert (job["NumNodes"], job["Partition"]) == ("2", "high")
        assert login.trainkit("cancel", str(run.path)).returncode == 0
        assert login.wait_for_end(run)["state"] == "cancelled", login.logs_and_attempts(run)
    wait_for(lambda: {*login.cluster.node_states().values()} == {"idle"}, "four idle hosts")
    done = login.trainkit("resume", str(run.path), "--nodes", "auto")
    assert done.returncode == 0, done.stderr
    assert "4*" in done.stderr
    login.wait_for_log(run, "of 4", attempt=2)


def test_the_job_has_a_node_to_spare_and_leaves_out_one_that_failed(login):
    name, bad = login.cluster.name, login.cluster.hosts[0]
    note_failure(name, bad, "died", "it was away", run="/runs/big", attempt=3, environ=login.env)
    args = ["--nodes", "2", "--gpus-per-node", "2", *settings("resources.spare_nodes=1")]
    shown = login.trainkit("check", str(login.config), *args)
    assert shown.returncode == 0, shown.stderr
    assert "3 nodes, of which 2" in shown.stdout
    assert f"exclude: {bad}: it was away (" in shown.stdout
    assert f"`rm {memory_file(name, login.env)}` clears the list" in shown.stdout
    run = login.submit_listeners(*args, num_ranks=4)
    job = login.cluster.job(login.job_id(run))
    assert (job["NumNodes"], job["ExcNodeList"]) == ("3", bad)
    assert [host for _, host in agents_of(run)][::2] == login.cluster.hosts[1:3]
    assert "#SBATCH --no-kill\n" in run.script_file.read_text()
    assert login.status(run)["num_nodes"] == 2
    # The job now needs all four hosts, so it uses the one that failed.
    args += ["--nodes", "3", *settings("train.global_batch_size=null")]
    full = login.trainkit("check", str(login.config), *args)
    assert f"exclude: not {bad}, " in full.stdout
    memory_file(name, login.env).unlink()
    forgotten = login.trainkit("check", str(login.config), *args)
    assert (forgotten.returncode, "exclude:" in forgotten.stdout) == (0, False)


def test_a_host_that_fails_a_check_is_given_up_and_left_out_from_then_on(login):
    small = "/var/tmp/small"  # each host has a separate /var/tmp
    mount = ["sh", "-c", f"mkdir {small} && mount -t tmpfs -o size=8m tmpfs {small}"]
    with changed_host(login, 2, mount, ["sh", "-c", f"umount --lazy {small} && rmdir {small}"]):
        values = settings("resources.spare_nodes=1", f"launch.env.TMPDIR={small}")
        run = login.submit("--nodes", "2", "--per", "node", *values, "--", "python", "listens.py")
        for rank in range(2):
            login.wait_for_log(run, f"attempt 2 rank {rank}", rank, attempt=2)
    first, second, third = login.cluster.hosts[:3]
    end = login.wait_for_end(run)
    assert end["action"] == "restart"
    verdict = end["verdict"]
    assert (verdict["type"], verdict["host"]) == ("PreflightFailed", second)
    assert verdict["message"].startswith(f"{small} on {second} has only 8.0 MiB ")
    assert log_of(run, rank=1) == ""  # rank 1 of attempt 1 was never started
    assert [host for _, host in agents_of(run, attempt=2)] == [first, third]
    assert list(excluded(login.cluster.name, environ=login.env)) == [second]
    again = login.trainkit("check", str(login.config))
    assert f"exclude: {second}: {verdict['message']} ({run.path.name}, attempt 1, " in again.stdout


GRACE_S = 15
"""The longest grace time for a job of one minute, the minimum in Slurm.

Slurm may send the signal up to 30 s early.
"""


@pytest.mark.slow(seconds=70)
def test_slices_end_with_their_total(login):
    run = login.submit(
        *("--nodes", "1", "--gpus-per-node", "1", *settings(f"requeue.grace_s={GRACE_S}")),
        *("--partition", "debug,high", "--time", "00:01:20", "--slice", "1", "--", "python", "listens.py"),
    )
    assert login.cluster.job(login.job_id(run))["TimeLimit"] == "00:01:00"

    def last() -> int | None:
        number = run.attempt_numbers()[-1]
        end = read_end(run.attempt(number))
        return None if end is None or end.resumes else number

    wait_for(lambda: last() is not None, "the end of the last slice", 400.0)
    ends = [read_end(run.attempt(number)) for number in run.attempt_numbers()]
    assert len(ends) > 1, login.logs_and_attempts(run)
    assert {end.cause for end in ends if end is not None} == {"timeout"}, login.logs_and_attempts(run)
    assert ends[0] is not None
    assert ends[0].reason.startswith("saved after SIGUSR2")
    final = ends[-1]
    assert final is not None
    assert (final.state, final.action) == ("stopped", "stopped")
    assert "the 00:01:20 of resources.time" in final.reason
    assert {entry.job_id for entry in read_job(run).attempts} == {login.job_id(run)}
    assert all(event.text("partition") in ("debug", "high") for event in read_events(run, "started"))
    status = login.status(run)
    assert status["partition"] in ("debug", "high")
    assert status["total_s"] == 80
    assert 80 - 2 * GRACE_S <= status["slices_s"] <= 80
    shown = login.trainkit("status", str(run.path)).stdout
    assert f" in {len(ends)} attempts; slices 00:0" in shown
    assert f"on cpu, partition {status['partition']}" in shown
