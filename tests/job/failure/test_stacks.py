"""Tests stacks of ranks on demand: requests, answers, and the view of a process from outside."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.programs import wait_for
from tests.support.said import said
from trainkit.job.failure import stacks
from trainkit.job.failure.stacks import Reply, StackCollector, find_requests, request_stacks, spy_on
from trainkit.run.process import process_stat

PYTHON = sys.executable


@pytest.fixture
def start():
    procs = []

    def start(script):
        procs.append(subprocess.Popen([PYTHON, "-c", script], stdout=subprocess.PIPE, text=True))
        assert procs[-1].stdout.readline() == "ready\n"
        return procs[-1].pid

    yield start
    for proc in procs:
        proc.kill()
        proc.communicate()


@pytest.fixture(autouse=True)
def no_spy(tmp_path, monkeypatch):
    """Hide py-spy. tests/cli/test_control.py has a replacement."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))


def wait_for_replies(request, count):
    wait_for(lambda: len(request.replies()) >= count)
    return request.replies()


def test_question_and_answers(attempt):
    assert find_requests(attempt) == []
    request = request_stacks(attempt, 3)
    assert find_requests(attempt) == [request]
    assert request.rank() == 3
    assert request.replies() == []
    frames = ["read (disk.py:3)", "train (loop.py:1)"]
    said = Reply(3, "h", 7, "asked", {"MainThread": frames, "data": []}, step=41, phase="data", since_s=2.5)
    request.reply(said)
    request.reply_file(4).write_text("{}")
    request.reply_file(5).write_text("{")
    assert request.replies() == [said]
    other = request_stacks(attempt, None)
    assert other.rank() is None
    request.withdraw()
    assert find_requests(attempt) == [other]
    other.withdraw()
    assert list(attempt.stacks_dir.iterdir()) == []


LISTENS = """
import signal, sys, time
signal.signal(signal.SIGURG, lambda *_: None)
print("ready", flush=True)
time.sleep(60)
"""


def test_without_py_spy(start):
    pid = start(LISTENS)
    said(spy_on(2, pid).problem)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "stopped (SIGSTOP" in spy_on(2, pid).problem)


def test_every_question_is_answered_once_and_for_the_rank_that_is_meant(attempt, start, monkeypatch):
    monkeypatch.setattr(stacks, "REPLY_S", 0.2)
    pids = {0: start(LISTENS), 1: start(LISTENS)}
    collector = StackCollector(attempt, replies_itself=True)
    collector.poll(lambda: pids)
    one, all_ranks = request_stacks(attempt, 1), request_stacks(attempt, None)
    collector.poll(lambda: pids)
    collector.poll(lambda: pytest.fail("there is nothing new"))
    assert [found.rank for found in wait_for_replies(all_ranks, 2)] == [0, 1]
    (found,) = wait_for_replies(one, 1)
    assert (found.rank, found.pid, found.how) == (1, pids[1], "")


def test_a_program_that_knows_nothing_of_it_gets_no_signal(attempt, start):
    pid = start(LISTENS.replace("lambda *_: None", "lambda *_: sys.exit(3)"))
    collector = StackCollector(attempt, replies_itself=False)
    request = request_stacks(attempt, None)
    collector.poll(lambda: {0: pid})
    (found,) = wait_for_replies(request, 1)
    assert "is not installed" in found.problem
    assert process_stat(pid).state in ("S", "R")


def test_a_question_that_was_withdrawn_harms_nobody(attempt):
    request = request_stacks(attempt, None)
    request.withdraw()
    StackCollector(attempt, replies_itself=False)._reply(request, {0: os.getpid()})
    assert not attempt.stacks_dir.exists() or list(attempt.stacks_dir.iterdir()) == []
