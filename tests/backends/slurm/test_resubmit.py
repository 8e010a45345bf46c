"""Tests a run that continues as a new job: the same files in the next attempt."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.runs import make_attempt
from tests.support.said import said
from trainkit.backends.slurm import resubmit as resubmit_module
from trainkit.backends.slurm.allocation import SlurmAllocation
from trainkit.backends.slurm.resubmit import excludable, resubmit
from trainkit.errors import TrainkitError
from trainkit.job.attempt import Attempt
from trainkit.job.decision import Decision
from trainkit.plan.launch import LaunchPlan, SlurmRequest
from trainkit.run.files import read_json, read_jsonl, write_json
from trainkit.run.record import AUTO_RESTART, add_slurm_attempt, mark_cancelled, read_job
from trainkit.run.rundir import AttemptDir, RunDir, submission_token
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable

FULL = OSError(errno.ENOSPC, "No space left on device")
SCRIPT = "#!/bin/bash\n#SBATCH --comment=trainkit:old\n"


def on_slurm(attempt: AttemptDir, backend: str = "sbatch", job_id: str = "7") -> RunDir:
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    request = SlurmRequest({"nodes": 1, "comment": "my words", "exclude": "h9"})
    for file in (attempt.plan_file, attempt.run.plan_file):
        write_json(file, replace(plan, backend=backend, slurm=request).to_dict())
    for file in (attempt.script_file, attempt.run.script_file):
        file.write_text(SCRIPT)
    add_slurm_attempt(attempt.run, attempt.number, job_id, "submit", backend)
    return attempt.run


@pytest.fixture
def run(tmp_path):
    return on_slurm(make_attempt(tmp_path / "run"))


class Sbatch:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = Path()
        self.text = ""
        self.token = ""
        self.argv: Sequence[str] = ()
        self.answer: Callable[[], str] = lambda: "8"
        self.moved: list[tuple[str, str]] = []
        monkeypatch.setattr(resubmit_module, "submit_script", self.submit)
        monkeypatch.setattr(resubmit_module, "move_dependents", self.move)
        monkeypatch.setattr(resubmit_module, "excludable", lambda hosts, request: list(hosts))

    def move(self, job_id: str, new_id: str) -> list[str]:
        self.moved.append((job_id, new_id))
        return ["20"]

    def submit(self, script: Path, *, token: str, extra_argv: Sequence[str], **more: Any) -> str:
        self.script, self.text = script, script.read_text()
        self.token, self.argv = token, extra_argv
        return self.answer()


@pytest.fixture
def sbatch(monkeypatch):
    return Sbatch(monkeypatch)


def test_the_next_attempt_is_a_job_that_waits_for_this_one(run, sbatch):
    assert resubmit(run, "7", ["h1"]) == "8"
    assert sbatch.text == SCRIPT
    assert sbatch.token == submission_token(run, 2) != submission_token(run, 1)
    comment = f"--comment={submission_token(run, 2)} my words"
    assert sbatch.argv == [comment, "--dependency=afterany:7", "--exclude=h9,h1"]
    assert sbatch.moved == [("7", "8")], "jobs that wait for the run wait for its new job"
    entries = [(entry.attempt, entry.job_id, entry.reason) for entry in read_job(run).attempts]
    assert entries == [(1, "7", "submit"), (2, "8", AUTO_RESTART)]
    assert read_job(run).attempts[-1].pid is None  # the start of the job claims this attempt
    assert sbatch.script == run.attempt(2).script_file
    assert run.attempt(2).plan_file.read_text() == run.attempt(1).plan_file.read_text()
    assert (run.attempts_dir / "latest").readlink() == Path("002")
    [event] = read_jsonl(run.events_file)
    expected = {"event": "submitted", "attempt": 2, "job_id": "8", "reason": AUTO_RESTART}
    assert event.items() >= expected.items()


def test_a_task_of_an_array_goes_on_alone(tmp_path, sbatch):
    (tmp_path / "group").mkdir()
    run = on_slurm(make_attempt(tmp_path / "group/3"), job_id="7_3")
    run.script_file.write_text("#!/bin/bash\n# of the group\n")
    assert resubmit(run, "7_3") == "8_3"
    said(sbatch.text)
    assert sbatch.argv[1:] == ["--dependency=afterany:7_3", "--array=3"]
    assert read_job(run).attempts[-1].job_id == "8_3"


def test_submitits_job_finds_its_pickle(tmp_path, sbatch):
    run = on_slurm(make_attempt(tmp_path / "run"), backend="submitit")
    folder = run.path / "submitit"
    folder.mkdir()
    (folder / "7_submitted.pkl").write_bytes(b"pickle")
    assert resubmit(run, "7") == "8"
    assert (folder / "8_submitted.pkl").read_bytes() == b"pickle"
    sbatch.answer = lambda: "9"
    assert resubmit(run, "8") == "9"
    assert (folder / "9_submitted.pkl").read_bytes() == b"pickle"
    assert read_job(run).attempts[-1].backend == "submitit"


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (SlurmRefused("sbatch: Job violates accounting/QOS policy"), [1]),
        (SlurmUnreachable("no answer", may_have_arrived=True), [1, 2]),
    ],
)
def test_a_refused_job_leaves_nothing_and_one_that_may_exist_its_attempt(run, sbatch, error, attempts):
    sbatch.answer = Mock(side_effect=error)
    with pytest.raises(type(error)):
        resubmit(run, "7")
    assert run.attempt_numbers() == attempts
    assert (run.attempts_dir / "latest").readlink() == Path(f"00{attempts[-1]}")
    assert len(read_job(run).attempts) == 1
    # the next command finds the script and searches for its job
    assert run.attempt(attempts[-1]).script_file.exists()


def test_a_run_that_a_person_has_cancelled_stays_ended(run, sbatch):
    mark_cancelled(run)
    with pytest.raises(TrainkitError, match="cancelled in the meantime"):
        resubmit(run, "7")
    assert (sbatch.token, run.attempt_numbers()) == ("", [1])


def test_a_script_that_is_gone(run, sbatch):
    run.script_file.unlink()
    with pytest.raises(TrainkitError, match=r"submit.sbatch, the script of job 7, is missing"):
        resubmit(run, "7")
    assert run.attempt_numbers() == [1]


def test_hosts_that_slurm_cannot_be_asked_about_do_not_keep_the_run_from_going_on(
    run, sbatch, monkeypatch, capfd
):
    """Slurm cannot be queried if the temporary folder on the failed host is full."""

    monkeypatch.setattr(resubmit_module, "query_start", Mock(side_effect=FULL))
    monkeypatch.setattr(resubmit_module, "excludable", excludable)
    assert resubmit(run, "7", ["h1"]) == "8"
    assert not any(option.startswith("--exclude") for option in sbatch.argv)
    said(capfd.readouterr().out)


def test_a_full_disk_at_the_end_of_a_job(run, sbatch, monkeypatch):
    monkeypatch.setattr("trainkit.job.processes.DISK_PATIENCE_S", 0.0)
    monkeypatch.setattr(resubmit_module, "reopen_attempt", Mock(side_effect=FULL))
    decision = Decision("resubmit", "saved", 75, "timeout")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h1")
    monkeypatch.setattr("trainkit.backends.slurm.allocation.expand_hosts", lambda text: [text])
    monkeypatch.setattr("trainkit.backends.slurm.allocation.excluded", lambda cluster, run: {})
    plan = LaunchPlan.from_dict(read_json(run.plan_file))
    done = SlurmAllocation(run, "7", []).release(Attempt(run.attempt(1), plan), decision)
    said(done.reason)
