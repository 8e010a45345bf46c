"""Tests which run or group a RUN on a command line means, and the index of all runs."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.groups import make_group
from tests.support.said import said
from trainkit.capabilities.bench.run_bench import BENCH_FILE
from trainkit.cli.usage import as_typed
from trainkit.errors import UsageError
from trainkit.observe.current import look_at, read_all
from trainkit.run import registry
from trainkit.run.end import UNFINISHED_STATES
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.group import RunGroup
from trainkit.run.record import add_slurm_attempt
from trainkit.run.registry import (
    Start,
    find_run,
    find_run_or_group,
    find_to_read,
    index_file,
    iter_known_runs,
    record_over,
    register,
)
from trainkit.run.rundir import RunDir, run_lock


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def make_run(path, name):
    run = RunDir(path)
    run.attempts_dir.mkdir(parents=True)
    run.config_file.write_text("{}")
    write_json(run.job_file, {"name": name, "attempts": [{"attempt": 1, "job_id": f"local-{name}"}]})
    return run


def known_runs():
    return [known.name for known in iter_known_runs()]


def test_newest_start_first_and_each_run_once(tmp_path):
    runs = [make_run(tmp_path / name, name) for name in ("a", "b")]
    for run in (*runs, runs[0]):
        register(run, run.name)
    assert known_runs() == ["a", "b"]
    assert find_run("last").path == runs[0].path


def test_runs_below_here_need_no_index(tmp_path):
    run = make_run(tmp_path / "here/runs/small", "small")
    for text in ("small", "local-small", "last", str(run.path)):
        assert find_run(text).path == run.path
    assert not index_file().exists()
    with pytest.raises(UsageError, match="unknown run 'smal'") as caught:
        find_run("smal")
    said(caught.value.hint)


def test_what_is_a_run(tmp_path):
    register(RunDir(tmp_path / "gone"), "gone")
    assert known_runs() == []
    with pytest.raises(UsageError, match="does not contain a run"):
        find_run(str(tmp_path))
    (tmp_path / "here/runs/half").mkdir(parents=True)
    with pytest.raises(UsageError, match="runs/half does not contain a run: the command that made"):
        find_run("half")
    run = make_run(tmp_path / "x", "x")
    (run.path / BENCH_FILE).write_text('{"speed": 1}')
    assert find_run(str(run.path)).path == run.path


def test_a_job_id_that_two_clusters_have(tmp_path, monkeypatch):
    (tmp_path / "slurm.conf").write_text("ClusterName=west\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    group = make_group(tmp_path, {3: {"seed": 1}, 4: {"seed": 2}}, cluster="my_east")
    register(RunDir(group.path), "group")
    runs = [make_run(tmp_path / name, name) for name in ("old", "new")]
    attempts = [{"attempt": 1, "job_id": job_id, "cluster": "west"} for job_id in ("12", "12_3")]
    for run in runs:
        write_json(run.job_file, {"attempts": attempts, "follow_ups": ["12_4"]})
        register(run, run.name)
    for text, there in (("12", group.path), ("12_3", group.run(3).path), ("12_4", group.run(4).path)):
        assert find_run_or_group(text).path == runs[1].path
        with pytest.raises(UsageError, match=f"2 runs are called {text}: ") as caught:
            find_run_or_group(text, to_change=True)
        # The older run's job was on the same cluster, whose job ids have started again from 1.
        assert caught.value.message.endswith(f": {runs[1].path}, {group.path}")
        assert find_run_or_group(f"{text};west", to_change=True).path == runs[1].path
        assert find_run_or_group(f"{text};my_east", to_change=True).path == there
        with pytest.raises(UsageError, match="unknown run '12"):
            find_run_or_group(f"{text};south")


def test_folder_name_before_config_name(tmp_path):
    first = make_run(tmp_path / "one/exp", "exp")
    other = make_run(tmp_path / "two", "exp")
    for run in (first, other):
        register(run, "exp")
    assert find_run("exp").path == first.path
    assert find_run(str(other.path)).path == other.path


def test_a_folder_of_somebody_else_hides_no_other_run(tmp_path, monkeypatch):
    """trainkit creates run folders that only their owner can enter."""
    mine, theirs = (make_run(tmp_path / "here/runs" / name, name) for name in ("mine", "theirs"))
    for run in (mine, theirs):
        register(run, run.name)
    is_file = Path.is_file

    def refused(path):
        if path.parent == theirs.path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert known_runs() == ["mine"]
    assert find_run("last").path == mine.path
    with pytest.raises(UsageError, match="theirs cannot be read: Permission denied"):
        find_run(str(theirs.path))


@pytest.fixture
def read_folders(monkeypatch):
    """Return a list of the names of the folders that are read, one item per read."""
    read, read_one = [], registry.Start.read
    monkeypatch.setattr(
        registry.Start, "read", lambda start: read.append(start.folder.name) or read_one(start)
    )
    return read


def add_to_index(run, time):
    index_file().parent.mkdir(parents=True, exist_ok=True)
    append_jsonl(index_file(), {"time": f"2026-01-01T00:00:{time}Z", "name": run.name, "path": str(run.path)})


def make_many(folder, count=30):
    runs = [make_run(folder / f"run-{number}", f"run-{number}") for number in range(count)]
    for number, run in enumerate(runs):
        add_to_index(run, f"{number:02}.000")
    return runs


@pytest.mark.parametrize(
    ("text", "expected"),
    [("last", ["run-29"]), ("run-3", ["run-3"]), ("local-run-27", ["run-29", "run-28", "run-27"])],
)
@pytest.mark.parametrize("place", ["elsewhere", "here/runs"])
def test_only_folders_that_may_be_meant_are_read(tmp_path, read_folders, text, expected, place):
    make_many(tmp_path / place)
    assert find_run(text).name == expected[-1]
    assert read_folders == expected


def test_status_reads_no_run_again_that_was_over(tmp_path, read_folders):
    def statuses_of(max_ended):
        return read_all(max_ended, lambda ids: None, {}, pytest.fail)

    runs = make_many(tmp_path / "elsewhere")
    for run in runs:
        run.attempt(1).create()
        if run is not runs[1]:
            write_json(run.attempt(1).end_file, {"state": "finished", "action": "finished"})
    for _ in range(2):
        statuses, num_hidden = statuses_of(15)
        names = [status.name for status in statuses]
        assert names == [*(f"run-{number}" for number in range(29, 14, -1)), "run-1"]
        assert num_hidden == 14
    assert len(read_folders) == 30 + 16
    # One run that was over starts again, and the end of another run was found too late.
    (runs[5].attempt(1).end_file).unlink()
    add_to_index(runs[5], "00.500")
    record_over([Start(runs[5].path, "run-5", "2026-01-01T00:00:05.000Z")])
    assert [status.name for status in statuses_of(15)[0]][-2:] == ["run-1", "run-5"]
    assert next(status.name for status in statuses_of(None)[0]) == "run-29"
    assert len(statuses_of(None)[0]) == len(list(iter_known_runs())) == 30


def test_an_index_that_cannot_be_read_hides_no_run_in_runs(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "here/runs/x", "x")
    of_root = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(registry, "read_jsonl", of_root)
    assert known_runs() == ["x"]
    assert f"cannot read {index_file()} (Permission denied)" in capsys.readouterr().err


def test_an_index_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch, capsys):
    [run] = make_many(tmp_path / "elsewhere", 1)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "append_jsonl", Mock(side_effect=OSError(errno.EROFS, "Read-only", "x")))
        record_over([Start(run.path, "run-0", "2026-01-01T00:00:00.000Z")])
        assert known_runs() == ["run-0"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    register(RunDir(tmp_path), "x")
    assert "cannot write" in capsys.readouterr().err


def test_a_run_behind_a_symlink_is_one_run(tmp_path):
    run = make_run(tmp_path / "disk/runs/x", "x")
    (tmp_path / "here/runs").symlink_to(tmp_path / "disk/runs")
    register(RunDir(tmp_path / "here/runs/x"), "x")
    register(run, "x")
    (tmp_path / "disk/runs/y").symlink_to("x")
    assert known_runs() == ["x"]


def test_a_command_that_acts_takes_no_name_of_another_folder(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "there/runs/exp", "exp")
    register(run, "exp")
    for text in ("exp", "last"):
        assert find_run(text).path == run.path
        said(capsys.readouterr().err)
        with pytest.raises(UsageError, match=f"is not a run of this folder: it is {run.path}") as caught:
            find_run(text, acts=True)
        said(caught.value.hint)
        for words in (["cancel", text, "--now"], [text, "--note", text, text, "--", text]):
            said(as_typed(caught.value, words).hint)
    for text in (str(run.path), "local-exp"):
        assert find_run(text, acts=True).path == run.path
    with pytest.raises(UsageError, match="unknown run 'exq'"):
        find_run("exq", acts=True)
    # The newest run belongs to another folder, and a run that was submitted from here may be anywhere.
    mine = make_run(tmp_path / "out/mine", "mine")
    write_json(mine.job_file, {"name": "mine", "cwd": str(tmp_path / "here"), "attempts": []})
    register(mine, "mine")
    register(run, "exp")
    assert (find_run("last").path, find_run("last", acts=True).path) == (run.path, mine.path)
    assert find_run("mine", acts=True).path == mine.path
    monkeypatch.chdir(tmp_path / "there")
    capsys.readouterr()
    assert find_run("exp", acts=True).path == find_run("last", acts=True).path == run.path
    assert find_run("exp").path == find_run("last").path == run.path
    assert capsys.readouterr().err == ""


POINTS: dict[int, dict[str, Any]] = {index: {"seed": index} for index in (3, 4)}


@pytest.fixture
def group(tmp_path: Path) -> RunGroup:
    made = make_group(tmp_path, POINTS)
    register(RunDir(made.path), "group")
    return made


def test_a_group_by_folder_name_job_id_and_last(group):
    for text in (str(group.path), "group", "12", "last"):
        found = find_run_or_group(text)
        assert isinstance(found, RunGroup)
        assert found.path == group.path


def test_a_run_of_a_group_is_made_when_it_is_named(group):
    assert not group.run(4).exists()
    for text in ("12_4", "group/4", str(group.path / "4")):
        run = find_run(text)
        assert run.path == group.run(4).path
        assert run.exists()
    assert not group.run(3).exists()


def test_who_only_reads_makes_no_folder(group, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # Slurm is not asked
    for text in ("12_4", "group/4", str(group.path / "4")):
        assert find_to_read(text).path == group.run(4).path
        status = look_at(group.run(4), print)[1]
        assert (status.name, status.attempt, status.job_id) == ("small/4", 1, "12_4")
        assert status.state in UNFINISHED_STATES or status.state == "unknown"
        assert status.place.num_nodes == 1
    assert not group.run(4).path.exists()
    for text in ("12_5", "group/5", str(group.path / "5"), "group/04"):
        with pytest.raises(UsageError, match=r"has no trial 5|does not contain a run"):
            find_to_read(text)


@pytest.mark.parametrize(
    "text", ["13", "13_4", "grup/4", "group/x", "group/04", "./group/4", "12_5", "group/5"]
)
def test_nothing_of_that_name(group, text):
    with pytest.raises(UsageError) as caught:
        find_run(text)
    said(caught.value.message)


def test_a_group_is_one_entry_of_the_list(group, tmp_path, monkeypatch):
    find_run("12_3")
    assert [known.path.name for known in iter_known_runs() if isinstance(known, RunGroup)] == ["group"]
    (tmp_path / "runs").mkdir()
    group.path.rename(tmp_path / "runs/moved")
    monkeypatch.chdir(tmp_path)
    assert [known.path.name for known in iter_known_runs() if isinstance(known, RunGroup)] == ["moved"]


def test_a_point_that_was_started_again_is_known_by_its_new_job(group, capsys):
    run = find_run("12_4")
    with run_lock(run):
        add_slurm_attempt(run, 2, "99", "requeue", "sbatch")
    register(run, "group/4")
    for text in ("99", "12_4"):
        assert find_run(text).path == run.path
    assert isinstance(find_run_or_group("12"), RunGroup)
    assert find_run("last").path == run.path
    assert capsys.readouterr().err == ""
