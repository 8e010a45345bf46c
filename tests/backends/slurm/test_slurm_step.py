"""Tests how a process finds its task in a Slurm step, with variables of Slurm 22.05, 24.11 and 26.05."""

import os
import select
import signal
import socket
from typing import Any

import pytest

from trainkit.backends.slurm.step import StepListener, find_slurm_task, reason_not_a_task, slurm_job_id
from trainkit.errors import UsageError
from trainkit.job.processes import descendants
from trainkit.job.signals import NOTICE_SIGNALS

BATCH_SHELL = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8"}
BATCH_SHELL |= dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), "0")
STEP = {**BATCH_SHELL, "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NODEID": "1"}
STEP |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
STEP |= {"SLURM_STEP_NODELIST": "node[18,1]", "SLURM_STEP_LAUNCHER_PORT": "40123"}


@pytest.fixture(autouse=True)
def no_scontrol(monkeypatch):
    """Make host lists be parsed without scontrol, as on a node without Slurm's commands."""
    monkeypatch.setenv("PATH", "/nowhere")


def step(**changes: Any) -> dict[str, str]:
    environ = {**STEP, **changes}
    return {name: value for name, value in environ.items() if value is not None}


def test_a_task_of_a_step():
    place = find_slurm_task(STEP)
    assert (place.job_id, place.step_id) == ("12", "0")
    assert (place.task, place.node_rank, place.local_task) == (2, 1, 0)
    assert place.hosts == ("node18", "node1"), "in the step's order"
    assert (place.num_tasks, place.num_nodes, place.tasks) == (4, 2, (2, 2))
    place = find_slurm_task(step(SLURM_STEP_NUM_TASKS="3", SLURM_STEP_TASKS_PER_NODE="2,1"))
    assert place.tasks == (2, 1)


BATCH, INTERACTIVE = "the batch shell of a Slurm job", "the interactive shell of an allocation"


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "this process is not in a Slurm job"),
        (BATCH_SHELL, BATCH),  # the batch shell has a SLURM_PROCID too
        *((step(SLURM_STEP_ID=number), BATCH) for number in ("4294967291", "-5")),
        *((step(SLURM_STEP_ID=number), INTERACTIVE) for number in ("4294967290", "4294967292", "-6", "-4")),
    ],
)
def test_shells_and_special_steps_are_no_tasks(environ, reason):
    assert find_slurm_task(environ) is None
    assert reason in str(reason_not_a_task(environ))


def test_each_start_of_a_step_has_a_key_of_its_own():
    array = step(SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="3")
    assert slurm_job_id(array) == find_slurm_task(array).job_id == "40_3"
    changes = {"STEP_ID": "1", "RESTART_COUNT": "1", "JOB_ID": "13", "STEP_LAUNCHER_PORT": "40124"}
    starts = [STEP, *(step(**{f"SLURM_{name}": value}) for name, value in changes.items())]
    assert len({find_slurm_task(environ).key for environ in starts}) == len(starts)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("STEP_NODELIST", None, "SLURM_STEP_NODELIST is not"),
        ("PROCID", "two", "'two' is not a whole number"),
        ("STEP_ID", "x", "SLURM_STEP_ID='x' is not a whole number"),
        *((name, "2", "contradict") for name in ("LOCALID", "NODEID")),
        *(("STEP_NUM_TASKS", "8", "contradict"), ("STEP_NODELIST", "node1", "contradict")),
        ("HET_SIZE", "2", "heterogeneous"),
    ],
)
def test_what_cannot_be_is_refused(name, value, message):
    with pytest.raises(UsageError, match=message):
        find_slurm_task(step(**{f"SLURM_{name}": value}))


@pytest.fixture
def child():
    """Return a listener, its process, and the other end of a connection that is open during its start."""
    before, known = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS), set(descendants(os.getpid()))
    ours, other = socket.socketpair()
    with ours:
        listener = StepListener()
    [pid] = set(descendants(os.getpid())) - known
    yield listener, pid, other
    other.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_it_hears_what_the_ranks_hear(child):
    listener, pid, _ = child
    os.kill(pid, signal.SIGTERM)
    assert listener.has_heard(signal.SIGTERM)
    assert not listener.has_heard(signal.SIGUSR2)


def test_it_keeps_no_connection_of_the_agent_open(child):
    """If the child kept a connection open, the rendezvous would wait for the child to exit."""
    _, _, other = child
    assert select.select([other], [], [], 10.0)[0], "the connection is still open"
    assert other.recv(1) == b""
