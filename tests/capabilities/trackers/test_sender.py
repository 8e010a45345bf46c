"""Tests the process that sends metrics: it delays no stop, and has limited time after the last step."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import wait_for
from tests.support.runs import make_attempt
from trainkit.capabilities.trackers import sender as trackers
from trainkit.capabilities.trackers.sender import TrackerSender, sender_log
from trainkit.job import processes
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json
from trainkit.run.rundir import AttemptDir

pytestmark = pytest.mark.slow

WAITS = "import sys; print('up', flush=True); print(sys.stdin.readline().strip() or 'end', flush=True)"
IGNORES = "import time; print('up', flush=True); time.sleep(600)"


def sender(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch, script: str) -> TrackerSender:
    """Start a sender that runs a script, and return it."""
    monkeypatch.setattr(trackers, "module_argv", lambda module, run: (sys.executable, "-c", script))
    found = TrackerSender(attempt, LaunchPlan.from_dict(read_json(attempt.plan_file)))
    wait_for(lambda: sender_log(attempt).read_text() == "up\n")
    return found


@pytest.fixture(autouse=True)
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    processes.block_signals()
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return make_attempt(tmp_path / "run")


def test_a_finished_run_has_the_rest_sent(attempt, monkeypatch):
    sender(attempt, monkeypatch, WAITS).end(is_finished=True)
    assert sender_log(attempt).read_text() == "up\nfinished\n"


def test_a_stopped_run_does_not_wait(attempt, monkeypatch):
    process = sender(attempt, monkeypatch, IGNORES)
    started_s = time.monotonic()
    process.end(is_finished=False)
    assert time.monotonic() < started_s + 10
    assert sender_log(attempt).read_text() == "up\n"


def test_the_time_to_send_is_limited(attempt, monkeypatch):
    monkeypatch.setattr(trackers, "DRAIN_S", 0.2)
    started_s = time.monotonic()
    sender(attempt, monkeypatch, IGNORES).end(is_finished=True)
    assert time.monotonic() < started_s + 60


def test_a_process_that_is_gone_or_never_was(attempt, monkeypatch, capfd):
    process = sender(attempt, monkeypatch, "print('up')")
    process.end(is_finished=True)
    monkeypatch.setattr(trackers, "module_argv", lambda module, run: ("/no/such/python",))
    TrackerSender(attempt, LaunchPlan.from_dict(read_json(attempt.plan_file))).end(is_finished=True)
    assert "could not start sending the metrics" in capfd.readouterr().out
