"""Real process trees with small scripts as workers."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit.config import dump_effective
from trainkit.config.schema import RunConfig
from trainkit.job.record import Liveness, liveness, newest_entry, run_lock
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.rundir import RunDir, read_json, read_jsonl, write_json
from trainkit.submit.local import kill_job, start_attempt

PREAMBLE = """
import json, os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TRAINKIT_JOB_ATTEMPT"])
RUN_DIR = os.environ["TRAINKIT_JOB_RUN_DIR"]
asked = []
def listen():
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda n, f: asked.append(signal.Signals(n).name))
def ready():
    with open(f"{RUN_DIR}/ready.{ATTEMPT}.{RANK}.part", "w") as f:
        f.write(str(os.getpid()))
    os.rename(f.name, f.name[:-5])
def save_when_asked():
    listen(); ready()
    while not asked:
        time.sleep(0.02)
    print("asked by", asked[0], flush=True)
    sys.exit(75)
"""


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """The first true value of a condition."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("waited too long")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Job:
    """A run that a test has started."""

    run: RunDir
    entry: dict[str, Any]
    plan: LaunchPlan

    def worker_pids(self, attempt: int = 1) -> list[int]:
        """The pids of an attempt's workers, when all have said that they are ready."""
        files = [self.run.path / f"ready.{attempt}.{rank}" for rank in range(self.plan.world_size)]
        wait_for(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def wait(self, timeout_s: float = 20.0) -> None:
        wait_for(lambda: liveness(newest_entry(self.run)) is Liveness.GONE, timeout_s)

    def end(self, attempt: int = 1) -> dict[str, Any]:
        self.wait()
        return read_json(self.run.attempt(attempt).end_file)

    def events(self) -> list[str]:
        return [event["event"] for event in read_jsonl(self.run.events_file)]

    def log(self, rank: int = 0, attempt: int = 1) -> str:
        return self.run.attempt(attempt).rank_log(rank).read_text()


@pytest.fixture
def start_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Start a job whose workers run a script; whatever is left of it is killed after the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(trainkit.__file__).parents[1]))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    jobs: list[Job] = []

    def start(
        script: str,
        nodes: int = 1,
        workers: int = 1,
        grace_s: float = 20.0,
        folder: str = "run",
        **config: Any,
    ) -> Job:
        run = RunDir(tmp_path / folder)
        run.path.mkdir()
        worker = tmp_path / "worker.py"
        worker.write_text(PREAMBLE + textwrap.dedent(script))
        plan = LaunchPlan(
            backend="local",
            num_nodes=nodes,
            workers_per_node=workers,
            device="cpu",
            layout=Layout(dp_shard=nodes * workers),
            batch=Batch(1, 1, nodes * workers, nodes * workers),
            lr=0.1,
            threads_per_worker=1,
            grace_s=grace_s,
            reasons={},
            command=(sys.executable, "-u", str(worker)),
        )
        write_json(run.job_file, {"backend": "local", "name": "run", "cwd": str(tmp_path), "attempts": []})
        config_text = dump_effective(RunConfig.model_validate(config))
        with run_lock(run):
            entry = start_attempt(run, config_text, json.dumps(plan.to_dict()), "submit")
        jobs.append(Job(run, entry, plan))
        return jobs[-1]

    yield start
    for job in jobs:
        entry = newest_entry(job.run) if job.run.path.is_dir() else job.entry
        if entry is not None and liveness(entry) is Liveness.ALIVE:
            kill_job(job.run, entry)
