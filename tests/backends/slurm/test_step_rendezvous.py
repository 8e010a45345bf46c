"""Tests the rendezvous of agents on one machine and in a step: ports, and the newest attempt."""

import os
import signal
import socket
import stat
import threading
from functools import partial

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.backends.slurm import step
from trainkit.backends.slurm.step import SlurmTask, await_port, check_step, slurm_rendezvous, step_task
from trainkit.errors import EXIT_NO_RESTART, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.node import agent, rendezvous
from trainkit.job.node.agent import superseding_attempt
from trainkit.job.node.rendezvous import LOCAL_ADDR, StopSignalReceived, choose_port, local_rendezvous
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json, read_jsonl, write_json
from trainkit.run.rundir import AttemptDir, RunDir

plan = partial(launch_plan, per="gpu")


def task_of(node_rank: int = 0, local_task: int = 0, tasks: tuple[int, ...] = (2, 2)) -> SlurmTask:
    hosts = tuple(f"host{index}" for index in range(len(tasks)))
    task = sum(tasks[:node_rank]) + local_task
    return SlurmTask("7", "0", 0, task, node_rank, local_task, tasks, hosts, "4000")


@pytest.fixture(autouse=True)
def resolvable(monkeypatch):
    """Return the names and addresses that resolve on this host."""
    names = {"host0", "host1"}
    monkeypatch.setattr(step, "resolves", lambda name: name in names)
    monkeypatch.setattr(step, "RESOLVE_PATIENCE_S", 0.0)
    return names


@pytest.fixture
def slurm(fake, monkeypatch):
    """Return a Slurm whose host0 has the NodeAddr 10.0.0.10, host1 has 10.0.0.11, and so on."""
    show = 'for name; do :; done; echo "NodeName=$name Arch=x86 NodeAddr=10.0.0.1${name#host} NodeHostName=h"'
    fake.add("scontrol", show)
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    return fake


def test_all_workers_of_a_node(attempt):
    found = local_rendezvous(plan(per="node"), 1, 12345)
    assert (found.node_rank, found.local_ranks, found.master_addr) == (1, (0, 1), LOCAL_ADDR)
    assert not found.has_rank_0
    assert local_rendezvous(plan(per="node"), 0, 12345).has_rank_0
    assert slurm_rendezvous(attempt, plan(per="node"), task_of(tasks=(1, 1))).local_ranks == (0, 1)
    # One node meets on the loopback interface.
    found = slurm_rendezvous(attempt, plan(num_nodes=1), task_of(tasks=(2,)))
    assert (found.master_addr, found.peer) == (LOCAL_ADDR, None)


def test_tasks_of_a_step_meet_at_the_port_of_the_first(attempt):
    first = slurm_rendezvous(attempt, plan(), task_of())
    assert (first.local_ranks, first.master_addr, first.peer) == ((0,), "host0", "host1")
    assert first.has_rank_0
    for local_task in (0, 1):
        other = slurm_rendezvous(attempt, plan(), task_of(node_rank=1, local_task=local_task))
        assert (other.local_ranks, other.master_port) == ((local_task,), first.master_port)
        assert (other.nonce, other.peer) == (first.nonce, "host0")
        assert not other.has_rank_0
    assert len(first.nonce) == 32
    assert stat.S_IMODE(attempt.rendezvous_file.stat().st_mode) == 0o600
    with socket.create_server(("", first.master_port)):
        pass


def test_nodes_whose_names_do_not_resolve_meet_at_the_node_addr(attempt, resolvable, slurm):
    resolvable.clear()
    resolvable |= {"10.0.0.10", "10.0.0.11"}
    first = slurm_rendezvous(attempt, plan(), task_of())
    assert (first.master_addr, first.peer) == ("10.0.0.10", "10.0.0.11")
    asked = slurm.calls
    assert [call[-2:] for call in asked] == [["node", "host0"], ["node", "host1"]]
    other = slurm_rendezvous(attempt, plan(), task_of(node_rank=1))
    assert (other.master_addr, other.peer) == ("10.0.0.10", "10.0.0.10")
    assert slurm.calls == asked  # the first task has published the address


def test_a_name_that_resolves_only_on_its_own_node_is_not_used_elsewhere(attempt, resolvable, slurm):
    first = slurm_rendezvous(attempt, plan(), task_of())
    resolvable.clear()
    resolvable.add("10.0.0.10")
    other = slurm_rendezvous(attempt, plan(), task_of(node_rank=1))
    assert (first.master_addr, other.master_addr) == ("host0", "10.0.0.10")
    assert len(slurm.calls) == 1


def test_a_node_without_any_address_is_named(attempt, resolvable, slurm):
    resolvable.clear()
    with pytest.raises(TrainkitError) as caught:
        slurm_rendezvous(attempt, plan(), task_of())
    said(caught.value.message)
    slurm.add("scontrol", "echo 'Node host0 not found' >&2; exit 1")
    with pytest.raises(TrainkitError, match="does not report its NodeAddr: scontrol"):
        slurm_rendezvous(attempt, plan(), task_of())


