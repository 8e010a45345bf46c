"""Runs the first lines of a batch script in bash with a fake Slurm.

The tests check what these lines record, and when they requeue the job.
"""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from trainkit.backends.slurm.failed_starts import FailedStart, failed_starts, forget_start
from trainkit.launch.script import render
from trainkit.run.record import add_slurm_attempt, create_job, read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

PARTIAL = "partials/begin.sh.j2"
FAKE = """#!/bin/bash
printf '%s ' "${0##*/}" "$@" >> calls
echo >> calls
[[ ${2:-} != show ]] || echo "JobId=7 ReqNodeList=(null) ExcNodeList=$EXCLUDED NumNodes=1"
[[ ! -e refuse-"${0##*/}" ]]
"""


class Script:
    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "it's a run")
        self.run.path.mkdir()
        self.run.attempt(1).create()
        create_job(self.run, backend="sbatch", name="x", cwd=str(folder), code=None)
        add_slurm_attempt(self.run, 1, "7", "submit", "sbatch")
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("scontrol", "sbatch"):
            (self.bin / name).write_text(FAKE)
            (self.bin / name).chmod(0o755)

    def text(self, body: str, **changes: Any) -> str:
        context = {"starts": str(self.run.path / "starts"), "restarts": 3, "directives": {}}
        context |= {"workdir": str(self.folder), "other_workdir": None, **changes}
        return f"{render(PARTIAL, context, self.folder)}\n{body}\n"

    def bash(self, body: str, *, changes: dict[str, Any] | None = None, **environ: str) -> Any:
        file = self.folder / "slurm_script"
        file.write_text(self.text(body, **(changes or {})))
        given = {"PATH": f"{self.bin}:{os.environ['PATH']}", "RUN": str(self.run.path)}
        given |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "EXCLUDED": "(null)"}
        return run_program("bash", str(file), env={**given, **environ}, cwd=self.folder)

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        lines = [] if not file.exists() else [line.strip() for line in file.read_text().splitlines()]
        return [line for line in lines if " show job " not in line]

    def failed(self, job_id: str = "7", state: JobState = JobState.FAILED) -> list[FailedStart]:
        return failed_starts(self.run, read_job(self.run), SlurmJob(job_id, state))


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


BEGINS = 'rm -- "$RUN/starts/7.0"  # as the supervisor does\n'
READY = "until (( 0x$(sed -n 's/SigCgt:.//p' /proc/$PPID/status) & 0x4000 )); do :; done; "
"""Waits until the first shell has a handler for SIGTERM, because that shell starts the second one earlier."""
REQUEUED = ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=n1"]


@pytest.mark.parametrize(
    ("body", "code", "how"),
    [
        ("kill -9 $$", 137, "SIGKILL"),
        ("exit 2", 2, "exit code 2"),
        ("exec /nowhere/bin/python -m trainkit", 127, "exit code 127"),
        ("set -e; cd /nowhere", 1, "exit code 1"),
    ],
)
def test_an_end_before_the_supervisor_is_recorded_and_requeued(script, body, code, how):
    done = script.bash(body)
    assert done.returncode == code
    [line] = [line for line in done.stderr.splitlines() if line.startswith("trainkit: ended on ")]
    said(line)
    [start] = script.failed()
    assert (start.job_id, start.host, start.exit_code, start.how) == ("7", "n1", code, how)
    assert script.calls[0].split()[:3] == ["sbatch", "--test-only", "--exclude=n1"]
    assert script.calls[1:] == REQUEUED


SAVES = f"{READY}trap 'echo saved; exit 75' TERM; kill -TERM $PPID; while :; do sleep 0.01; done"


