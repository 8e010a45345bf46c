"""Jobs with small scripts as workers."""

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from job_tree import PREAMBLE, Job
from slurm_job import Slurm

import trainkit
from tests.support.runs import attempt, launch_plan, make_attempt, start_local
from trainkit.backend import backend_of
from trainkit.backends.slurm import allocation, claim_attempt
from trainkit.backends.slurm.attempt_watch import SlurmAttemptWatch
from trainkit.capabilities.notifications.policy import NotifyPolicy
from trainkit.config import dump_effective
from trainkit.config.running import WEBHOOK_VARIABLE
from trainkit.config.schema import RunConfig
from trainkit.job import supervisor
from trainkit.plan.launch import Batch, Layout, RequeuePolicy
from trainkit.run.files import read_record, to_json, write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir, run_lock

__all__ = ["attempt"]
EVENTS = ("finished", "failed", "requeued", "stalled", "slow")


@pytest.fixture
def start_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Start a job whose workers run a script; whatever is left of it is killed after the test."""
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
            command=tuple(typed(shlex.join(argv)) if typed else argv),
            command_signal=command_signal,
            # A worker that fails is the end, where a test does not say otherwise.
            requeue=read_record(RequeuePolicy, {"on": (), **config.get("requeue", {})}, strict=True),
            parts={"slow_ranks": config.get("requeue", {}), "notifications": to_json(notify)},
            env=config.get("launch", {}).get("env", {}),
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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(claim_attempt, "ENTRY_TIMEOUT_S", 0.2)
    return make_attempt(tmp_path / "run", ["requeue.max_crashes=1"]).run


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A Slurm that says what a test wants, with a job of one host."""
    slurm = Slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    monkeypatch.setattr(SlurmAttemptWatch, "poll_interval_s", 0.05)
    monkeypatch.setattr(supervisor, "redirect_output", lambda log: None)
    monkeypatch.setattr(supervisor.processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(allocation, "expand_hosts", lambda text: [text])
    monkeypatch.setattr(allocation, "query_job", lambda job_id, patience_s=0.0: slurm.job)
    monkeypatch.setattr(allocation, "lost_hosts", lambda job_id, hosts, is_running: slurm.lost)
    monkeypatch.setattr(
        allocation, "node_states", lambda hosts: {host: "down*" for host in hosts if host in slurm.down}
    )
    monkeypatch.setattr(allocation.shutil, "which", lambda program, **_: program)
    monkeypatch.setattr(allocation, "requeue", slurm.requeue)
    return slurm
