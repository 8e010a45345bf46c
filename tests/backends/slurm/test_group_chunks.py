"""Tests which arrays a group is submitted as, whatever Slurm accepts and wherever the submission dies."""

import contextlib
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.groups import make_group
from tests.support.said import said
from trainkit.backends.slurm import group_chunks
from trainkit.backends.slurm.group_chunks import next_chunk, recover_chunks, submit_chunks
from trainkit.errors import TrainkitError, UsageError
from trainkit.locks import file_lock
from trainkit.run.files import read_json, write_json
from trainkit.run.group import Chunk, RunGroup, create_task_run
from trainkit.scheduler import array_indices
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable

NO_ROOM = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed"


class Died(BaseException):
    """Raised in place of a kill of the submitting process."""


class Slurm:
    """A Slurm with room for some jobs, with the answers that `group_chunks` needs."""

    def __init__(self, max_array_size: int, room: int, death: random.Random | None = None) -> None:
        self.config = {"MaxArraySize": str(max_array_size)}
        self.room = room
        self.jobs: dict[str, str] = {}
        """Maps the job id of an array to its submission token."""
        self.tasks: Counter[int] = Counter()
        """Counts how often the job of each trial was accepted."""
        self._death = death

    def submit(self, script: Path, *, token: str, extra_argv: Sequence[str], **more: Any) -> str:
        options = dict(option.removeprefix("--").split("=", 1) for option in extra_argv)
        whole = re.search("#SBATCH --array=(.*)", script.read_text())
        tasks = array_indices(options.get("array") or (whole and whole[1]) or "")
        assert tasks[-1] < int(self.config["MaxArraySize"])
        self._maybe_die()
        if len(tasks) > self.room:
            raise SlurmRefused("no room", stderr=NO_ROOM)
        self.room -= len(tasks)
        offset = int(script.read_text().partition("${SLURM_ARRAY_TASK_ID:?} + ")[2].partition(")")[0] or 0)
        self.tasks.update(task + offset for task in tasks)
        job_id = str(100 + len(self.jobs))
        self.jobs[job_id] = token
        self._maybe_die()
        return job_id

    def find(self, token: str, **more: Any) -> str | None:
        return next((job_id for job_id, known in self.jobs.items() if known == token), None)

    def _maybe_die(self) -> None:
        if self._death is not None and self._death.random() < 0.3:
            raise Died


@pytest.fixture
def connect(monkeypatch):
    def connected(slurm: Slurm) -> Slurm:
        monkeypatch.setattr(group_chunks, "submit_script", slurm.submit)
        monkeypatch.setattr(group_chunks, "find_by_token", slurm.find)
        monkeypatch.setattr(group_chunks, "show_config", lambda cluster: slurm.config)
        return slurm

    return connected


def group_of(folder: Path, count: int, **record: Any) -> RunGroup:
    trials = {index: {"seed": index} for index in range(count)}
    return make_group(folder, trials, job_id=None, command=("true",), **record)


def test_the_next_array():
    assert next_chunk((0, 1, 2, 3), 9, 9) == (0, [0, 1, 2, 3])
    assert next_chunk((0, 1, 2, 3), 3, 9) == (0, [0, 1, 2])
    assert next_chunk((7, 8, 9), 9, 9) == (0, [7, 8])
    assert next_chunk((9, 10, 11), 9, 9) == (9, [9, 10, 11])
    assert next_chunk((9, 17, 18), 9, 9) == (9, [9, 17])
    assert next_chunk((500,), 1, 9) == (500, [500])


def test_a_look_at_a_group_writes_nothing(tmp_path, connect):
    slurm, group = connect(Slurm(1001, 0)), group_of(tmp_path, 5)
    before = group.sweep_file.stat()
    recover_chunks(group)
    with pytest.raises(SlurmRefused):
        submit_chunks(group, print)
    slurm.room = 10_000
    assert group.unsubmitted == [*range(5)]
    assert submit_chunks(RunGroup(group.path), print) == 5
    submitted = group.sweep_file.stat()
    for seen in (group, RunGroup(group.path)):  # the first one reads what another process has submitted
        recover_chunks(seen)
        assert (submit_chunks(seen, print), seen.unsubmitted) == (0, [])
    assert (len(slurm.jobs), group.task_id(4)) == (1, "100_4")
    assert before.st_mtime_ns < submitted.st_mtime_ns == group.sweep_file.stat().st_mtime_ns


def test_an_array_that_cannot_be_recorded_is_named_by_its_id(tmp_path, connect, monkeypatch):
    connect(Slurm(1001, 10_000))
    monkeypatch.setattr(group_chunks, "submit_script", lambda *args, **more: "123;east")
    monkeypatch.setattr(group_chunks, "_note_job", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SlurmUnreachable, match=r"^123 was submitted, but"):
        submit_chunks(group_of(tmp_path, 5), print)


