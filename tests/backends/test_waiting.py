"""Tests that a waiting command prints its reason after some seconds, and again when the reason changes."""

import pytest

from trainkit.api import _queued
from trainkit.backend import JobStatus
from trainkit.backends import jobs
from trainkit.observe.group import GroupStatus, TrialStatus
from trainkit.run.events import log_event
from trainkit.run.record import AttemptRecord, JobRecord
from trainkit.run.rundir import RunDir


@pytest.mark.parametrize(
    ("after_s", "reasons", "said"),
    [
        *((0.0, "", ""), (0.0, "--", ""), (0.0, "aaa", "a"), (0.0, "aba", "aba"), (0.0, "a-a", "aa")),
        *((2.0, "aaaa", "a"), (2.0, "abc", "c"), (2.0, "aa--", "")),
        (2.0, "ab", ""),  # the wait is too short for a line
    ],
)
def test_a_reason_is_said_once(monkeypatch, after_s, reasons, said):
    """Each letter is a reason, one second after the one before, and a dash is no reason."""
    now_s = 0.0
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now_s)
    found: list[str] = []
    waiting = jobs.Waiting(found.append, after_s)
    for reason in reasons:
        waiting.look(reason.strip("-"))
        now_s += 1.0
    assert "".join(found) == said


def test_a_run_on_this_machine_waits_for_its_turn(tmp_path, monkeypatch):
    run, said = RunDir(tmp_path), list[str]()
    record = JobRecord(attempts=[AttemptRecord(attempt=1)])
    monkeypatch.setattr(jobs, "read_job_status", lambda *_: (record, JobStatus(True)))
    probe = jobs.liveness_probe(run, said.append)
    assert (probe(), said) == (True, [])
    log_event(run, 1, "submitted")
    assert (probe(), said) == (True, [])
    log_event(run, 1, "waiting", reason="waits for a core")
    assert (probe(), probe(), said) == (True, True, [f"{tmp_path} waits for a core"])
    log_event(run, 1, "waiting", reason="waits behind another")
    probe()
    assert said[1:] == [f"{tmp_path} waits behind another"]
    log_event(run, 1, "started")
    probe()
    log_event(run, 1, "waiting", reason="of a run that has started")
    probe()
    record.attempts.append(AttemptRecord(attempt=2))
    log_event(run, 2, "waiting", reason="waits again")
    probe()
    assert said[2:] == [f"{tmp_path} waits again"]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([("pending", "waiting for others")], "sweep: 1 pending: waiting for others"),
        ([("finished", "done"), ("pending", "A\nb")], "sweep: 1 pending, 1 finished: A b"),
        ([("pending", None), ("requeueing", "BeginTime")], "sweep: 1 requeueing, 1 pending: BeginTime"),
        *(([(state, None), ("pending", "Priority")], "") for state in ("running", "stopping")),
        *(([("pending", None)], ""), ([("finished", "done"), ("failed", "why")], ""), ([], "")),
    ],
)
def test_a_group_waits_while_none_of_its_runs_runs(states, said):
    trials = [TrialStatus(index, {}, *state, "12", None, "/x") for index, state in enumerate(states)]
    group = GroupStatus("sweep", "/x", "12", "0-1", [], 1, 1, 1.0, trials)
    assert _queued(group) == said
