"""Tests that failed hosts are excluded for 24 hours, unless a job could then no longer start."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from tests.support.said import said
from trainkit.backends.slurm import resubmit
from trainkit.backends.slurm.resubmit import exclude_from
from trainkit.cluster.bad_nodes import Kind, excluded, memory_file, note_failure
from trainkit.plan.launch import SlurmRequest, with_excluded
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
REQUEST = SlurmRequest({"job-name": "me", "nodes": 2, "exclude": "h[8-9]", "comment": "x", "dependency": "y"})


class Memory:
    def __init__(self, folder: Path) -> None:
        self.environ = {"XDG_STATE_HOME": str(folder)}
        self.file = memory_file("west", self.environ)

    def note(self, host: str, kind: Kind, hours: float = 0, **more: Any) -> None:
        given = {"run": "/runs/small", "attempt": 1, "now": NOON + timedelta(hours=hours), **more}
        note_failure("west", host, kind, f"{host} {kind}", environ=self.environ, **given)

    def excluded(self, hours: float = 0) -> list[str]:
        return list(excluded("West", NOON + timedelta(hours=hours), self.environ))


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "state")


def test_hosts_that_died_or_failed_a_check_are_left_out_for_a_day(memory):
    assert memory.excluded() == []
    assert not memory.file.parent.exists()
    memory.note("h1", "died")
    memory.note("h2", "preflight", hours=2)
    assert memory.excluded(3) == ["h2", "h1"]
    assert memory.excluded(23.9) == ["h2", "h1"]
    assert memory.excluded(24) == ["h2"]
    assert memory.excluded(26) == []
    assert list(excluded("east", NOON, memory.environ)) == []
    memory.note("h3", "died", hours=27)
    assert [note["host"] for note in json.loads(memory.file.read_text())["notes"]] == ["h3"]
    memory.file.unlink()
    assert memory.excluded(27) == []


def test_one_failure_that_began_on_a_host_is_nothing(memory):
    memory.note("h1", "culprit")
    memory.note("h1", "culprit")  # the same failure is recorded twice
    memory.note("h1", "culprit", run="/runs/other", attempt=5)
    assert memory.excluded(1) == []
    memory.note("h1", "culprit", attempt=2)
    [(host, reason)] = excluded("west", NOON, memory.environ).items()
    assert host == "h1"
    said(reason.replace(f"{NOON.astimezone():%Y-%m-%d %H:%M}", "NOON"))


def test_a_host_on_which_a_start_failed_is_left_out_by_its_own_run_at_once(memory):
    memory.note("h1", "start")
    memory.note("h1", "start")  # the same attempt failed again on the host
    memory.note("h2", "start", run="/runs/other")
    assert memory.excluded() == []
    assert list(excluded("west", NOON, memory.environ, run="/runs/small")) == ["h1"]
    memory.note("h1", "culprit", attempt=2)
    assert memory.excluded(1) == ["h1"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"notes": 3}', '{"notes": [3, {}, {"host": "h1"}]}', '{"other": 1}', '{"notes": null}'],
)
def test_a_damaged_memory_says_nothing_and_is_written_anew(memory, text):
    memory.file.parent.mkdir(parents=True)
    memory.file.write_text(text)
    assert memory.excluded() == []
    memory.note("h1", "died")
    assert memory.excluded() == ["h1"]


def test_many_at_once(memory):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: memory.note(f"h{number}", "died"), range(16)))
    assert sorted(memory.excluded()) == sorted(f"h{number}" for number in range(16))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Mock:
    calls = Mock()
    for name in ("query_start", "exclude_hosts"):
        monkeypatch.setattr(resubmit, name, getattr(calls, name))
    return calls


UNAVAILABLE = SlurmRefused("Requested node configuration is not available")


def test_a_job_that_comes_back_leaves_the_bad_host_out(slurm):
    exclude_from("7_2", ["h1", "h2"], REQUEST)
    expected = ["--job-name=me", "--nodes=2", "--exclude=h[8-9],h1,h2"]
    assert slurm.query_start.call_args.kwargs["extra_argv"] == expected

    def needs_h2(script: str, *, extra_argv: list[str], **more: object) -> None:
        if "h2" in extra_argv[-1]:
            raise UNAVAILABLE

    slurm.query_start.side_effect = needs_h2
    exclude_from("7", ["h1", "h2", "h3"], REQUEST)
    assert slurm.exclude_hosts.mock_calls == [call("7_2", "h[8-9],h1,h2"), call("7", "h[8-9],h1,h3")]


@pytest.mark.parametrize("answer", [UNAVAILABLE, SlurmUnreachable("away")])
def test_a_job_that_needs_the_host_keeps_it(slurm, capfd, answer):
    slurm.query_start.side_effect = answer
    exclude_from("7", ["h1"], REQUEST)
    assert not slurm.exclude_hosts.called
    assert f"cannot exclude h1: {answer}" in capfd.readouterr().out


def test_a_host_is_left_out_once():
    assert with_excluded(REQUEST, []) is REQUEST
    twice = with_excluded(with_excluded(REQUEST, ["h1"]), ["h1", "h2"])
    assert twice.sbatch["exclude"] == "h[8-9],h1,h2"
    assert with_excluded(SlurmRequest({}), ["h1"]).sbatch == {"exclude": "h1"}
