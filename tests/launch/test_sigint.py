"""Ctrl-C while a run is being started."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.runs import start_local
from trainkit.backends import local
from trainkit.bench.run_bench import Bench, BenchLength, BenchRun, run_here
from trainkit.launch.create import defer_sigint
from trainkit.run.end import KILLED, read_end
from trainkit.run.files import write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_when_the_block_is_over() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with defer_sigint():
            interrupt()
            done.append("all of it")
        done.append("what comes after")
    assert done == ["all of it"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_second_one_comes_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():  # noqa: PT012
        interrupt()
        done.append("so far")
        interrupt()
        done.append("not here")
    assert done == ["so far"]


def test_without_one_nothing_is_different() -> None:
    before = signal.getsignal(signal.SIGINT)
    with defer_sigint():
        pass
    with pytest.raises(ValueError, match="no"), defer_sigint():
        raise ValueError("no")
    assert signal.getsignal(signal.SIGINT) is before


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = []
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
        interrupt()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_run_that_was_being_started_is_known_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a bench starts a run arrives when job.json names its supervisor, which is then killed."""
    (tmp_path / "layout").mkdir()
    run = RunDir(tmp_path / "layout")
    write_json(run.job_file, {"backend": "local", "name": "layout", "cwd": str(tmp_path), "attempts": []})
    item = BenchRun("layout", {"layout": "dp=1"}, 1, {}, 1, 1, [])
    bench = Bench(tmp_path, "layouts", "local", "cpu", BenchLength(20, 5), 1, ("layout",), (item,))
    steps = []

    def start(index: int, item: BenchRun) -> RunDir:
        monkeypatch.setattr(local, "module_argv", lambda *args: ["sleep", "600"])
        interrupt()
        steps.append("interrupted")
        start_local(run, "", "{}", "run")
        steps.append("started")
        return run

    with pytest.raises(KeyboardInterrupt):
        run_here(bench, start, lambda item: steps.append("ended by itself"))
    assert steps == ["interrupted", "started"]
    entry = read_job(run).newest
    assert entry.alive() is False
    end = read_end(run.attempt(1))
    assert (end.state, end.reason) == ("cancelled", KILLED)
