"""Tests chained jobs: how they are submitted, recognized and cancelled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.backends import jobs as control_jobs
from trainkit.backends.jobs import live_entry, liveness_probe, open_job_ids, status_from_jobs
from trainkit.backends.slurm import backend as slurm_backend
from trainkit.backends.slurm.backend import cancel_follow_ups, submit_follow_ups
from trainkit.control import cancel as control_cancel
from trainkit.control.cancel import cancel_run
from trainkit.control.requeue import requeue_run
from trainkit.errors import TrainkitError, UsageError
from trainkit.plan.launch import SlurmRequest
from trainkit.run.end import AttemptEnd
from trainkit.run.files import read_json, write_json
from trainkit.run.record import add_slurm_attempt, change_newest, read_job, set_follow_ups
from trainkit.run.registry import find_run, register
from trainkit.run.rundir import submission_token
from trainkit.scheduler import JobState, on_cluster, split_job
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.jobs import SlurmJob

REQUEST = SlurmRequest({"nodes": 2, "comment": "my words"})
WAITS = SlurmJob("?", JobState.PENDING, "PENDING", reason="Dependency")
ENDED = SlurmJob("7", JobState.FAILED, "FAILED", exit_code=75)


@pytest.fixture
def run(tmp_path):
    attempt = make_attempt(tmp_path / "run")
    attempt.script_file.write_text("#!/bin/bash\n")
    add_slurm_attempt(attempt.run, 1, "7", "submit", "sbatch")
    return attempt.run


@pytest.fixture
def in_west(tmp_path, monkeypatch):
    (tmp_path / "slurm.conf").write_text("ClusterName=west\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


class Sbatch:
    """Accepts scripts as jobs 8, 9 and so on, and refuses them from a given number on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Path, str, Sequence[str]]] = []
        self.last = 99
        monkeypatch.setattr(slurm_backend, "submit_script", self.submit)

    def submit(self, script, *, token, extra_argv, is_only_job, **more):
        assert not is_only_job  # a search for its script would find the first job
        new_id = 8 + len(self.calls)
        if new_id > self.last:
            raise SlurmRefused("sbatch: Job violates accounting/QOS policy")
        self.calls.append((script, token, extra_argv))
        return str(new_id)


@pytest.fixture
def sbatch(monkeypatch):
    return Sbatch(monkeypatch)


@pytest.fixture
def cancelled(monkeypatch):
    ids: list[str] = []
    monkeypatch.setattr(slurm_backend, "cancel_waiting", ids.extend)
    return ids


@pytest.mark.parametrize(
    ("job", "command"), [("123", "scancel 123"), ("123;east", "scancel --clusters=east 123")]
)
def test_a_job_that_cannot_be_recorded_is_named_with_a_command(run, monkeypatch, job, command):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(slurm_backend, "submit_script", lambda *args, **more: job)
    monkeypatch.setattr(slurm_backend, "add_slurm_attempt", full)
    script, plan = SimpleNamespace(text="#!/bin/bash\n"), SimpleNamespace(slurm=REQUEST)
    texts = {"config_text": "", "plan_text": "", "reason": "submit"}
    new: Any = SimpleNamespace(script=script, plan=plan, job=read_job(run), **texts)
    with pytest.raises(TrainkitError, match=r"^123 was submitted, but") as caught:
        slurm_backend.SbatchBackend().start(run, new)
    assert caught.value.hint.endswith(f"`{command}`")


def test_what_ctrl_c_cancelled_is_named_by_its_id(run, monkeypatch, capsys):
    done: list[str] = []
    monkeypatch.setattr(slurm_backend, "find_by_token", lambda *args, **more: "123;east")
    monkeypatch.setattr(slurm_backend, "cancel", done.extend)
    remove = partial(done.append, "folder")
    with pytest.raises(KeyboardInterrupt), slurm_backend.removed_unless_submitted(remove, "x", ["east"]):
        raise KeyboardInterrupt
    assert done == ["123;east", "folder"]
    said(capsys.readouterr().err)


