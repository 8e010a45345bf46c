"""Where the ranks are, on demand: questions, answers, and what is seen of a process from outside."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

from tests.support.programs import wait_for
from trainkit.job.failure import stacks
from trainkit.job.failure.stacks import (
    Reply,
    StackCollector,
    find_requests,
    group_replies,
    request_stacks,
    spy_on,
)
from trainkit.run.process import process_stat

PYTHON = sys.executable
WAITS = ["all_gather (dist.py:9)", "train (loop.py:1)"]
READS = ["read (disk.py:3)", "train (loop.py:1)"]


@pytest.fixture
def start(monkeypatch):
    """Start a Python program; it is killed after the test."""
    procs = []

    def start(script):
        procs.append(subprocess.Popen([PYTHON, "-c", script], stdout=subprocess.PIPE, text=True))
        assert procs[-1].stdout.readline() == "ready\n"
        return procs[-1].pid

    yield start
    for proc in procs:
        proc.kill()
        proc.communicate()


@pytest.fixture
def spy(tmp_path, monkeypatch):
    """Put a program in the place of py-spy; None takes it away."""

    def put(script):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))
        if script is not None:
            file = tmp_path / "py-spy"
            file.write_text(f"#!{PYTHON}\n{script}")
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return put


def reply(rank, frames, **more):
    return Reply(rank, "h", 7, "asked", {"MainThread": frames, "data": WAITS}, **more)


def wait_for_replies(request, count):
    wait_for(lambda: len(request.replies()) >= count)
    return request.replies()


def test_question_and_answers(attempt):
    assert find_requests(attempt) == []
    request = request_stacks(attempt, 3)
    assert find_requests(attempt) == [request]
    assert request.rank() == 3
    assert request.replies() == []
    said = reply(3, READS, step=41, phase="data", since_s=2.5)
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


def test_ranks_at_the_same_place_are_one_group_and_the_odd_one_comes_first():
    silent = Reply(9, "h", 7, "", problem="stopped")
    replies = [reply(0, WAITS), reply(1, WAITS), reply(2, READS), reply(3, WAITS), silent]
    assert [[one.rank for one in group] for group in group_replies(replies)] == [[2], [0, 1, 3]]


LISTENS = """
import signal, sys, time
signal.signal(signal.SIGURG, lambda *_: None)
print("ready", flush=True)
time.sleep(60)
"""


class TestFromOutside:
    def test_py_spy(self, start, spy):
        threads = [
            {"thread_id": 10, "thread_name": "data", "os_thread_id": 1, "frames": []},
            {
                "thread_id": 11,
                "thread_name": "MainThread",
                "os_thread_id": 0,
                "frames": [{"name": "f", "filename": "a.py", "line": 3}],
            },
        ]
        spy(
            f"import json, sys\nthreads = json.loads('''{json.dumps(threads)}''')\n"
            "assert sys.argv[1:4] == ['dump', '--json', '--pid']\n"
            "threads[1]['os_thread_id'] = int(sys.argv[4])\nprint(json.dumps(threads))"
        )
        pid = start(LISTENS)
        seen = spy_on(2, pid)
        assert (seen.rank, seen.pid, seen.how, seen.problem) == (2, pid, "py-spy", "")
        assert seen.threads == {"MainThread 0xb": ["f (a.py:3)"], "data 0xa": []}
        assert seen.main_stack == ("f (a.py:3)",)

    def test_py_spy_that_may_not_look(self, start, spy):
        spy("import sys\nsys.exit('Error: Permission Denied: try again as root\\n\\nStack backtrace:')")
        seen = spy_on(2, start(LISTENS))
        assert (seen.how, seen.problem) == ("", "py-spy: Error: Permission Denied: try again as root")

    def test_without_py_spy(self, start, spy):
        spy(None)
        pid = start(LISTENS)
        assert "py-spy, which can read its stacks, is not installed" in spy_on(2, pid).problem
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: "stopped (SIGSTOP" in spy_on(2, pid).problem)


class TestCollector:
    def test_every_question_is_answered_once_and_for_the_rank_that_is_meant(
        self, attempt, start, spy, monkeypatch
    ):
        spy(None)
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

    def test_a_program_that_knows_nothing_of_it_gets_no_signal(self, attempt, start, spy):
        spy(None)
        pid = start(LISTENS.replace("lambda *_: None", "lambda *_: sys.exit(3)"))
        collector = StackCollector(attempt, replies_itself=False)
        request = request_stacks(attempt, None)
        collector.poll(lambda: {0: pid})
        (found,) = wait_for_replies(request, 1)
        assert "is not installed" in found.problem
        assert process_stat(pid).state in ("S", "R")

    def test_a_question_that_was_withdrawn_harms_nobody(self, attempt):
        collector = StackCollector(attempt, replies_itself=False)
        request = request_stacks(attempt, None)
        request.withdraw()
        collector._reply(request, {0: os.getpid()})
        assert not attempt.stacks_dir.exists() or list(attempt.stacks_dir.iterdir()) == []
