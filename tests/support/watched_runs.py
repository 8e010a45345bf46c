"""Provides folders of runs in every state of `trainkit watch`, written by hand at a fixed time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from trainkit.capabilities.health.samples import health_file
from trainkit.config import dump_effective
from trainkit.config.schema import RunConfig
from trainkit.run.files import append_jsonl, as_utc, write_json
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

NOW = datetime(2026, 1, 2, 12, 0, 0, tzinfo=timezone.utc)
JOB_ID = "4711"
STEP_S = 2.0


def ago(seconds: float) -> str:
    return as_utc(NOW - timedelta(seconds=seconds))


class Watched:
    """Writes the files of a run."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        gpus: int = 4,
        steps: int = 2000,
        command: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        attempts: int = 1,
    ) -> None:
        self.run, self.nodes, self.gpus, self.number = RunDir(folder), nodes, gpus, attempts
        folder.mkdir(parents=True)
        for number in range(1, attempts + 1):
            self.run.attempt(number).create()
        values = RunConfig.model_validate({"train": {"steps": steps}, **(config or {})})
        self.run.config_file.write_text(dump_effective(values))
        plan = {"num_nodes": nodes, "workers_per_node": gpus, "world_size": nodes * gpus, "device": "cuda"}
        slurm = {"sbatch": {"time": "02:00:00"}, "srun": {}}
        write_json(self.run.plan_file, {**plan, "command": command, "health_every_s": 10.0, "slurm": slurm})
        self.steps = steps

    def job(self, started_s: float = 1400.0) -> Watched:
        """Write the entries of job.json. The newest attempt started `started_s` ago."""
        entries = [
            {
                "attempt": number,
                "job_id": JOB_ID,
                "backend": "sbatch",
                "submitted_at": ago(started_s + 60 + 3600 * (self.number - number)),
                "started_at": ago(started_s + 3600 * (self.number - number)),
            }
            for number in range(1, self.number + 1)
        ]
        write_json(self.run.job_file, {"name": self.run.name, "backend": "sbatch", "attempts": entries})
        self.event(started_s, "started", world_size=self.nodes * self.gpus)
        return self

    def event(self, age_s: float, event: str, attempt: int | None = None, **fields: Any) -> Watched:
        record = {"time": ago(age_s), "attempt": attempt or self.number, "event": event, **fields}
        append_jsonl(self.run.events_file, record)
        return self

    def metrics(
        self, first: int, last: int, newest_age_s: float = 1.0, attempt: int | None = None
    ) -> Watched:
        with self.run.metrics_file.open("a") as stream:
            for step in range(first, last + 1):
                age_s = newest_age_s + (last - step) * STEP_S
                stream.write(json.dumps(self.record(step, age_s, attempt or self.number)) + "\n")
        return self

    def record(self, step: int, age_s: float, attempt: int) -> dict[str, Any]:
        wave = math.sin(step)
        return {
            **{"step": step, "time": ago(age_s), "attempt": attempt},
            **{"loss": 2 + 8 / (1 + step / 50) + wave / 20, "grad_norm": 0.6 + wave / 5},
            **{"lr": 3e-4 * min(1.0, step / 100), "tokens": step * 65_536},
            **{"tokens_per_s": 32_768 + 900 * wave, "tokens_per_s_per_gpu": 4096.0, "mfu": 0.412},
            **{"step_s": STEP_S * (0.95 + wave / 50), "data_wait_s": 0.012, "mem_gib_peak": 61.25},
            **{"samples_seen": step * 32, "slowest_rank": 6, "slowest_host": "node002"},
            **{"slowest_rank_s": 0.3217, "other_ranks_s": 0.3189},
        }

    def health(self, age_s: float = 4.0, **changed: Mapping[str, Any]) -> Watched:
        """Write a sample of each node.

        `changed` are values of all GPUs, and `host_` values belong to the node with that host.
        """
        for node in range(self.nodes):
            host = f"node{node + 1:03d}"
            change = dict(changed.get(host, {}))
            own = {key[5:]: change.pop(key) for key in list(change) if key.startswith("host_")}
            gpus = [
                {
                    "index": index,
                    "name": "NVIDIA H100 80GB HBM3",
                    "util_percent": 96 + (node + index) % 4,
                    "mem_used_gib": 63.0 + index,
                    "mem_total_gib": 79.65,
                    "power_w": 640.0,
                    "temperature_c": 61 + index,
                    "throttle": ["power"],
                    "ecc_errors": 0,
                    **change,
                }
                for index in range(self.gpus)
            ]
            sample = {
                "time": ago(age_s),
                "attempt": self.number,
                "host": host,
                "cpu_percent": 11.5,
                "mem_used_gib": 210.0,
                "mem_total_gib": 2015.0,
                "job_mem_gib": 180.0,
                "net_rx_mib_s": 120.4,
                "net_tx_mib_s": 118.2,
                "disk_read_mib_s": 3.1,
                "disk_write_mib_s": 41.0,
                "gpus": gpus,
                **own,
            }
            file = health_file(self.run, host)
            file.parent.mkdir(exist_ok=True)
            append_jsonl(file, sample)
        return self

    def saved(self, step: int, age_s: float, attempt: int | None = None) -> Watched:
        self.event(age_s + 4, "checkpoint_begin", attempt, step=step, reason="every_steps")
        return self.event(age_s, "checkpoint_commit", attempt, step=step, reason="every_steps")

    def log(self, lines: Sequence[str], rank: int = 0) -> Watched:
        self.run.attempt(self.number).rank_log(rank).write_text("".join(f"{line}\n" for line in lines))
        return self

    def end(self, age_s: float, **fields: Any) -> Watched:
        write_json(self.run.attempt(self.number).end_file, {"time": ago(age_s), "verdict": None, **fields})
        return self