def test_each_waits_for_all_before_it(run, sbatch, capsys):
    assert submit_follow_ups(run.attempt(1), "7", REQUEST, 3) == ["8", "9", "10"]
    said(capsys.readouterr().err)
    waits = ("afternotok:7", "afternotok:7,afternotok:8", "afternotok:7,afternotok:8,afternotok:9")
    comments = [f"--comment={submission_token(run, 1, number)} my words" for number in (1, 2, 3)]
    assert [argv for _, _, argv in sbatch.calls] == [
        (comment, f"--dependency={after}", "--kill-on-invalid-dep=yes")
        for comment, after in zip(comments, waits, strict=True)
    ]
    assert {script for script, _, _ in sbatch.calls} == {run.attempt(1).script_file}
    tokens = {token for _, token, _ in sbatch.calls}
    assert len(tokens | {submission_token(run, 1), submission_token(run, 2)}) == 5
    assert read_job(run).waiting == read_job(run).follow_ups == ["8", "9", "10"]


def test_what_slurm_does_not_take_is_said(run, sbatch, capsys):
    sbatch.last = 8
    assert submit_follow_ups(run.attempt(1), "7", REQUEST, 3) == ["8"]
    said(capsys.readouterr().err)
    assert read_job(run).waiting == ["8"]


def test_submitits_follow_ups_find_their_pickles(run, sbatch):
    folder = run.path / "submitit"
    folder.mkdir()
    (folder / "7_submitted.pkl").write_bytes(b"pickle")
    submit_follow_ups(run.attempt(1), "7", REQUEST, 2)
    assert [(folder / f"{job}_submitted.pkl").read_bytes() for job in (8, 9)] == [b"pickle"] * 2


def test_one_that_carries_the_run_waits_no_more(run, cancelled):
    set_follow_ups(run, ["8", "9", "10"])
    add_slurm_attempt(run, 2, "8", "restart", "sbatch")
    assert read_job(run).waiting == ["9", "10"]
    cancel_follow_ups(run, read_job(run), keep="9")
    assert cancelled == ["10"]
    cancel_follow_ups(run, read_job(run))
    assert cancelled == ["10"]  # job.json no longer lists the other jobs


@pytest.mark.parametrize(("name", "has_ended"), [("east", True), ("east", False), ("west", True)])
def test_another_cluster_that_is_away_keeps_no_run_that_is_over(
    run, in_west, monkeypatch, capsys, name, has_ended
):
    monkeypatch.setattr(slurm_backend, "cancel_waiting", Mock(side_effect=SlurmUnreachable("it is away")))
    change_newest(run, cluster=name)
    set_follow_ups(run, ["8", "9"])
    if has_ended:
        AttemptEnd("failed", "failed", exit_code=1).write(run.attempt(1))
    if name == "west" or not has_ended:
        with pytest.raises(SlurmUnreachable):
            cancel_follow_ups(run, read_job(run))
        assert read_job(run).follow_ups == ["8", "9"]
        return
    cancel_follow_ups(run, read_job(run))
    said(capsys.readouterr().err)
    assert read_job(run).follow_ups == [], "the next attempt may be on a cluster where these are other jobs"


def test_without_follow_ups_slurm_is_not_asked(run, cancelled):
    before = run.job_file.read_text()
    cancel_follow_ups(run, read_job(run))
    assert (cancelled, run.job_file.read_text()) == ([], before)


def queue(monkeypatch: pytest.MonkeyPatch, **jobs: SlurmJob) -> dict[str, SlurmJob]:
    """Return Slurm's jobs by id, and make Slurm answer with them.

    The id of a job is the number after the letter of its keyword.
    """
    known = {name[1:]: replace(info, job_id=name[1:]) for name, info in jobs.items()}
    answers(monkeypatch, lambda ids: {key: known[key] for key in ids if key in known})
    return known


def answers(monkeypatch: pytest.MonkeyPatch, query: Callable[[Sequence[str]], dict[str, SlurmJob]]) -> None:
    def query_cluster(wanted: Sequence[str], cluster: str, patience_s: float) -> list[tuple[str, SlurmJob]]:
        found = query([on_cluster(job_id, cluster) for job_id in wanted])
        return [(split_job(job)[0], info) for job, info in found.items()]

    monkeypatch.setattr("trainkit.slurm.jobs._query_cluster", query_cluster)


