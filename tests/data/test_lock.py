"""One process at a time, and clear words where that cannot be had."""

import errno
import fcntl
import multiprocessing
import os

import pytest

from trainkit.data.lock import exclusive
from trainkit.data.prepare import prepare
from trainkit.data.sources import DatasetSpec
from trainkit.data.tokenize import WORK_FOLDER
from trainkit.errors import TrainkitError, UsageError


def _hold(path, held, release):
    with exclusive(path, busy="", wait=False):
        held.set()
        release.wait(30)


@pytest.fixture
def held_lock(tmp_path):
    """A lock that another process holds until the event is set."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    (tmp_path / "out" / WORK_FOLDER).mkdir(parents=True)
    path = tmp_path / "out" / WORK_FOLDER / "lock"
    process = context.Process(target=_hold, args=(path, held, release))
    process.start()
    assert held.wait(30)
    yield path, release
    release.set()
    process.join(30)


def test_waits_and_says_so(held_lock, capsys):
    path, release = held_lock
    release.set()
    with exclusive(path, busy="waiting", wait=True):
        pass
    assert capsys.readouterr().err in ("waiting\n", "")


def test_second_prepare_into_a_folder_is_refused(held_lock, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UsageError, match="another process is preparing"):
        prepare(DatasetSpec((str(tmp_path / "a.txt"),)), tmp_path / "out")


def test_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(TrainkitError, match="has no file locks"), exclusive(tmp_path / "lock", "", wait=True):
        pass
