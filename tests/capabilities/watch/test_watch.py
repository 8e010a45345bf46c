"""Tests `trainkit watch` in a terminal and printed once, and how often it reads files and queries Slurm."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import watched_runs
from tests.support.programs import run_program, wait_for
from tests.support.said import said
from tests.support.tmux import Tmux, needs_tmux, normalized
from trainkit.backends import jobs as jobs_of_runs
from trainkit.backends.jobs import SlurmPoller
from trainkit.capabilities.watch.screen import read_again
from trainkit.cli.main import main
from trainkit.run.process import process_stat
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

SCREENS = Path(__file__).parent / "screens"
TRAINKIT = (sys.executable, "-m", "trainkit")
TRAINS = """
import json, os, sys, time
run, step = sys.argv[1], 0
while not os.path.exists(os.path.join(run, "end")):
    step += 1
    print(f"iter {step}: loss {3 + 1 / step:.4f}", flush=True)
    time.sleep(0.2)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """Return a COMMAND that runs on this machine until the test ends it."""
    (tmp_path / "trains.py").write_text(TRAINS)
    pattern = r"logging.pattern='iter (?P<step>\d+): loss (?P<loss>\S+)'"
    settings = ("device=cpu", "logging.health_every_s=null", pattern)
    options = ["--backend", "local", "--name", "mine", "--nodes", "1"]
    options += [word for setting in settings for word in ("--set", setting)]
    command = ["--", "python", "trains.py", str(tmp_path)]
    options += ["--gpus-per-node", "1", "--json"]
    done = run_program(*TRAINKIT, "submit", *options, *command, cwd=tmp_path, check=True)
    yield RunDir(json.loads(done.stdout)["run_dir"])
    (tmp_path / "end").touch()


