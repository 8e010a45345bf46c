"""Tests a run that a newer version started on a scheduler that this version does not support."""

import signal
from unittest.mock import Mock

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.backend import backend_named, backend_of
from trainkit.backends import jobs as backend_jobs
from trainkit.backends.jobs import live_entry, open_job_ids, query_jobs_or_warn, read_job_status
from trainkit.control.cancel import cancel_run
from trainkit.errors import UsageError
from trainkit.run.files import read_json
from trainkit.run.record import AttemptRecord, add_slurm_attempt, read_job


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
