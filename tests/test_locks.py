"""Tests the wait for a lock: its holder, its duration, and the effect of a signal."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from trainkit import locks
from trainkit.capabilities.texts.prepare import exclusive
from trainkit.errors import UsageError
from trainkit.locks import (
    LockBusy,
    LockStopped,
    acquire_lock,
    describe_holder,
    file_lock,
    is_locked,
    release_lock,
    unsupported,
)
from trainkit.run.rundir import RunDir, run_lock

HOLD = (
    "import sys, time; from pathlib import Path; from trainkit.locks import file_lock\n"
    "with file_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)
WAIT = (
    "import sys; from pathlib import Path; from trainkit.locks import acquire_lock\n"
    "print('waits', flush=True); acquire_lock(Path(sys.argv[1]))"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that holds the lock ``lock``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        yield child
        child.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "NOTICE_S", 0.1)
    monkeypatch.setattr(locks, "STOP_S", 0.1)


def test_who_asks_whether_a_lock_is_held_does_not_hold_it(tmp_path, holder):
    assert is_locked(tmp_path / "lock")
    assert not is_locked(tmp_path / "missing")
    with (tmp_path / "free").open("w") as another_asks:
        fcntl.flock(another_asks, fcntl.LOCK_SH)
        assert not is_locked(tmp_path / "free")


def test_the_holder_is_named(tmp_path, holder, quick, capsys):
    with pytest.raises(
        LockBusy, match=f"lock is held by process {holder.pid} on {os.uname().nodename} since"
    ):
        acquire_lock(tmp_path / "lock", 0.3)
    [line] = capsys.readouterr().err.splitlines()
    assert f" {tmp_path / 'lock'}, " in line


def test_a_short_wait_is_not_worth_a_line(tmp_path, capsys):
    with file_lock(tmp_path / "lock"), pytest.raises(LockBusy):
        acquire_lock(tmp_path / "lock", 0.2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", [b"", b"\xff", b"7", b'{"pid": 1}'])
def test_an_unknown_holder(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    said(describe_holder(tmp_path / "lock"))


def test_a_blocked_stop_signal_ends_the_wait_and_stays_pending(tmp_path, quick):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with file_lock(tmp_path / "lock"):
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(LockStopped):
                acquire_lock(tmp_path / "lock")
        assert signal.sigtimedwait({signal.SIGTERM}, 0) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_ctrl_c_ends_the_wait(tmp_path):
    with file_lock(tmp_path / "lock"):
        argv = [sys.executable, "-c", WAIT, str(tmp_path / "lock")]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.readline()
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors


def test_a_lock_file_that_a_person_removed_is_free(tmp_path, holder):
    (tmp_path / "lock").unlink()
    with file_lock(tmp_path / "lock", 5.0), pytest.raises(LockBusy):
        acquire_lock(tmp_path / "lock", 0.0)


def test_a_lock_that_becomes_free_is_taken(tmp_path, holder):
    holder.kill()
    started_s = time.monotonic()
    with file_lock(tmp_path / "lock"):
        assert time.monotonic() - started_s < 5.0


def test_a_disk_that_is_full_does_not_prevent_a_lock(tmp_path, monkeypatch):
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(locks.os, "pwrite", full)
    with file_lock(tmp_path / "lock"):
        said(describe_holder(tmp_path / "lock"))


FORK = """
import os, sys, time
from pathlib import Path
from trainkit.locks import file_lock
with file_lock(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
        os.kill(os.getpid(), 9)
    time.sleep(60)
"""


def test_a_fork_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    """A data worker, for example, outlives its killed rank."""
    with subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path / "lock")], stdout=subprocess.PIPE
    ) as child:
        fork = int(child.stdout.readline())
        try:
            assert child.wait() == -signal.SIGKILL
            os.kill(fork, 0)
            release_lock(acquire_lock(tmp_path / "lock", 5.0))
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_fork_that_leaves_the_block_does_not_release_the_lock(tmp_path):
    lock = tmp_path / "lock"
    descriptor = acquire_lock(lock)
    try:
        if (fork := os.fork()) == 0:
            release_lock(descriptor)
            os._exit(0)
        assert os.waitpid(fork, 0)[1] == 0
        held = run_program(sys.executable, "-c", TRY, str(lock))
    finally:
        release_lock(descriptor)
    assert held.stdout == "busy\n", held.stderr


TRY = """
import sys
from pathlib import Path
from trainkit.locks import LockBusy, acquire_lock
try:
    acquire_lock(Path(sys.argv[1]), 0.0)
except LockBusy:
    print("busy")
"""


def test_a_file_system_without_locks_is_recognized(tmp_path, monkeypatch):
    assert unsupported(tmp_path) is None
    assert unsupported(tmp_path / "missing") is None

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert unsupported(tmp_path) == "No locks available"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe"])
def test_what_another_user_has_put_in_its_place(tmp_path, kind):
    run = RunDir(tmp_path)
    victim, lock = tmp_path / "thesis.tex", run.lock_file
    victim.write_text("chapter one")
    {"symlink": lock.symlink_to, "hard link": lock.hardlink_to, "pipe": lambda _: os.mkfifo(lock)}[kind](
        victim
    )
    with pytest.raises(OSError, match="a lock must be a regular file") as caught:
        acquire_lock(lock, 0.0)
    assert caught.value.filename == str(lock)
    for hold in (exclusive(lock), run_lock(run)):
        with (
            pytest.raises(UsageError, match="cannot be locked: a lock must be a regular file") as refused,
            hold,
        ):
            pass
        said(refused.value.hint)
    assert victim.read_text() == "chapter one"


def test_a_file_that_is_no_lock_keeps_its_content(tmp_path):
    file = tmp_path / "lock"
    file.write_text("chapter one")
    with file_lock(file):
        assert "another process" in describe_holder(file)
    assert file.read_text() == "chapter one"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_the_lock_of_a_colleague(tmp_path):
    """A released lock is no obstacle, although only its owner may write to the file."""
    tmp_path.chmod(0o755)
    with file_lock(tmp_path / "lock", mode=0o644):
        before = (tmp_path / "lock").read_text()
    imports, then = HOLD.replace("time.sleep(60)", "pass").splitlines()
    script = f"{imports}; import os; os.setuid(65534)\n{then}"
    argv = [sys.executable, "-c", script, "lock"]
    done = run_program(*argv, cwd=tmp_path)
    assert done.stdout == "held\n", done.stderr
    assert (tmp_path / "lock").read_text() == before
