"""Tests folders that another host creates at the same time, on a file system that shows them late."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from trainkit.folders import (
    config_folder,
    ensure_folder,
    shown_path,
    state_folder,
    user_name,
    whole_paths,
    working_in,
)
from trainkit.run.rundir import RunDir


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a client remember every folder as missing, although it exists on the server."""

    def missing(path: Path, **_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "stat", missing)
    monkeypatch.setattr(Path, "is_dir", lambda path: False)


def test_a_folder_that_exists_is_one_whatever_is_remembered_of_it(tmp_path, stale):
    folder = tmp_path / "checkpoints" / "step"
    ensure_folder(folder, parents=True)
    ensure_folder(folder, parents=True)
    with pytest.raises(FileExistsError):
        folder.mkdir(parents=True, exist_ok=True)


def test_what_a_folder_is_made_with(tmp_path):
    with pytest.raises(FileNotFoundError):
        ensure_folder(tmp_path / "a" / "b")
    ensure_folder(tmp_path / "a" / "b", 0o700, parents=True)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        ensure_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        ensure_folder(tmp_path / "file" / "below", parents=True)


@pytest.mark.parametrize("taken", [False, True])
def test_a_user_without_name_and_home(tmp_path, monkeypatch, taken):
    """A container with ``--user 1234`` has such a user."""

    def nobody(*_: object) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert user_name() == str(os.getuid())
    folder = tmp_path / f"trainkit-{os.getuid()}"
    if taken:
        folder.mkdir(0o777)
        folder.chmod(0o777)
        with pytest.raises(PermissionError, match="set HOME"):
            state_folder({})
        return
    assert state_folder({}) == folder / ".local/state/trainkit"
    assert config_folder({}) == folder / ".config/trainkit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_paths_are_shown_from_where_the_command_was_typed(tmp_path, monkeypatch):
    typed_in, submitted_from = tmp_path / "typed", tmp_path / "typed/project"
    submitted_from.mkdir(parents=True)
    monkeypatch.chdir(typed_in)
    run = RunDir("project/runs/a run")
    assert (run.shown, run.quoted) == ("project/runs/a run", "'project/runs/a run'")
    with working_in(submitted_from):
        assert (Path.cwd(), run.shown) == (submitted_from, "project/runs/a run")
        with working_in(tmp_path):
            assert (Path.cwd(), run.shown) == (tmp_path, "project/runs/a run")
        assert (Path.cwd(), run.shown) == (submitted_from, "project/runs/a run")
    assert Path.cwd() == typed_in
    bare = RunDir("7")
    assert (bare.shown, bare.quoted) == ("7", str(typed_in / "7"))  # the path is not taken for job 7
    with whole_paths():  # a job's records are read from any folder
        assert run.shown == str(run.path)
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run.shown == str(run.path)
    monkeypatch.chdir(typed_in)
    assert shown_path(typed_in / "-x") == "./-x"  # the name is not taken for an option
    for path in (typed_in, tmp_path, tmp_path / "typed-2", Path("a")):
        assert shown_path(path) == str(path)
