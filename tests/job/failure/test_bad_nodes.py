"""Tests that failed hosts are excluded for 24 hours, unless a job could then no longer start."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from trainkit.backends.slurm import resubmit
from trainkit.backends.slurm.resubmit import exclude_from
from trainkit.cluster.bad_nodes import Kind, excluded, memory_file, note_failure
from trainkit.plan.launch import SlurmRequest, with_excluded
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
REQUEST = SlurmRequest({"job-name": "me", "nodes": 2, "exclude": "h[8-9]", "comment": "x", "dependency": "y"})


class Memory:
    """The records of failed nodes of one user on one cluster."""

    def __init__(self, folder: Path) -> None:
        self.environ = {"XDG_STATE_HOME": str(folder)}
        self.file = memory_file("west", self.environ)

    def note(
        self,
        host: str,
        kind: Kind,
        hours: float = 0,
        run: str = "/runs/small",
        attempt: int = 1,
        reason: str = "",
    ) -> None:
        now = NOON + timedelta(hours=hours)
        more: Any = {"run": run, "attempt": attempt, "now": now, "environ": self.environ}
        note_failure("west", host, kind, reason or f"{host} {kind}", **more)

    def excluded(self, hours: float = 0) -> list[str]:
        return list(excluded("West", NOON + timedelta(hours=hours), self.environ))


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "state")


def test_nothing_is_remembered_where_nothing_was_noted(memory: Memory) -> None:
    assert memory.excluded() == []
    assert not memory.file.parent.exists()


def test_hosts_that_died_or_failed_a_check_are_left_out_for_a_day(memory: Memory) -> None:
    memory.note("h1", "died")
    memory.note("h2", "preflight", hours=2)
    assert memory.excluded(3) == ["h2", "h1"]
    assert memory.excluded(23.9) == ["h2", "h1"]
    assert memory.excluded(24) == ["h2"]
    assert memory.excluded(26) == []
    assert list(excluded("east", NOON, memory.environ)) == []


def test_one_failure_that_began_on_a_host_is_nothing(memory: Memory) -> None:
    memory.note("h1", "culprit")
    memory.note("h1", "culprit")  # the same failure is recorded twice
    memory.note("h1", "culprit", run="/runs/other", attempt=5)
    assert memory.excluded(1) == []
    memory.note("h1", "culprit", attempt=2)
    assert excluded("west", NOON, memory.environ) == {
        "h1": "h1 culprit, one of 2 failures that began on this host "
        f"(small, attempt 2, {NOON.astimezone():%Y-%m-%d %H:%M})"
    }


def test_a_host_on_which_a_start_failed_is_left_out_by_its_own_run_at_once(memory: Memory) -> None:
    memory.note("h1", "start")
    memory.note("h1", "start")  # the same attempt failed again on the host
    memory.note("h2", "start", run="/runs/other")
    assert memory.excluded() == []
    assert list(excluded("west", NOON, memory.environ, run="/runs/small")) == ["h1"]
    memory.note("h1", "culprit", attempt=2)
    assert memory.excluded(1) == ["h1"]


def test_what_is_over_is_forgotten_in_the_file_too(memory: Memory) -> None:
    memory.note("h1", "died")
    memory.note("h2", "died", hours=25)
    assert [note["host"] for note in json.loads(memory.file.read_text())["notes"]] == ["h2"]


def test_removing_the_file_forgets(memory: Memory) -> None:
    memory.note("h1", "died")
    memory.file.unlink()
    assert memory.excluded() == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"notes": 3}', '{"notes": [3, {}, {"host": "h1"}]}', '{"other": 1}', '{"notes": null}'],
)
def test_a_damaged_memory_says_nothing_and_is_written_anew(memory: Memory, text: str) -> None:
    memory.file.parent.mkdir(parents=True)
    memory.file.write_text(text)
    assert memory.excluded() == []
    memory.note("h1", "died")
    assert memory.excluded() == ["h1"]


def test_many_at_once(memory: Memory) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: memory.note(f"h{number}", "died"), range(40)))
    assert sorted(memory.excluded()) == sorted(f"h{number}" for number in range(40))


class SlurmCalls:
    """Records the calls of Slurm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tested: list[str] = []
        self.updates: list[tuple[str, str]] = []
        self.answer: Exception | None = None
        self.needed: tuple[str, ...] = ()
        monkeypatch.setattr(resubmit, "query_start", self.query_start)
        monkeypatch.setattr(
            resubmit, "exclude_hosts", lambda job_id, hosts: self.updates.append((job_id, hosts))
        )

    def query_start(self, script: str, *, extra_argv: list[str], **more: object) -> None:
        self.tested = extra_argv
        if self.answer is not None:
            raise self.answer
        if any(host in extra_argv[-1] for host in self.needed):
            raise SlurmRefused("Requested node configuration is not available")


def test_a_job_that_comes_back_leaves_the_bad_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmCalls(monkeypatch)
    exclude_from("7_2", ["h1", "h2"], REQUEST)
    assert slurm.tested == ["--job-name=me", "--nodes=2", "--exclude=h[8-9],h1,h2"]
    assert slurm.updates == [("7_2", "h[8-9],h1,h2")]


@pytest.mark.parametrize(
    "answer", [SlurmRefused("Requested node configuration is not available"), SlurmUnreachable("away")]
)
def test_a_job_that_needs_the_host_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answer: Exception
) -> None:
    slurm = SlurmCalls(monkeypatch)
    slurm.answer = answer
    exclude_from("7", ["h1"], REQUEST)
    assert slurm.updates == []
    assert f"cannot exclude h1: {answer}" in capfd.readouterr().out


def test_a_job_that_can_do_without_one_leaves_that_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmCalls(monkeypatch)
    slurm.needed = ("h2",)
    exclude_from("7", ["h1", "h2", "h3"], REQUEST)
    assert slurm.updates == [("7", "h[8-9],h1,h3")]


def test_a_host_is_left_out_once() -> None:
    assert with_excluded(REQUEST, []) is REQUEST
    twice = with_excluded(with_excluded(REQUEST, ["h1"]), ["h1", "h2"])
    assert twice.sbatch["exclude"] == "h[8-9],h1,h2"
    assert with_excluded(SlurmRequest({}), ["h1"]).sbatch == {"exclude": "h1"}
