import errno
import json
from pathlib import Path

import pytest

from trainkit.control.run_registry import find_run, index_file, known_runs, register
from trainkit.errors import UsageError
from trainkit.rundir import RunDir


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def make_run(path, name):
    run = RunDir(path)
    run.attempts_dir.mkdir(parents=True)
    run.config_file.write_text("{}")
    run.job_file.write_text(
        json.dumps({"name": name, "attempts": [{"attempt": 1, "job_id": f"local-{name}"}]})
    )
    return run


def test_newest_start_first_and_each_run_once(tmp_path):
    runs = [make_run(tmp_path / name, name) for name in ("a", "b")]
    for run in (*runs, runs[0]):
        register(run, run.name)
    assert [known.name for known in known_runs()] == ["a", "b"]
    assert find_run("last").path == runs[0].path


def test_runs_below_here_need_no_index(tmp_path):
    run = make_run(tmp_path / "here/runs/x", "x")
    assert find_run("x").path == run.path
    assert find_run("local-x").path == run.path
    assert not index_file().exists()


def test_folder_that_is_gone_is_forgotten(tmp_path):
    register(RunDir(tmp_path / "gone"), "gone")
    assert known_runs() == []


def test_folder_name_before_config_name(tmp_path):
    first = make_run(tmp_path / "one/exp", "exp")
    other = make_run(tmp_path / "two", "exp")
    for run in (first, other):
        register(run, "exp")
    assert find_run("exp").path == first.path
    assert find_run(str(other.path)).path == other.path


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("exq", "did you mean 'exp'?"),
        ("lst", "did you mean 'last'?"),
        ("zzz", "`trainkit status` lists the runs"),
    ],
)
def test_closest_match(tmp_path, text, hint):
    register(make_run(tmp_path / "exp", "exp"), "exp")
    with pytest.raises(UsageError) as raised:
        find_run(text)
    assert raised.value.hint == hint


def test_folder_without_a_run(tmp_path):
    with pytest.raises(UsageError, match="does not contain a run"):
        find_run(str(tmp_path))


def test_state_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    register(RunDir(tmp_path), "x")
    assert "cannot write" in capsys.readouterr().err


def test_a_folder_of_somebody_else_hides_no_other_run(tmp_path, monkeypatch):
    """trainkit makes run folders that only their owner can enter."""
    mine, theirs = (make_run(tmp_path / "here/runs" / name, name) for name in ("mine", "theirs"))
    for run in (mine, theirs):
        register(run, run.name)
    is_file = Path.is_file

    def refused(path):
        if path.parent == theirs.path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert [known.name for known in known_runs()] == ["mine"]
    assert find_run("last").path == mine.path
    with pytest.raises(UsageError, match="theirs cannot be read: Permission denied"):
        find_run(str(theirs.path))
