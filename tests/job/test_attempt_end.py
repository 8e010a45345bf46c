"""Tests that the work after an attempt does not grow with the metrics, and has the same results."""

import json
import random
import signal
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.control.test_resume import PLAN, so_far
from trainkit.backends.local.allocation import LocalAllocation, LocalAttemptWatch
from trainkit.control.changed_config import starting_point
from trainkit.job.attempt import Attempt
from trainkit.job.attempt_end import last_step, write_end
from trainkit.job.decision import Decision, Outcome, PlannedStop
from trainkit.observe.status import read_status
from trainkit.plan.workload import Workload
from trainkit.run import files as jsonl
from trainkit.run.end import Best, RankFailure, read_end
from trainkit.run.events import best_result
from trainkit.run.files import read_jsonl, read_jsonl_reversed, write_json
from trainkit.run.history import RunHistory
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir

MANY = 4_000


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempts_dir.mkdir(parents=True)
    for number in (1, 2):
        run.attempt(number).create()
    return run


def write(path: Path, records: list[dict[str, Any]], torn: str = "") -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)


def count_parsed(monkeypatch: pytest.MonkeyPatch) -> Mock:
    parsed = Mock(wraps=json.loads)
    monkeypatch.setattr(json, "loads", parsed)
    return parsed


@pytest.mark.parametrize(
    ("received", "cause"), [((), "slow_host"), (("SIGUSR2",), "asked"), (("SIGUSR2", "SIGTERM"), None)]
)
def test_what_a_person_asks_for_overrides_what_the_supervisor_wants(run, monkeypatch, received, cause):
    plan: Any = SimpleNamespace(grace_s=60.0)
    live = Attempt(run.attempt(1), plan)
    watch = LocalAttemptWatch(live)
    monkeypatch.setattr(watch, "forward_signal", lambda number: None)
    monkeypatch.setattr(watch, "running", {0: None})
    watch.leave(PlannedStop("slow_host", "restarts without b"))
    for name in received:
        watch.on_signal(signal.Signals[name])
    live.observed.exits.append((0, 75))
    outcome = LocalAllocation(run, 1).outcome(live)
    assert (outcome.cause, outcome.exits) == (cause, ((0, 75),))


@pytest.mark.parametrize("number", [1, 2])
def test_a_long_run_costs_no_more_than_a_short_one(run, monkeypatch, number):
    write(run.metrics_file, [{"attempt": number, "step": step, "loss": 1.0} for step in range(MANY)])
    write(run.events_file, [{"attempt": 1, "event": "checkpoint_begin", "step": step} for step in range(3)])
    write_json(run.job_file, {"attempts": [{"attempt": number}]})
    parsed = count_parsed(monkeypatch)
    write_end(run.attempt(number), AttemptRecord(number), Outcome(), Decision("finished", "done", 0))
    end = read_end(run.attempt(number))
    assert end.step == MANY - 1
    assert end.best == Best("loss", 1.0, MANY - 1)
    read_status(RunHistory(run), read_job(run), None, datetime.now(timezone.utc))
    assert parsed.call_count < MANY / 4


@pytest.mark.parametrize(("codes", "saved"), [([75, 0], True), ([75, 1], False), ([], False)])
def test_an_end_says_whether_the_workers_saved_whatever_its_reason_is(run, codes, saved):
    what = "restarts without n1: ranks 5; 6 are slow"
    decision = Decision("requeue", what, 75, "slow_host", details="resumes (restart 1)")
    end = write_end(run.attempt(1), AttemptRecord(1), Outcome(exits=list(enumerate(codes))), decision)
    assert (end.reason, end.summary, end.saved) == (f"{what}; resumes (restart 1)", what, saved)
    assert read_end(run.attempt(1)) == end
    of_command = replace(PLAN, workload=Workload(("train",)))
    assert starting_point(so_far(run, plan=of_command)).startswith("saved by") == saved


def test_records_of_another_attempt_and_of_none_end_the_search(run, monkeypatch):
    parsed = count_parsed(monkeypatch)
    for record in ({"attempt": 1}, {}):
        write(run.metrics_file, [{**record, "step": step} for step in range(MANY)])
        assert last_step(run.attempt(2), None) is None
        assert parsed.call_count < MANY / 4


def test_the_step_is_that_of_all_records_of_the_attempt(run):
    metrics = [{"attempt": 1, "step": step} for step in range(1, 90)]
    # Steps 51 to 60 are computed again, one record of the first attempt is late, and the last one is torn.
    metrics += [{"attempt": 2, "step": step} for step in range(51, 61)] + [{"attempt": 1, "step": 90}]
    write(run.metrics_file, metrics, '{"attempt": 2, "step": 61')
    commit = {"attempt": 2, "event": "checkpoint_commit", "step": 50}
    write(run.events_file, [commit, {"attempt": 2, "event": "stopped"}])
    assert last_step(run.attempt(1), None) == 90
    assert last_step(run.attempt(2), None) == 60
    write(run.events_file, [{"attempt": 2, "event": "evaluated", "step": 64}, commit])
    assert last_step(run.attempt(2), None) == 64
    assert last_step(run.attempt(2), RankFailure(step=7)) == 7


def test_the_best_result_is_that_of_all_attempts(run):
    losses = [(1, 10, 3.0), (1, 20, 2.0), (2, 20, 2.0), (2, 30, None), (2, 40, 2.5)]
    keys = ("event", "attempt", "step", "val_loss")
    events = [dict(zip(keys, ("evaluated", *values), strict=True)) for values in losses]
    others = [{"attempt": 2, "event": "rank_failed", "message": '"evaluated"', "val_loss": 0.0}]
    write(run.events_file, others + events, '{"event": "evaluated", "val_loss": 1.0')
    assert best_result(run) == Best("val_loss", 2.0, 20)
    write(run.events_file, [])
    metrics = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    write(run.metrics_file, [*metrics, {"step": 3, "loss": 2.5}], '{"step": 4, "loss"')
    assert best_result(run) == Best("loss", 2.5, 3)
    write(run.metrics_file, metrics)
    assert best_result(run) is None  # the run has diverged
    write(run.metrics_file, [{"step": 1, "accuracy": 2.0}])
    assert best_result(run) is None


def test_a_file_is_the_same_from_its_end(tmp_path, monkeypatch):
    path, values = tmp_path / "file.jsonl", random.Random(0)
    kinds = ['{"a": 1}', '{"a": "\xe4b"}', "[1]", "{", "", *('{"b": "' + "x" * n + '"}' for n in (0, 30, 59))]
    lines = [values.choice(kinds) for _ in range(300)]
    for end in ("\n", "", '{"a": 2', '{"a": 2}'):
        path.write_text("\n".join(lines) + end, encoding="utf-8")
        for size in (1, 7, 64, 16_384):
            monkeypatch.setattr(jsonl, "READ_BYTES", size)
            for words in ([], ["a"]):
                assert list(read_jsonl_reversed(path, words)) == list(read_jsonl(path, words))[::-1]
    assert list(read_jsonl(path, ["a"])) == [item for item in read_jsonl(path) if "a" in item]
    path.write_text("")
    assert list(read_jsonl_reversed(path)) == list(read_jsonl_reversed(tmp_path / "none")) == []
