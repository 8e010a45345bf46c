"""The child of an agent that hears what Slurm sends to a step."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from trainkit.job.node.slurm_step import StepListener
from trainkit.job.processes import descendants
from trainkit.job.signals import NOTICE_SIGNALS


@pytest.fixture
def child() -> Iterator[tuple[StepListener, int, socket.socket]]:
    """A listener, its process, and the other end of a connection that is open while it starts."""
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


def test_it_hears_what_the_ranks_hear(child: tuple[StepListener, int, socket.socket]) -> None:
    listener, pid, _ = child
    os.kill(pid, signal.SIGTERM)
    assert listener.has_heard(signal.SIGTERM)
    assert not listener.has_heard(signal.SIGUSR2)


def test_it_keeps_no_connection_of_the_agent_open(child: tuple[StepListener, int, socket.socket]) -> None:
    """The rendezvous of another task of the node would wait for its end."""
    _, _, other = child
    assert select.select([other], [], [], 10.0)[0], "the connection is still open"
    assert other.recv(1) == b""