@pytest.mark.parametrize(
    ("body", "code", "printed", "recorded"),
    [
        (f"{BEGINS}exit 70", 70, "", []),  # the supervisor decides itself
        (f'{BEGINS}echo "$# arguments in $PWD"', 0, "0 arguments in {}\n", []),
        ("exit 0", 0, "", [0]),
        (f"{READY}kill -TERM $PPID; exit 143", 143, "", []),  # Slurm ends the job
        # A signal that is sent only to the first shell reaches the supervisor.
        (f"{BEGINS}exec bash -c {shlex.quote(SAVES)}", 75, "saved\n", []),
    ],
)
def test_what_is_no_failed_start_is_not_requeued(script, body, code, printed, recorded):
    done = script.bash(body)
    assert (done.returncode, done.stdout) == (code, printed.format(script.folder))
    assert [start.exit_code for start in script.failed()] == recorded
    assert script.calls == []
    assert recorded or done.stderr == ""


def test_a_node_that_slurm_cannot_do_without_is_not_tried_again(script):
    (script.folder / "refuse-sbatch").touch()
    done = script.bash("exit 2")
    assert done.returncode == 2
    said(done.stderr)
    assert [call.partition(" ")[0] for call in script.calls] == ["sbatch"]


def test_what_the_requeued_job_waits_for_and_leaves_out(script):
    script.bash("exit 2", changes={"directives": {"dependency": "afterok:3"}}, EXCLUDED="n[4-5],n9")
    # The jobs in the dependency are over, and the excluded hosts already stay excluded.
    assert script.calls[0].split()[2:4] == ["--dependency=", "--exclude=n[4-5],n9,n1"]
    said(script.calls[-1])


def test_starts_that_fail_in_a_row_are_counted(script):
    for restarts in range(5):
        script.bash("kill -9 $$", SLURM_RESTART_COUNT=str(restarts), SLURMD_NODENAME=f"n{restarts}")
    assert sum(call == "scontrol requeue 7" for call in script.calls) == 3
    assert [start.host for start in script.failed()] == [f"n{number}" for number in range(5)]
    forget_start(script.run, "7", {"SLURM_RESTART_COUNT": "4"})
    assert [start.host for start in script.failed()] == [f"n{number}" for number in range(4)]


def test_an_error_that_would_occur_again_is_tried_on_one_other_node(script):
    for restarts, code in enumerate((3, 2, 2)):
        done = script.bash(f"exit {code}", SLURM_RESTART_COUNT=str(restarts))
    assert sum(call == "scontrol requeue 7" for call in script.calls) == 2
    said(done.stderr)


def test_a_run_folder_that_cannot_be_written_does_not_stop_the_job(script):
    (script.run.path / "starts").touch()
    done = script.bash("echo works; exit 5")
    assert (done.returncode, done.stdout, script.calls) == (5, "works\n", [])
    (script.run.path / "starts").unlink()
    # Outside of a job, nothing is recorded.
    assert script.bash("exit 2", SLURM_JOB_ID="").returncode == 2
    assert script.failed() == []


def test_the_copy_is_enough(script):
    copy = script.folder / "it's a copy"
    copy.mkdir()
    gone = {"workdir": "/nowhere/at all", "other_workdir": str(copy)}
    done = script.bash(f"{BEGINS}pwd", changes=gone)
    assert (done.returncode, done.stdout) == (0, f"{copy}\n")
    said(done.stderr)
    done = script.bash(f"{BEGINS}pwd", changes={**gone, "other_workdir": None})
    assert (done.returncode, done.stdout) == (2, "")


def test_a_start_that_still_runs_has_not_failed(script):
    script.bash("kill -9 $PPID $$")
    running = SlurmJob("7", JobState.RUNNING, restarts=0)
    assert failed_starts(script.run, read_job(script.run), running) == []
    assert failed_starts(script.run, read_job(script.run), None) == []
    [start] = script.failed()
    assert (start.host, start.how) == ("n1", "killed")
    assert script.failed(state=JobState.CANCELLED) == []
    assert [found.host for found in script.failed(state=JobState.REQUEUED)] == ["n1"]


def test_slurm_names_the_node_of_a_script_that_recorded_nothing(script):
    job = SlurmJob("7", JobState.FAILED, nodes="n[3-4]", exit_code=0, exit_signal=9)
    [start] = failed_starts(script.run, read_job(script.run), job)
    assert (start.host, start.how, start.file) == ("n3", "SIGKILL", None)