def test_another_step_than_planned_is_refused():
    two_tasks = r"2 nodes with 1 task each .--per node., but Slurm started 2 nodes with 2 tasks"
    one_node = "but Slurm started 1 node with 4 tasks each"
    for wanted, tasks, message in ((plan(per="node"), (2, 2), two_tasks), (plan(), (4,), one_node)):
        with pytest.raises(TrainkitError, match=message) as caught:
            check_step(wanted, task_of(tasks=tasks))
        assert caught.value.exit_code == EXIT_NO_RESTART
    uneven = plan(node_sizes=(2, 1))  # the plan knows these nodes
    assert (uneven.world_size, uneven.first_rank_of(1)) == (3, 2)
    check_step(uneven, task_of(tasks=(2, 1)))


def test_a_port_of_another_start_does_not_count(attempt):
    write_json(attempt.rendezvous_file, {"step": "7.0.1.4000", "addr": "host0", "port": 1})
    with pytest.raises(TrainkitError, match=r"has not published .* within 0.2 s"):
        await_port(attempt, task_of(node_rank=1), timeout_s=0.2)


def test_a_task_waits_for_another_that_has_failed(attempt, monkeypatch):
    monkeypatch.setattr("trainkit.job.node.rendezvous.FAILURE_POLL_S", 0.1)
    write_json(attempt.rank_error(2), {"rank": 2})
    with pytest.raises(TrainkitError, match="another rank failed before the rendezvous") as caught:
        await_port(attempt, task_of(1, 1), is_supervised=False)
    assert str(attempt.rank_error(2)) in caught.value.hint


def test_asked_to_stop_while_waiting(attempt):
    processes.block_signals()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(StopSignalReceived):
            await_port(attempt, task_of(node_rank=1), timeout_s=5.0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.WATCHED)


def test_a_plan_that_does_not_come_is_a_failure_of_the_task_that_waits(attempt, monkeypatch, capfd):
    monkeypatch.setattr(agent, "step_task", lambda: task_of(node_rank=1))

    def wait(attempt: AttemptDir) -> LaunchPlan:
        raise TrainkitError("no plan", exit_code=EXIT_NO_RESTART)

    monkeypatch.setattr(agent, "await_plan", wait)
    assert agent.run_step_task(attempt.run, 1) == EXIT_NO_RESTART
    [record] = [read_json(path) for path in attempt.errors_dir.glob("rank-*.json")]
    assert (record["message"], record["node_rank"]) == ("no plan", 1)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(agent, "step_task", step_task)
    assert agent.run_step_task(attempt.run, 1) == EXIT_NO_RESTART
    said(capfd.readouterr().out)


@pytest.mark.parametrize(("procid", "events"), [("0", ["SIGUSR2"]), ("1", [])])
def test_a_notice_before_the_ranks_are_started_is_written_down_once(attempt, monkeypatch, procid, events):
    """The supervisor, which is not a task of the step, needs this record.

    Without the record, the end looks like a decision of the ranks.
    """
    monkeypatch.setattr(agent, "step_task", lambda: task_of(local_task=int(procid)))

    def signalled(attempt: AttemptDir) -> LaunchPlan:
        raise StopSignalReceived(signal.SIGUSR2)

    monkeypatch.setattr(agent, "await_plan", signalled)
    assert agent.run_step_task(attempt.run, 1) == EXIT_STOPPED
    assert [event["signal"] for event in read_jsonl(attempt.run.events_file)] == events


@pytest.mark.parametrize("text", ["20000\t30000\n", "1024 65535", None])
def test_a_port_is_outside_the_ephemeral_range(text, tmp_path, monkeypatch):
    file = tmp_path / "range"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("trainkit.job.node.rendezvous.EPHEMERAL_RANGE", file)
    low, high = map(int, (text or "32768 60999").split())
    found = rendezvous.candidate_ports()
    assert rendezvous.ephemeral_range() == (low, high)
    assert len(set(found)) == (0 if high > 65_000 else 64)
    assert all(10_000 <= port < low or high < port < 65_000 for port in found)
    assert rendezvous.is_free(choose_port())


def test_taken_port_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        assert not rendezvous.is_free(wanted)
        other = choose_port()
        monkeypatch.setattr("trainkit.job.node.rendezvous.candidate_ports", lambda: [wanted, other])
        assert choose_port() == other


@pytest.mark.parametrize(
    ("met", "number", "newer"),
    # In the second case, the other jobs are pending and use no node.
    [((1, 2, 3), 3, None), ((1,), 1, None), ((1, 2), 1, 2), ((1, 3), 1, 3)],
)
def test_an_attempt_whose_ranks_have_met_elsewhere_is_newer(tmp_path, met, number, newer):
    run = RunDir(tmp_path)
    for other in (1, 2, 3):
        run.attempt(other).create()
        if other in met:
            write_json(run.attempt(other).rendezvous_file, {"port": 1})
    assert superseding_attempt(run.attempt(number)) == newer
