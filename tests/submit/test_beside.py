"""Work that is done in a process beside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from trainkit.errors import UsageError
from trainkit.submit.beside import TracebackThere, beside


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own threads hold nothing that the work needs."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_its_result_comes_from_another_process(tmp_path: Path) -> None:
    def work() -> dict[str, int]:
        (tmp_path / "made").write_text("there")
        return {"pid": os.getpid()}

    with beside(work) as result:
        pid = result()["pid"]
    assert pid != os.getpid()
    assert _is_gone(pid)
    assert (tmp_path / "made").read_text() == "there"


def test_what_it_raises_is_raised_here() -> None:
    def work() -> None:
        raise UsageError("no space", hint="make some")

    with pytest.raises(UsageError, match="no space") as caught, beside(work) as result:
        result()
    assert caught.value.hint == "make some"
    assert isinstance(caught.value.__cause__, TracebackThere)
    assert "in work" in str(caught.value.__cause__)


def test_an_error_of_the_system_keeps_its_number(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, beside((tmp_path / "none").read_text) as result:
        result()
    assert caught.value.filename == str(tmp_path / "none")


def test_an_end_without_a_word_is_an_error() -> None:
    with (
        pytest.raises(Exception, match="ended with SIGKILL"),
        beside(lambda: os.kill(os.getpid(), signal.SIGKILL)) as result,
    ):
        result()


def test_who_leaves_early_stops_it(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    def leave() -> None:
        with beside(work):
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                time.sleep(0.01)
            raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        leave()
    assert _is_gone(int((tmp_path / "pid").read_text()))
    assert time.monotonic() - began < 300


def test_beside_other_threads_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with beside(os.getpid) as result:
        assert result() == os.getpid()


def test_where_no_process_can_be_had_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with beside(os.getpid) as result:
        assert result() == os.getpid()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_nothing_that_this_process_had_to_do_is_done_twice() -> None:
    """Buffers, what runs at exit and blocks around it are this process's own; Ctrl-C is too."""
    script = """
    import atexit, os, signal, sys, time
    from trainkit.submit.beside import beside
    atexit.register(lambda: print("at exit"))
    print("before")

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        return "done"

    try:
        with beside(work) as result:
            print(result())
    finally:
        print("after")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["before", "done", "after", "at exit"]
    assert done.stderr == ""
