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
from typing import Any

import pytest

from trainkit.errors import TrainkitError, UsageError
from trainkit.submit.beside import TracebackThere, beside


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own threads hold nothing that the work needs."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _num_files_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_its_result_comes_from_another_process(tmp_path: Path) -> None:
    def work() -> dict[str, int]:
        (tmp_path / "made").write_text("there")
        return {"pid": os.getpid(), "group": os.getpgid(0)}

    before = _num_files_open()
    with beside("counting", work) as result:
        there = result()
    assert there["pid"] != os.getpid()
    assert there["group"] == there["pid"], "Ctrl-C of the terminal would end it"
    assert _is_gone(there["pid"])
    assert (tmp_path / "made").read_text() == "there"
    assert _num_files_open() == before


def test_a_result_may_be_larger_than_a_pipe() -> None:
    with beside("counting", lambda: "x" * 3_000_000) as result:
        assert len(result()) == 3_000_000


def test_what_it_raises_is_raised_here() -> None:
    def work() -> None:
        raise UsageError("no space", hint="make some")

    with pytest.raises(UsageError, match="no space") as caught, beside("counting", work) as result:
        result()
    assert caught.value.hint == "make some"
    assert isinstance(caught.value.__cause__, TracebackThere)
    assert "in work" in str(caught.value.__cause__)


def test_an_error_of_the_system_keeps_its_number(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError) as caught,
        beside("reading", (tmp_path / "none").read_text) as result,
    ):
        result()
    assert caught.value.filename == str(tmp_path / "none")


class Particular(Exception):
    """One that is not made of its message alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_an_error_that_cannot_be_made_again_keeps_its_words() -> None:
    def work() -> None:
        raise Particular("one", "two")

    with pytest.raises(TrainkitError, match="Particular: one and two"), beside("counting", work) as result:
        result()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGRTMIN])
def test_an_end_without_a_word_is_an_error(number: int) -> None:
    def work() -> None:
        os.kill(os.getpid(), number)

    with pytest.raises(TrainkitError, match="was counting ended before"), beside("counting", work) as result:
        result()


def test_who_leaves_early_ends_it_and_what_it_started(tmp_path: Path) -> None:
    def work() -> None:
        started = subprocess.Popen(["sleep", "600"])
        (tmp_path / "new").write_text(f"{os.getpid()} {started.pid}")
        (tmp_path / "new").rename(tmp_path / "pids")
        started.wait()

    def leave() -> None:
        with beside("waiting", work):
            while not (tmp_path / "pids").exists():
                time.sleep(0.01)
            raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        leave()
    own, started = map(int, (tmp_path / "pids").read_text().split())
    assert _is_gone(own)
    while not _is_gone(started) and "Z" not in Path(f"/proc/{started}/stat").read_text().split():
        assert time.monotonic() - began < 300
        time.sleep(0.01)


def test_ctrl_c_in_the_middle_of_the_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real_fork, made = os.fork, []

    def fork() -> int:
        pid = real_fork()
        if pid:
            made.append(pid)
            # To this thread: of the process's others, which it has in truth, one would take it at once.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", fork)
    before, body = _num_files_open(), []
    with pytest.raises(KeyboardInterrupt), beside("waiting", lambda: time.sleep(600)):
        body.append("was reached")
    assert body == []
    assert _is_gone(made[0])
    assert _num_files_open() == before


def test_where_nobody_waits_for_children_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some daemons start programs
    try:
        with beside("counting", lambda: 7) as result:
            assert result() == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_beside_other_threads_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with beside("counting", os.getpid) as result:
        assert result() == os.getpid()


def test_where_no_process_can_be_had_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = _num_files_open()
    for name in ("fork", "pipe"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with beside("counting", os.getpid) as result:
                assert result() == os.getpid()
    assert _num_files_open() == before


def test_nothing_that_this_process_had_to_do_is_done_twice() -> None:
    """Buffers, what runs at exit and blocks around it are this process's own."""
    script = """
    import atexit
    from trainkit.submit.beside import beside
    atexit.register(lambda: print("at exit"))
    print("before")
    try:
        with beside("counting", lambda: "done") as result:
            print(result())
    finally:
        print("after")
    """
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["before", "done", "after", "at exit"]
    assert done.stderr == ""