def test_the_run_of_a_point_in_a_later_array(tmp_path, connect):
    connect(Slurm(4, 5))
    group = group_of(tmp_path, 7)
    assert submit_chunks(group, print) == 5
    assert (group.task_id(3), group.task_id(4), group.task_id(5)) == ("100_3", "101_0", None)
    run = create_task_run(group.run(4))
    assert run.script_file.read_text() == (group.path / "submit-4.sbatch").read_text()
    assert run.attempt(1).supervisor_log.readlink().name == "4+0.log"
    with pytest.raises(UsageError, match="is not submitted yet: Slurm currently accepts no more jobs"):
        create_task_run(group.run(5))


def test_a_refusal_of_another_kind(tmp_path, connect, monkeypatch):
    slurm, group, notices = connect(Slurm(2, 9)), group_of(tmp_path, 4), []
    refuse = Mock(side_effect=SlurmRefused("Invalid qos", stderr="sbatch: error: Invalid qos specification"))
    monkeypatch.setattr(group_chunks, "submit_script", refuse)
    with pytest.raises(SlurmRefused):
        submit_chunks(group, notices.append)
    assert group.record.parts == []
    connect(slurm).room = 1
    assert submit_chunks(group, notices.append) == 1
    monkeypatch.setattr(group_chunks, "submit_script", refuse)
    assert submit_chunks(group, notices.append) == 0
    [notice] = notices
    said(notice)


def test_a_cancelled_group_is_left_alone(tmp_path, connect):
    slurm, group = connect(Slurm(1001, 2)), group_of(tmp_path, 4)
    submit_chunks(group, print)
    group.update(cancelled_at="2026-01-01T00:00:00Z")
    slurm.room = 9
    assert (submit_chunks(RunGroup(group.path), print), sum(slurm.tasks.values())) == (0, 2)


def test_a_job_that_ends_waits_until_others_that_end_have_made_room(tmp_path, connect, monkeypatch):
    slurm, group, slept_s = connect(Slurm(1001, 2)), group_of(tmp_path, 6), []

    def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        slurm.room = len(slept_s) // 2

    assert submit_chunks(group, print) == 2
    monkeypatch.setattr(group_chunks.time, "sleep", sleep)
    assert submit_chunks(group, print, size=1) == 0
    assert slept_s == []
    assert submit_chunks(group, print, size=1, patience_s=20) == 1
    assert len(slept_s) == 2


def test_what_another_process_submits_is_not_looked_up(tmp_path, connect):
    slurm, group = connect(Slurm(3, 3)), group_of(tmp_path, 6)
    assert submit_chunks(group, print) == 3
    group.update(parts=[*group.parts, Chunk(5, 3)])  # the script of this array is not written yet
    with file_lock(group.path / group_chunks.LOCK):
        recover_chunks(group)
        assert group.parts[-1] == Chunk(5, 3)
    recover_chunks(group)
    assert (group.unsubmitted, slurm.tasks) == ([3, 4, 5], Counter(range(3)))


@pytest.mark.parametrize("seed", range(10))
def test_each_point_once_wherever_the_process_dies(tmp_path, connect, seed):
    chance = random.Random(seed)
    slurm = connect(Slurm(chance.randint(2, 8), chance.randint(1, 4), chance))
    path = group_of(tmp_path, count := chance.randint(1, 12)).path
    for _ in range(500):
        with contextlib.suppress(Died, TrainkitError):
            submit_chunks(RunGroup(path), print, size=chance.choice([None, 1]))
        if not RunGroup(path).unsubmitted and RunGroup(path).parts[-1].job_id is not None:
            break
        slurm.room = max(slurm.room, chance.randint(0, 4))
    assert slurm.tasks == Counter(range(count))
    group = RunGroup(path)
    recover_chunks(group)
    assert all(group.task_id(index) is not None for index in range(count))


def test_it_waits_for_the_array_before_if_so_many_may_run(tmp_path, connect, monkeypatch):
    slurm, given = connect(Slurm(3, 99)), []
    group = group_of(tmp_path, 7, array="0-6%2")

    def submit(script, *, extra_argv, **more):
        given.append(list(extra_argv))
        return slurm.submit(script, extra_argv=extra_argv, **more)

    monkeypatch.setattr(group_chunks, "submit_script", submit)
    assert submit_chunks(group, print) == 7
    assert [options[0] for options in given] == ["--array=0-2%2", "--array=0-2%2", "--array=0%2"]
    assert [options[-1] for options in given[1:]] == [f"--dependency=afterany:{job}" for job in (100, 101)]
    assert group.parts == [Chunk(2, 0, "100"), Chunk(5, 3, "101"), Chunk(6, 6, "102")]


@pytest.mark.parametrize("parts", [[3, {"last": "x"}, {"last": 1, "job_id": 7}], {"last": 3}, None])
def test_damaged_parts_are_read_as_unknown(tmp_path, parts):
    group = group_of(tmp_path, 3)
    content = read_json(group.sweep_file) | {"parts": parts, "job_id": "12"}
    write_json(group.sweep_file, content)
    again = RunGroup(group.path)
    assert {again.task_id(index) for index in range(3)} <= {None, "12_0", "12_1", "12_2"}
    assert set(again.unsubmitted) <= {0, 1, 2}
