"""Tests how a worker handles stop signals, in a separate process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainkit
from tests.support.programs import run_program
from trainkit.job import processes
from trainkit.job.handlers import FROM_TERMINAL

SCRIPT = """
import sys, time
from trainkit.job.signals import StopRequest
time.sleep(0.3)
stop = StopRequest()
stop.install()
print("installed", flush=True)
assert stop.received.wait(120)
print(stop.signal_name, flush=True)
time.sleep(300 if "again" in sys.argv else 0)
"""


def start(*args, block=()):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, block)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


ROOT = Path(trainkit.__file__).parents[1]


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGINT"])
def test_signal_is_noted(name):
    with start() as worker:
        worker.stdout.readline()
        worker.send_signal(signal.Signals[name])
        assert worker.communicate(timeout=150)[0] == f"{name}\n"
    assert worker.returncode == 0


def test_signal_before_the_interpreter_is_up_is_noted_too():
    with start(block={signal.SIGTERM}) as worker:
        worker.send_signal(signal.SIGTERM)
        assert worker.communicate(timeout=150)[0] == "installed\nSIGTERM\n"
    assert worker.returncode == 0


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ((signal.SIGCHLD, signal.SIGTERM), signal.SIGTERM),
        ((signal.SIGUSR2,), None),
        ((signal.SIGCHLD,), None),
    ],
)
def test_a_notice_that_has_come_already_is_obeyed_without_a_delay_too(received, expected):
    processes.block_signals()
    for number in received:
        signal.raise_signal(number)
    assert processes.wait_for_notice(0.0) == expected


def test_second_ctrl_c_ends_at_once():
    with start("again") as worker:
        worker.stdout.readline()
        worker.send_signal(signal.SIGINT)
        worker.stdout.readline()
        worker.send_signal(signal.SIGINT)
        worker.communicate(timeout=5)
    assert worker.returncode == 130


FORKS = """
import multiprocessing, os, signal, time
from trainkit.job.signals import StopRequest
stop = StopRequest()
stop.install()
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
pool.join()
child = context.Process(target=time.sleep, args=(100,))
child.start()
os.kill(child.pid, signal.SIGUSR2)
child.terminate()
child.join(60)
print(child.exitcode, bool(stop), flush=True)
"""


def test_a_process_that_a_worker_forks_has_signals_of_its_own():
    done = run_program(sys.executable, "-c", FORKS, cwd=ROOT)
    assert done.stdout == f"{-signal.SIGTERM} False\n", done.stderr


def test_below_a_background_job_a_command_hears_the_signals_of_the_terminal(tmp_path):
    """A shell finds its foreground processes by these signals, as in handlers.is_in_foreground."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in FROM_TERMINAL}
    try:
        with open(tmp_path / "said", "wb") as output:
            argv = ["grep", "SigIgn", "/proc/self/status"]
            processes.start_child(argv, environ=os.environ, output=output, keeps_mask=False).wait(timeout=60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ignored = int((tmp_path / "said").read_text().split()[1], 16)
    assert not any(ignored >> number - 1 & 1 for number in FROM_TERMINAL)
