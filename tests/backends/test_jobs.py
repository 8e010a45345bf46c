"""Tests what a command that waits prints, and a run on a scheduler of a newer version."""

import signal
from unittest.mock import Mock

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.api import _queued
from trainkit.backend import JobStatus, backend_named, backend_of
from trainkit.backends import jobs
from trainkit.backends import jobs as backend_jobs
from trainkit.backends.jobs import live_entry, open_job_ids, query_jobs_or_warn, read_job_status
from trainkit.control.cancel import cancel_run
from trainkit.errors import UsageError
from trainkit.observe.group import GroupStatus, TrialStatus
from trainkit.run.events import log_event
from trainkit.run.files import read_json
from trainkit.run.record import AttemptRecord, JobRecord, add_slurm_attempt, read_job
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


@pytest.fixture
def run(tmp_path):
    attempt = make_attempt(tmp_path / "run")
    add_slurm_attempt(attempt.run, 1, "7", "submit", "flux")
    return attempt.run


def test_a_backend_that_is_not_there_is_an_error():
    for name in ("flux", "", "None", "Local"):
        with pytest.raises(UsageError, match=f"^unknown backend '{name}'") as caught:
            backend_named(name)
        said(caught.value.hint)
    # An attempt without a backend is local.
    assert backend_of(AttemptRecord(1)) is backend_named("local")


def test_its_job_is_unknown_and_slurm_is_not_asked(run, monkeypatch):
    asked = Mock(return_value=({}, {}))
    monkeypatch.setattr(backend_jobs, "query_shared", asked)
    record = read_job(run)
    assert open_job_ids(run, record) == []
    status = read_job_status(run, lambda ids: query_jobs_or_warn(ids, pytest.fail))[1]
    assert status.alive is None
    asked.assert_called_once_with([])


def test_nothing_is_done_to_it(run):
    before = read_json(run.job_file)
    for act in (
        lambda: live_entry(run, read_job(run), "resume"),
        lambda: cancel_run(run, now=False, wait=False, warn=pytest.fail),
        lambda: backend_of(read_job(run).attempts[0]).signal(run, read_job(run).attempts[0], signal.SIGTERM),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        said(caught.value.message)
        said(caught.value.hint)
    assert read_json(run.job_file) == before
