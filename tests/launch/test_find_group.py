"""Tests that RUN on a command line can be a group, or a run of a group."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.groups import make_group
from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.observe.current import look_at
from trainkit.run.end import UNFINISHED_STATES
from trainkit.run.group import RunGroup
from trainkit.run.record import add_slurm_attempt
from trainkit.run.registry import find_run, find_run_or_group, find_to_read, iter_known_runs, register
from trainkit.run.rundir import RunDir, run_lock

POINTS: dict[int, dict[str, Any]] = {index: {"seed": index} for index in (3, 4)}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


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


def test_a_group_is_not_one_run(group):
    with pytest.raises(UsageError) as caught:
        find_run("group")
    said(caught.value.render())


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