def test_a_run_whose_follow_up_waits_is_alive(run, monkeypatch):
    set_follow_ups(run, ["8", "9"])
    jobs = queue(monkeypatch, j7=ENDED, j9=WAITS)  # job 8 was removed from the queue by hand
    assert open_job_ids(run, read_job(run)) == ["7", "8", "9"]
    status = status_from_jobs(run, read_job(run), jobs)
    assert status.alive
    assert status.job == replace(WAITS, job_id="9")
    entry = live_entry(run, read_job(run), "resume")
    assert (entry.job_id, entry.attempt) == ("9", 1)


def test_a_run_without_any_left_is_not(run, monkeypatch):
    set_follow_ups(run, ["8"])
    status = status_from_jobs(run, read_job(run), queue(monkeypatch, j7=ENDED))
    assert (status.alive, status.job) == (False, ENDED)
    assert live_entry(run, read_job(run), "resume") is None
    # Follow-ups of a run that has ended are on their way out.
    write_json(run.attempt(1).end_file, {"action": "failed", "state": "failed"})
    queue(monkeypatch, j7=ENDED, j8=WAITS)
    assert open_job_ids(run, read_job(run)) == []
    assert live_entry(run, read_job(run), "resume") is None


def test_a_job_that_has_recorded_its_end_gets_a_moment_to_exit(run, monkeypatch, capsys):
    jobs = queue(monkeypatch, j7=SlurmJob("?", JobState.RUNNING, "RUNNING"))
    monkeypatch.setattr(control_jobs.time, "sleep", lambda _: jobs.clear())
    with pytest.raises(UsageError, match="is running as 7"):
        control_jobs.require_not_running(run, read_job(run), "resume")
    write_json(run.attempt(1).end_file, {"action": "finished", "state": "finished"})
    assert live_entry(run, read_job(run), "cancel") is None, "nothing to cancel"
    assert jobs
    control_jobs.require_not_running(run, read_job(run), "resume")
    assert not jobs
    said(capsys.readouterr().err)


def test_a_job_that_has_recorded_its_end_and_stays_is_named(run, monkeypatch):
    write_json(run.attempt(1).end_file, {"action": "finished", "state": "finished"})
    monkeypatch.setattr(control_jobs, "SUPERVISOR_EXIT_S", -1.0)
    jobs = queue(monkeypatch, j7=SlurmJob("?", JobState.RUNNING, "RUNNING"))
    resume = lambda: control_jobs.require_not_running(run, read_job(run), "resume")  # noqa: E731
    for act in (resume, lambda: requeue_run(run)):
        with pytest.raises(UsageError, match=r"has ended, but Slurm still lists its job 7 \(RUNNING\)"):
            act()
    jobs["7"] = SlurmJob("7", JobState.COMPLETING, "COMPLETING")  # a long epilog runs
    resume()


@pytest.mark.parametrize(
    ("state", "now", "is_cancelled"),
    [
        (JobState.RUNNING, False, False),
        (JobState.RUNNING, True, True),
        (JobState.PENDING, False, True),  # the job was requeued by hand, so it would start again
        (JobState.COMPLETING, True, False),
    ],
)
def test_the_job_of_a_run_that_has_ended_can_be_cancelled(run, monkeypatch, state, now, is_cancelled):
    end = {"action": "failed", "state": "failed"}
    write_json(run.attempt(1).end_file, end)
    queue(monkeypatch, j7=SlurmJob("?", state, state.name))
    ids: list[str] = []
    monkeypatch.setattr(control_cancel, "cancel", ids.extend)
    result = cancel_run(run, now=now, wait=False, warn=print)
    assert (result.state, ids) == ("ended", ["7"] if is_cancelled else [])
    assert read_json(run.attempt(1).end_file) == end, "how it ended is not overwritten"


def test_a_run_is_found_by_the_id_of_a_follow_up(run, monkeypatch):
    monkeypatch.chdir(run.path)
    register(run, "mine")
    set_follow_ups(run, ["8"])
    assert find_run("8").path == run.path


def test_a_run_is_watched_while_its_follow_up_waits(run, monkeypatch):
    set_follow_ups(run, ["8"])
    write_json(run.attempt(1).end_file, {"action": "follow_up", "state": "stopped", "exit_code": 75})
    queue(monkeypatch, j7=ENDED, j8=WAITS)
    lines: list[str] = []
    assert liveness_probe(run, lines.append)() is True
    [line] = lines
    said(line)