def running_job(job_ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, SlurmJob]:
    """Return Slurm's answer for a job that runs for another 97 minutes."""
    end = NOW + timedelta(minutes=97)
    return {
        job_id: SlurmJob(job_id, JobState.RUNNING, slurm_state="RUNNING", end_time=end) for job_id in job_ids
    }


def requeued_job(job_ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, SlurmJob]:
    """Return Slurm's answer for a job that waits for resources again."""
    return {
        job_id: SlurmJob(job_id, JobState.REQUEUED, slurm_state="PENDING", reason="Resources", restarts=1)
        for job_id in job_ids
    }


def unreachable(job_ids: Sequence[str], warn: Callable[[str], None]) -> None:
    """Warn that Slurm cannot be reached, and return no answer."""
    warn("squeue cannot reach Slurm: Connection refused: the state of 1 Slurm jobs is unknown")


def running(folder: Path) -> RunDir:
    """Return a run on two hosts, one with a slow rank and a hot GPU, after a checkpoint."""
    made = Watched(folder).job().event(1390, "training", step=0, total_steps=2000)
    made.metrics(1, 640).event(1380, "first_step", step=1)
    made.event(300, "evaluated", step=500, val_loss=2.8021).saved(500, 290)
    slow = {"phase": "compute", "ratio": 1.62, "own_s": 3.1, "usual_s": 1.91}
    made.event(75, "slow_rank", rank=6, host="node002", step=610, since_step=600, **slow)
    made.event(500, "checkpoint_rejected", set_aside="step-00000400.rejected", reason="a hash differs")
    made.health(node002={"temperature_c": 91, "throttle": ["power", "heat"]})
    return made.log([f"12:00:{n:02} step={n}/2000 loss=2.58" for n in range(40)]).run


def finished(folder: Path) -> RunDir:
    made = Watched(folder, steps=600).job().event(1390, "training", step=0, total_steps=600)
    made.metrics(1, 600, 130).event(128, "evaluated", step=600, val_loss=2.6121).saved(600, 125).health(140)
    end = {"state": "finished", "action": "finished", "reason": "all workers finished"}
    made.event(120, "finished", state="finished", exit_code=0, reason="all workers finished")
    return made.log(["finished after step 600 of 600"]).end(120, exit_code=0, **end).run


def preempted(folder: Path) -> RunDir:
    """Return a run whose second attempt waits in the queue."""
    made = Watched(folder).job(900).event(890, "training", step=0, total_steps=2000)
    made.metrics(1, 420, 40).event(35, "signal", signal="SIGTERM").saved(420, 33).health(45)
    reason = "saved after SIGTERM at a preemption; resumes (restart 1)"
    made.event(31, "requeue_decision", action="requeue", cause="preempted", reason=reason)
    made.event(30, "stopped", state="stopped", exit_code=75, reason=reason)
    end = {"state": "stopped", "action": "requeue", "cause": "preempted", "exit_code": 75, "reason": reason}
    return made.log(["checkpoint step=420 reason=stop"]).end(30, **end).run


def failed(folder: Path) -> RunDir:
    """Return a run whose rank 5 ran out of memory 80 steps after a checkpoint, in the second attempt."""
    made = Watched(folder, attempts=2).job(800).event(790, "training", step=100, total_steps=2000)
    made.metrics(1, 110, 4000, attempt=1).saved(100, 4020, attempt=1)
    made.metrics(101, 280, 300).saved(200, 455).health(310)
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"
    verdict = {"rank": 5, "host": "node002", "step": 281, "type": "OutOfMemoryError", "message": message}
    made.event(290, "rank_failed", **verdict)
    reason = "rank 5 failed; not started again: the same failure as in the previous attempt"
    made.event(288, "stopped", state="failed", exit_code=1, reason=reason)
    made.log(["Traceback (most recent call last):", f"torch.OutOfMemoryError: {message}"], rank=5)
    end = {"state": "failed", "action": "failed", "exit_code": 1, "reason": reason}
    return made.end(288, **{**end, "verdict": verdict}).run


def command(folder: Path) -> RunDir:
    """Return a run of a COMMAND, whose output contains step and loss."""
    config = {"logging": {"pattern": r"iter (?P<step>\d+): loss (?P<loss>[\d.]+)"}}
    made = Watched(folder, command=["python", "train.py"], config=config).job(300).health()
    return made.log([f"iter {n}: loss {3 - n / 100:.4f}, time 12 ms" for n in range(60)]).run


def large(folder: Path, nodes: int = 128) -> RunDir:
    """Return a run of 1,024 ranks. Two nodes have problems, and one is silent."""
    made = Watched(folder, nodes=nodes, gpus=1024 // nodes, steps=100_000).job(1400)
    made.event(1390, "training", step=0, total_steps=100_000).metrics(1, 640).saved(600, 80)
    slow = {"phase": "compute", "ratio": 2.04, "own_s": 3.9, "usual_s": 1.91}
    made.event(20, "slow_rank", rank=500, host="node063", step=630, since_step=620, **slow)
    changed = {
        "node077": {"ecc_errors": 3},
        "node100": {"util_percent": 12},
        "node128": {"host_time": ago(95)},
    }
    return made.health(4.0, **changed).log(["step=640/100000 loss=2.58"]).run
