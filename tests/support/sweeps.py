"""Provides folders of sweeps with made-up runs, with curves, events and ends like a trainer's."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from trainkit.config import RunConfig, dump_effective
from trainkit.run.files import write_json
from trainkit.run.group import GroupRecord, RunGroup, Trial
from trainkit.run.rundir import RunDir

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
STARTUP_S, STEP_S = 10.0, 2.0


def stamp(seconds: float) -> str:
    """Return the time some seconds, or steps of a bench, after the start."""
    return (BEGAN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def made_up_sweep(
    folder: Path, axes: Mapping[str, Sequence[Any]], num_steps: int = 20, failed: int = -1
) -> RunGroup:
    """Create a sweep that has ended. The trial with index `failed` crashed.

    The best trial has the values nearest to the middle of each axis.
    """
    folder.mkdir()
    config = RunConfig.model_validate({"name": "mine", "train": {"steps": num_steps}})
    trials = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    plan = {"num_nodes": 1, "workers_per_node": 2, "world_size": 2, "device": "cpu", "backend": "sbatch"}
    record = GroupRecord(name="mine", backend="sbatch", job_id="77", keys=list(axes), plan=plan)
    record = replace(record, config=config.model_dump(mode="json", by_alias=True))
    write_json(folder / "sweep.json", record.to_dict(map(Trial, range(len(trials)), trials)))
    argv = ["trainkit", "submit", "mine.yaml", "--sweep", "a b=1,2"]
    write_json(folder / "provenance.json", {"argv": argv})
    group = RunGroup(folder)
    for index, values in enumerate(trials):
        away = sum(
            abs(list(axes[key]).index(value) - (len(axes[key]) - 1) / 2) for key, value in values.items()
        )
        train_made_up_point(group.run(index), config, num_steps, away, index, index == failed)
    return group


def train_made_up_point(
    run: RunDir, config: RunConfig, num_steps: int, away: float, index: int, is_failed: bool
) -> None:
    run.path.mkdir()
    run.attempt(1).create()
    run.config_file.write_text(dump_effective(config))
    entry = {"attempt": 1, "job_id": f"77_{index}", "submitted_at": stamp(0)}
    write_json(run.job_file, {"name": "mine", "attempts": [entry]})
    end_s = STARTUP_S + STEP_S * num_steps + 2.0
    state = "failed" if is_failed else "finished"
    events = [
        {"time": stamp(0), "attempt": 1, "event": "submitted"},
        {"time": stamp(0), "attempt": 1, "event": "started"},
        {"time": stamp(STARTUP_S), "attempt": 1, "event": "training", "step": 0},
        {"time": stamp(end_s), "attempt": 1, "event": "stopped" if is_failed else "finished", "state": state},
    ]
    run.events_file.write_text("".join(json.dumps(item) + "\n" for item in events))
    records = [
        {
            **{"step": step, "time": stamp(STARTUP_S + STEP_S * step), "attempt": 1},
            **{"loss": 2.0 + away / 10 + 3 * math.exp(-step / num_steps * 4), "grad_norm": 1.0 + step % 3},
            **{"lr": 1e-3 * step, "tokens_per_s": 1000.0 + 10 * index + step, "step_s": STEP_S},
            "data_wait_s": 0.5,
        }
        for step in range(1, num_steps + 1)
    ]
    run.metrics_file.write_text("".join(json.dumps(item) + "\n" for item in records))
    best = None if is_failed else {"metric": "val_loss", "value": 2.0 + away / 10, "step": num_steps}
    reason = "rank 1 failed first: OutOfMemoryError" if is_failed else "all ranks finished"
    action = "failed" if is_failed else "finished"
    end = {"state": state, "action": action, "reason": reason, "best": best, "exit_code": int(is_failed)}
    write_json(run.attempt(1).end_file, end)