def test_without_a_terminal_it_prints_once(tmp_path, monkeypatch, capsys):
    watched_runs.failed(tmp_path / "runs" / "failed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def typed(line: str) -> str:
        assert main(line.split()) == 0
        return capsys.readouterr().out

    printed = typed("watch failed")
    assert "\x1b" not in printed
    lines = printed.splitlines()
    assert lines[0].split()[:2] == ["failed", "FAILED"]
    [hint] = [line for line in lines if "hint: " in line]
    said(hint)
    # --json has the fields of `status`, and more.
    value = json.loads(typed("watch failed --json"))
    assert value.keys() > json.loads(typed("status failed --json")).keys()
    assert (value["state"], value["steps_at_risk"], value["checkpoint_step"]) == ("failed", 80, 200)
    assert [node["host"] for node in value["nodes"]] == ["node001", "node002"]
    # The list is that of `status`.
    assert typed("watch").splitlines()[1].split()[:2] == ["runs/failed", "failed"]
    assert [item["state"] for item in json.loads(typed("watch --json"))] == ["failed"]
    code = (
        "import sys; from trainkit.cli.main import main; main(['watch', 'failed', '--once']);"
        " main(['watch', '--help']); sys.exit('textual' in sys.modules or 'torch' in sys.modules)"
    )
    assert run_program(sys.executable, "-c", code, cwd=tmp_path).returncode == 0


@needs_tmux
@pytest.mark.slow(seconds=10)
def test_a_live_run_in_a_terminal(run, tmp_path):
    with Tmux(tmp_path, 80, 24, tmp_path) as terminal:
        terminal.type([*TRAINKIT, "watch", "mine", "--interval", "0.5"])
        terminal.wait_for(r"^progress +step [1-9]")
        file = SCREENS / "live-80x24.txt"
        if os.environ.get("REWRITE_SCREENS"):
            file.write_text(normalized(terminal.screen))
        expected = file.read_text()
        assert terminal.settled(expected, head_of) == head_of(expected)
        before = terminal.wait_for(r"step (\d+)")[1]
        terminal.wait_for(rf"^progress +step (?!{before}$)\d+")  # the chart is updated
        terminal.resize(100, 30)
        terminal.wait_for(rf"^── warnings: none ─{{{100 - 18}}}$")
        terminal.keys("l")
        terminal.wait_for(r"^q Quit esc Back \? Keys *$")
        terminal.wait_for(r"^iter \d+: loss")
        terminal.keys("Escape")
        terminal.wait_for(r"^── warnings")
        terminal.keys("C-z")
        terminal.wait_for(r"Stopped +")
        assert not terminal.is_alternate
        terminal.type(["fg"])
        terminal.wait_for(r"^── warnings")
        terminal.keys("c")
        terminal.wait_for(r"Cancel mine\? The run saves and stops\.")
        terminal.keys("y")
        terminal.wait_for(r"^mine +(STOPPED|CANCELLED)")
        terminal.wait_for(r"^hint: `trainkit resume ")
        terminal.keys("q")
        terminal.wait_for(r"^\$$")
        assert not terminal.is_alternate


def head_of(screen: str) -> list[str]:
    """Return the normalized lines of a screen before the lines of the log, which may be few at first."""
    lines = normalized(screen).splitlines()
    end = next((index for index, line in enumerate(lines) if line.startswith("── last")), len(lines))
    return [*lines[:end], lines[-1]]


@needs_tmux
@pytest.mark.slow(seconds=15)
def test_the_terminal_is_restored_whatever_ends_it(run, tmp_path):
    coloured = re.compile(r"\x1b\[(?:\d+;)*(?:3[1-7]|38)[;m]")
    with Tmux(tmp_path, 80, 24, tmp_path) as terminal:
        terminal.type([*TRAINKIT, "--no-color", "watch", "mine"])
        terminal.wait_for(r"^progress +step")
        assert not coloured.search(terminal.screen_with_colours)
        terminal.keys("q")
        terminal.wait_for(r"^\$$")
        command = f"{sys.executable} -m trainkit watch mine; echo exit $? $(stty -a | grep -o ' echo ')"
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            terminal.keys("-l", command)
            terminal.keys("Enter")
            terminal.wait_for(r"^progress +step")
            assert terminal.is_alternate
            assert coloured.search(terminal.screen_with_colours)
            if number == signal.SIGINT:
                terminal.keys("C-c")
            else:
                os.kill(terminal.pid_of("watch"), number)
            terminal.wait_for(rf"^exit {code} echo$")
            assert not terminal.is_alternate
        terminal.type([*TRAINKIT, "watch", "mine"])
        terminal.wait_for(r"^progress +step")
        pid = terminal.pid_of("watch")
        terminal.close_window()
    wait_for(lambda: process_stat(pid) is None, 20)


class Slurm:
    """Answers queries and counts them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.is_reachable = True
        self.state = JobState.RUNNING

    def query(self, ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, SlurmJob]:
        self.asked.append(tuple(ids))
        if not self.is_reachable:
            warn("squeue cannot reach Slurm")
            return {}
        return {job_id: SlurmJob(job_id, self.state) for job_id in ids}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return a Slurm that answers at once and may be queried at any time."""
    slurm = Slurm()
    monkeypatch.setattr(jobs_of_runs, "query_jobs_or_warn", slurm.query)
    monkeypatch.setattr(jobs_of_runs, "MIN_QUERY_INTERVAL_S", 0.0)
    return slurm


def begin(read: Callable[[], object], show: Callable[[object], object], interval_s: float) -> Any:
    ended, is_on = threading.Event(), threading.Event()
    is_on.set()
    args = (read, show, interval_s, ended, is_on)
    threading.Thread(target=read_again, args=args, daemon=True).start()
    return ended, is_on


def test_slurm_is_asked_once_for_many_readings_and_an_answer_is_about_all_jobs_of_the_question(slurm):
    poller = SlurmPoller()
    assert poller.jobs([]) == {}
    for ids in (["1", "2"], *[["1"], ["2"], ["1", "2"]] * 33):  # some jobs are from an earlier answer
        assert set(ids) <= set(poller.jobs(ids) or {})
    assert slurm.asked == [("1", "2")]
    assert poller.problem is None
    assert set(poller.jobs(["2", "3"]) or {}) == {"2", "3"}


def test_slurm_is_asked_seldom_while_a_job_runs(slurm, monkeypatch):
    monkeypatch.setattr(jobs_of_runs, "QUERY_INTERVAL_S", 0.0)
    slurm.state = JobState.PENDING
    poller = SlurmPoller()
    wait_for(lambda: poller.jobs(["1"]) and len(slurm.asked) > 3)
    slurm.state = JobState.RUNNING
    wait_for(lambda: (poller.jobs(["1"]) or {})["1"].state is JobState.RUNNING)
    poller._thread.join()  # this query began before the state was known
    count = len(slurm.asked)
    for _ in range(100):
        poller.jobs(["1"])
    assert len(slurm.asked) == count
    monkeypatch.setattr(jobs_of_runs, "RUNNING_QUERY_INTERVAL_S", 0.0)
    wait_for(lambda: poller.jobs(["1"]) and len(slurm.asked) > count)


def test_an_outage_says_since_when_and_ends(slurm, monkeypatch):
    slurm.is_reachable = False
    monkeypatch.setattr(jobs_of_runs, "QUERY_INTERVAL_S", 0.01)
    poller = SlurmPoller()
    assert poller.jobs(["1"]) == {}
    first = poller.problem
    assert first.startswith("Slurm has been unreachable since ")
    assert first.endswith("squeue cannot reach Slurm")
    count = len(slurm.asked)
    wait_for(lambda: poller.jobs(["1"]) or len(slurm.asked) > count + 2)
    assert poller.problem == first
    slurm.is_reachable = True
    wait_for(lambda: poller.jobs(["1"]))
    assert poller.problem is None


def test_errors_of_a_reading_are_its_result():
    results: list[object] = []
    seen = threading.Event()

    def read() -> object:
        if len(results) == 1:
            raise FileNotFoundError(2, "No such file or directory", "metrics.jsonl")
        return "read"

    def show(result: object) -> None:
        results.append(result)
        if len(results) == 3:
            seen.set()

    ended, _ = begin(read, show, 0.01)
    assert seen.wait(20)
    ended.set()
    assert results[0] == results[2] == "read"
    assert isinstance(results[1], FileNotFoundError)


def test_readings_that_take_long_are_seldom():
    """A reading that takes 50 ms is repeated only once a second, even with a shorter interval."""
    times: list[float] = []

    def read() -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.05:
            pass
        times.append(time.monotonic())

    ended, _ = begin(read, lambda result: None, 0.001)
    wait_for(lambda: len(times) == 2)
    ended.set()
    assert times[1] - times[0] >= 1.0


def test_a_paused_reader_reads_nothing():
    count = [0]

    def read() -> None:
        count[0] += 1

    ended, is_on = begin(read, lambda result: None, 0.001)
    wait_for(lambda: count[0] > 2)
    is_on.clear()
    time.sleep(0.1)
    seen = count[0]
    time.sleep(0.1)
    assert count[0] == seen
    is_on.set()
    wait_for(lambda: count[0] > seen)
    ended.set()