def test_a_run_on_another_cluster_is_not_taken_for_dead(run, monkeypatch, in_west):
    change_newest(run, cluster="west")
    add_slurm_attempt(run, 2, "7;east", "submit", "sbatch")
    set_follow_ups(run, ["8", "9"])
    record = read_job(run)
    assert [(entry.job_id, entry.job) for entry in record.attempts] == [("7", "7"), ("7", "7;east")]
    assert record.of_job("7") == record.attempts[1:]
    assert record.of_job("7", "west") == record.attempts[:1]
    assert open_job_ids(run, record) == ["7;east", "8;east", "9;east"]

    # Only one cluster answers. The cluster of this machine has jobs 7 and 8 too.
    away_is_east = True

    def away(ids: Sequence[str]) -> dict[str, SlurmJob]:
        if any((";" in job) is away_is_east for job in ids):
            raise SlurmUnreachable("squeue cannot reach Slurm: No cluster 'east' known by database")
        return dict.fromkeys(ids, WAITS)

    answers(monkeypatch, away)
    warnings: list[str] = []
    known = control_jobs.query_jobs_or_warn([*open_job_ids(run, record), "7"], warnings.append)
    assert known == {"7": WAITS}
    [warning] = warnings
    said(warning)
    assert status_from_jobs(run, record, known).alive is None
    assert liveness_probe(run)() is None
    with pytest.raises(SlurmUnreachable):
        live_entry(run, read_job(run), "resume")
    away_is_east = False
    ids = [*open_job_ids(run, record), "7"]
    known = control_jobs.query_jobs_or_warn(ids, warnings.append)
    assert known == dict.fromkeys(ids[:3], WAITS)
    said(warnings[1])
    assert status_from_jobs(run, record, known).alive is True
    here = replace(record, attempts=record.attempts[:1], follow_ups=None)
    assert status_from_jobs(run, here, known).alive is None
    queue(monkeypatch, **{"j7;east": ENDED, "j8;east": WAITS})
    assert live_entry(run, read_job(run), "resume").job == "8;east"
    run.attempt(2).create()
    AttemptEnd("finished", "finished", exit_code=0).write(run.attempt(2))
    assert liveness_probe(run)() is False


@pytest.mark.parametrize(("plan", "clusters"), [('{"slurm": {"clusters": ["east"]}}', ["east"]), ("{", [])])
def test_a_job_is_found_whatever_its_plan(run, monkeypatch, plan, clusters):
    attempt = run.attempt(2)
    attempt.create()
    attempt.script_file.write_text("#!/bin/bash\n")
    attempt.plan_file.write_text(plan)
    write_json(run.job_file, {**read_json(run.job_file), "backend": "sbatch"})
    asked: list[Any] = []
    find = lambda token, **more: asked.append(more["clusters"]) or "8"  # noqa: E731
    monkeypatch.setattr(control_jobs, "find_by_token", find)
    control_jobs.read_whole_job(run)
    newest = read_job(run).newest
    assert (asked, newest.job_id, newest.backend) == ([clusters], "8", "sbatch")


def test_a_step_of_a_user_is_not_started_again(run):
    file = run.attempt(1).plan_file
    write_json(file, {**read_json(file), "backend": "srun"})
    AttemptEnd("failed", "failed", exit_code=1).write(run.attempt(1))
    with pytest.raises(UsageError, match="ran in a step that srun started"):
        requeue_run(run)
    assert run.attempt_numbers() == [1]


def test_a_requeue_stands_in_the_record_before_it_is_signalled(run, monkeypatch):
    requests = []

    def signalled(*args: object) -> None:
        requests.append(read_job(run).attempts[-1].requeue_requested_at)

    # A job that waits would find a request when it starts, and would return to the queue at once.
    answers(monkeypatch, lambda ids: dict.fromkeys(ids, WAITS))
    with pytest.raises(UsageError, match="7 is already pending"):
        requeue_run(run)
    assert read_job(run).attempts[-1].requeue_requested_at is None
    runs = SlurmJob("7", JobState.RUNNING, "RUNNING")
    answers(monkeypatch, lambda ids: dict.fromkeys(ids, runs))
    monkeypatch.setattr(slurm_backend, "send_signal", signalled)
    assert requeue_run(run).is_started is False
    assert len(requests) == 1
