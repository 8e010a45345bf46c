"""Tests ``--after`` on a real cluster: a run that waits for another run or for a group."""

import json
from pathlib import Path
from typing import Any

from tests.on_slurm.login import ASK_TRAINKIT_S, BACKENDS, Login, wait_for
from trainkit.run.files import read_json
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir

WAITS = """
import pathlib, sys, time
while not pathlib.Path("go").exists():
    time.sleep(0.05)
sys.exit(int(pathlib.Path("go").read_text() or 0))
"""


def start_waiter(login: Login, *args: str) -> Path:
    """Start a run or a group whose ranks wait for a file and exit with the code in it. Return its folder."""
    script = login.script(WAITS, "waits.py")
    folder = str(login.folder)
    command = ["--no-snapshot", *args, "--", "bash", "-c", f"cd '{folder}' && python {script}"]
    done = login.trainkit("submit", str(login.config), "--name", "first", "--json", *command)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["run_dir"])


def release_waiter(login: Login, code: int) -> None:
    partial = login.folder / "go.partial"
    partial.write_text(str(code))
    partial.rename(login.folder / "go")


def wait_for_reason(login: Login, run: RunDir) -> dict[str, Any]:
    """Return the status of a waiting run, once Slurm has a reason for the wait that is not its queue."""

    def waiting_status() -> dict[str, Any] | None:
        now = login.status(run)
        return now if "depends" in (now["reason"] or "") else None

    return wait_for(waiting_status, "the reason", poll_s=ASK_TRAINKIT_S) or {}


def state_of(login: Login, run: RunDir) -> str:
    return str(login.status(run)["state"])


def test_a_run_starts_when_the_other_has_finished(login):
    first = RunDir(start_waiter(login))
    job_id = login.job_id(first)
    runs = [
        login.submit("--after", "first", "--name", backend, "--backend", backend, "--", "true")
        for backend in BACKENDS
    ]
    for run in runs:
        assert login.cluster.job(login.job_id(run))["Dependency"] == f"afterok:{job_id}(unfulfilled)"
        assert f"#SBATCH --dependency=afterok:{job_id}" in run.script_file.read_text()
    for run in runs:
        # Slurm records the reason when it next schedules its queue.
        assert wait_for_reason(login, run)["state"] == "pending"
    release_waiter(login, 0)
    for run in runs:
        login.finish(run)
    assert read_json(first.attempt(1).end_file)["state"] == "finished"
    again = login.submit("--after", "first", "--after", job_id, "--name", "third", "--", "true")
    assert "dependency" not in again.script_file.read_text()
    reasons = read_json(again.plan_file)["reasons"]
    assert reasons["after"] == f"starts immediately: first, {job_id} have already finished"
    login.finish(again)
    # The awaited job has ended, so a requeue of the waiting job does not wait again.
    for backend in BACKENDS:
        assert login.trainkit("requeue", backend).returncode == 0
    for run in runs:
        login.wait_for_end(run, attempt=2)
        assert "dependency" not in run.attempt(2).script_file.read_text()


def test_a_run_whose_wait_is_hopeless_says_so(login):
    start_waiter(login)
    run = login.submit("--after", "first", "--name", "second", "--", "true")
    release_waiter(login, 3)
    seen = wait_for(
        lambda: (found := login.status(run))["reason"] and "never" in found["reason"] and found,
        "the reason",
        poll_s=ASK_TRAINKIT_S,
    )
    assert seen["state"] == "pending"
    refused = login.trainkit("submit", str(login.config), "--after", "first", "--", "true")
    assert refused.returncode == 2
    assert "error: --after first: " in refused.stderr
    assert "is failed (" in refused.stderr
    assert "exit code 3;" in refused.stderr
    assert "trainkit resume" in refused.stderr
    assert login.trainkit("cancel", "second").returncode == 0
    assert state_of(login, run) == "cancelled"


def test_a_run_starts_when_a_whole_group_has_finished(login):
    group = RunGroup(start_waiter(login, "--array", "0-2"))
    run = login.submit("--after", "first", "--name", "second", "--", "true")
    assert f"--dependency=afterok:{group.job_id}\n" in run.script_file.read_text()
    one = login.submit("--after", "first/1", "--name", "third", "--", "true")
    assert f"--dependency=afterok:{group.job_id}_1\n" in one.script_file.read_text()
    many = login.trainkit("submit", str(login.config), "--after", "first", "--array", "0-1", "--", "true")
    assert many.returncode == 0, many.stderr
    waiting = RunGroup(many.stdout.splitlines()[0])
    shown = lambda: login.trainkit("status", str(waiting.path)).stdout  # noqa: E731
    wait_for(
        lambda: "waiting for the jobs on which this job depends" in shown(),
        "the reason",
        poll_s=ASK_TRAINKIT_S,
    )
    release_waiter(login, 0)
    for waiter in (run, one, waiting.run(0), waiting.run(1)):
        login.finish(waiter)
    assert login.trainkit("cancel", "first").returncode == 0
    done = login.trainkit("submit", str(login.config), "--after", "first", "--dry-run", "--", "true")
    assert "starts immediately: first " in done.stderr
