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


def test_runs_start_when_a_group_or_one_of_its_runs_has_finished(login):
    group = RunGroup(start_waiter(login, "--array", "0-1"))
    waits = {"sbatch": ("first", f"{group.job_id}"), "submitit": ("first/1", f"{group.job_id}_1")}
    runs = [
        login.submit("--after", waits[backend][0], "--name", backend, "--backend", backend, "--", "true")
        for backend in BACKENDS
    ]
    for run, backend in zip(runs, BACKENDS, strict=True):
        assert login.cluster.job(login.job_id(run))["Dependency"].startswith(f"afterok:{group.job_id}_")
        assert f"#SBATCH --dependency=afterok:{waits[backend][1]}\n" in run.script_file.read_text()
    many = login.trainkit("submit", str(login.config), "--after", "first", "--array", "0-1", "--", "true")
    assert many.returncode == 0, many.stderr
    waiting = RunGroup(many.stdout.splitlines()[0])
    # Slurm records the reason when it next schedules its queue.
    assert wait_for_reason(login, runs[0])["state"] == "pending"
    release_waiter(login, 0)
    for run in (*runs, waiting.run(0), waiting.run(1)):
        login.finish(run)
    assert read_json(group.run(0).attempt(1).end_file)["state"] == "finished"
    again = login.submit("--after", "first", "--name", "third", "--", "true")
    assert "dependency" not in again.script_file.read_text()
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
    assert "exit code 3;" in refused.stderr
    assert login.trainkit("cancel", "second").returncode == 0
    assert login.status(run)["state"] == "cancelled"
