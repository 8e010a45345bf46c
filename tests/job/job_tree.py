"""Starts real process trees with small scripts as workers."""

import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.programs import wait_for
from tests.support.runs import launch_plan, start_local
from trainkit.backend import backend_of
from trainkit.capabilities.notifications.policy import NotifyPolicy
from trainkit.config import dump_effective
from trainkit.config.running import WEBHOOK_VARIABLE
from trainkit.config.schema import RunConfig
from trainkit.plan.launch import Batch, LaunchPlan, Layout, RequeuePolicy, WorkerEnvironment
from trainkit.plan.workload import Workload
from trainkit.run.files import read_json, read_jsonl, read_record, to_json, write_json
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir, run_lock

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


@dataclass
class Job:
    run: RunDir
    entry: AttemptRecord
    plan: LaunchPlan

    def worker_pids(self, attempt: int = 1) -> list[int]:
        """Return the pids of an attempt's workers, once all of them are ready."""
        files = [self.run.path / f"ready.{attempt}.{rank}" for rank in range(self.plan.world_size)]
        wait_for(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def wait(self, timeout_s: float = 120.0) -> None:
        wait_for(lambda: read_job(self.run).newest.alive() is False, timeout_s)

    def end(self, attempt: int = 1) -> dict[str, Any]:
        self.wait()
        return read_json(self.run.attempt(attempt).end_file)

    def signal(self, name: str = "SIGTERM") -> None:
        os.kill(self.entry.pid, signal.Signals[name])

    def stop(self, name: str = "SIGTERM") -> dict[str, Any]:
        """Signal the supervisor once all workers are ready, and return the end of the attempt."""
        self.worker_pids()
        self.signal(name)
        return self.end()

    def events(self) -> list[str]:
        return [event["event"] for event in read_jsonl(self.run.events_file)]

    def log(self, rank: int = 0, attempt: int = 1) -> str:
        return self.run.attempt(attempt).rank_log(rank).read_text()


EVENTS = ("finished", "failed", "requeued", "stalled", "slow")


@pytest.fixture
def start_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Start a job whose workers run a script. Remaining processes are killed after the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(trainkit.__file__).parents[1]))
    jobs: list[Job] = []

    def start(
        script: str,
        nodes: int = 1,
        workers: int = 1,
        grace_s: float = 20.0,
        folder: str = "run",
        command_signal: str = "auto",
        typed: Callable[[str], Sequence[str]] | None = None,
        **config: Any,
    ) -> Job:
        run = RunDir(tmp_path / folder)
        run.path.mkdir()
        worker = tmp_path / "worker.py"
        worker.write_text(PREAMBLE + textwrap.dedent(script))
        notify = NotifyPolicy(EVENTS, WEBHOOK_VARIABLE, **config.pop("notify", {}))
        num_ranks, argv = nodes * workers, (sys.executable, "-u", str(worker))
        plan = launch_plan(
            backend="local",
            num_nodes=nodes,
            workers_per_node=workers,
            layout=Layout(dp_shard=num_ranks),
            batch=Batch(1, 1, num_ranks, num_ranks),
            grace_s=grace_s,
            workload=Workload(tuple(typed(shlex.join(argv)) if typed else argv), signal=command_signal),
            # A failed worker ends the run unless the test requests otherwise.
            requeue=read_record(RequeuePolicy, {"on": (), **config.get("requeue", {})}, strict=True),
            parts={"slow_ranks": config.get("requeue", {}), "notifications": to_json(notify)},
            environment=WorkerEnvironment(config.get("launch", {}).get("env", {})),
        )
        write_json(run.job_file, {"backend": "local", "name": "run", "cwd": str(tmp_path), "attempts": []})
        config_text = dump_effective(RunConfig.model_validate(config))
        with run_lock(run):
            entry = start_local(run, config_text, json.dumps(plan.to_dict()), "submit")
        jobs.append(Job(run, entry, plan))
        return jobs[-1]

    yield start
    for job in jobs:
        entry = read_job(job.run).newest if job.run.path.is_dir() else job.entry
        if entry is not None and entry.alive():
            backend_of(entry).kill(job.run, entry)
