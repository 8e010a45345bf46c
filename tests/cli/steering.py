"""Provides a folder where tests type `trainkit`, with small scripts as workers."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.golden.__main__ import unpack_run
from tests.support.programs import run_program, wait_for
from trainkit.backend import backend_of
from trainkit.cli.main import main
from trainkit.errors import UsageError
from trainkit.run.files import read_json, write_json
from trainkit.run.group import RunGroup
from trainkit.run.process import ProcessId
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

LIMIT_S = 180
CONFIG = """
name: small
device: cpu
train: {steps: 10, device_batch_size: 1, global_batch_size: 4}
requeue: {grace_s: 20}
"""
PREAMBLE = """
import json, os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TRAINKIT_JOB_ATTEMPT"])
RUN_DIR = os.environ["TRAINKIT_JOB_RUN_DIR"]
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, lambda n, f: asked.append(signal.Signals(n).name))
print(f"attempt {ATTEMPT} rank {RANK}", flush=True)
"""
SAVES = """
while not asked:
    time.sleep(0.02)
print("asked by", asked[0], flush=True)
sys.exit(75)
"""


Ended = subprocess.CompletedProcess[str]


def with_code(done: Ended, code: int | None) -> Ended:
    """Return an ended command with this exit code; None stands for any code."""
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


class Desk:
    """A folder with a config, a separate state folder, and the command `trainkit`."""

    def __init__(self, folder: Path) -> None:
        self.folder = self._root = folder
        self.config = folder / "small.yaml"
        self.config.write_text(CONFIG)
        self.worker = folder / "worker.py"
        self.works(SAVES)
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(Path(trainkit.__file__).parents[1]),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def works(self, script: str) -> None:
        """Set the script that the workers run."""
        self.worker.write_text(PREAMBLE + textwrap.dedent(script))

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("driver.py")), str(self.worker), *args]

    def trainkit(self, *args: str, within: Sequence[str] = (), code: int | None = None) -> Ended:
        """Run `trainkit` to its end, `within` another command, and check its exit code if one is given."""
        where = {"cwd": self.folder, "env": self.environ, "timeout": LIMIT_S}
        return with_code(run_program(*within, *self.argv(*args), **where), code)

    def types(self, *args: str, code: int | None = None, **options: Any) -> Ended:
        """Run `trainkit` without replacing the trainer or a COMMAND with the worker."""
        where = {"cwd": self.folder, "env": self.environ, "timeout": 400, **options}
        return with_code(run_program(sys.executable, "-m", "trainkit", *args, **where), code)

    def typed(self, *args: str, code: int | None = None) -> Ended:
        """Run a command in this process, for commands that start nothing."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            for name, value in {"COLUMNS": "80", **self.environ}.items():
                patch.setenv(name, value)
            found = main([*args])
        return with_code(subprocess.CompletedProcess(args, found, out.getvalue(), err.getvalue()), code)

    def refused(self, *args: str) -> dict[str, Any]:
        """Return the error of a refused command, which starts nothing."""
        done = self.typed(*args, "--json")
        value: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode, value["exit_code"]) == (2, 2)
        assert not (self.folder / "runs").exists()
        return value

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start `trainkit` in the background of the test."""
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(
            self.argv(*args), cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, **given
        )

    def submit(self, *args: str) -> RunDir:
        """Submit a run, and wait until every rank of the first attempt has started."""
        done = self.trainkit("submit", str(self.config), *args, code=0)
        run = RunDir(done.stdout.splitlines()[0])
        for rank in range(read_json(run.plan_file)["world_size"]):
            self.wait_for_log(run, f"attempt 1 rank {rank}", rank=rank)
        return run

    def wait_for_log(self, run: RunDir, text: str, attempt: int = 1, rank: int = 0) -> None:
        log = run.attempt(attempt).rank_log(rank)
        wait_for(lambda: log.exists() and text in log.read_text())

    def wait_for_end(self, run: RunDir, attempt: int = 1) -> dict[str, Any]:
        wait_for(lambda: read_job(run).newest.alive() is False)
        return read_json(run.attempt(attempt).end_file)

    def status(self, run: RunDir) -> dict[str, Any]:
        return json.loads(self.typed("status", str(run.path), "--json").stdout)

    def tidy(self) -> None:
        """Kill the remaining processes of the runs that were started here."""
        for sweep_file in self._root.rglob("sweep.json"):
            with suppress(UsageError):  # the record of a run may be damaged
                process = RunGroup(sweep_file.parent).record.process
                if process is not None and process.alive():
                    os.kill(process.pid, signal.SIGKILL)
        for job_file in self._root.rglob("job.json"):
            run = RunDir(job_file.parent)
            entry = read_job(run).newest
            if entry is not None and entry.alive():
                backend_of(entry).kill(run, entry)


def unpack_live_run(source: Path, folder: Path) -> Path:
    """Make a recorded run `live` in the runs/ of a folder, as if this process were its supervisor."""
    run = unpack_run(source, folder / "live", os.uname().nodename).rename(folder / "runs" / "live")
    job, own = read_json(run / "job.json"), ProcessId.of(os.getpid())
    job["attempts"][0].update(pid=own.pid, boot_id=own.boot_id, start_ticks=own.start_ticks)
    write_json(run / "job.json", job)
    (run / "attempts/001/end.json").unlink()
    return run


@pytest.fixture
def desk(tmp_path):
    """Make a folder to type `trainkit` in, and kill the processes that still run after the test."""
    desk = Desk(tmp_path)
    yield desk
    desk.tidy()
