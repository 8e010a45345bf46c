"""Reads and writes the state of each evaluation, and the metrics that evaluations have measured.

Each evaluation has a folder ``evaluations/step-NNNNNNNN`` in the run folder. The process that evaluates a
checkpoint holds the lock ``.lock`` in the folder of the evaluation until the process exits. ``state.json`` is
written only while this lock is held, so at most one process evaluates a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainkit.capabilities.evaluations.evaluations_plan import PREFIX
from trainkit.folders import ensure_folder
from trainkit.locks import file_lock, is_locked
from trainkit.run.files import append_jsonl, read_json, read_object, read_record, to_json, utc_now, write_json
from trainkit.run.manifest import SEAL, Checkpoint
from trainkit.run.process import ProcessId
from trainkit.run.rundir import CHECKPOINT_PREFIX, RunDir

State = Literal["waiting", "running", "done", "failed", "skipped", "damaged"]
OPEN = ("waiting", "running")
"""The states of an evaluation that has not ended."""
STATE_NAME = "state.json"
BY, BEST_BY = "evaluation", "evaluation-best"
"""The holders of pins: an evaluation that has not ended, and the best checkpoint so far."""


@dataclass(frozen=True)
class Evaluation:
    """The state of the evaluation of one checkpoint."""

    step: int
    state: State = "waiting"
    time: str = ""
    """The time of the last change of `state`."""
    command: str = ""
    export: str | None = None
    seal: str | None = None
    """The hash of the manifest; a checkpoint that was saved again has another hash."""
    job_id: str | None = None
    """The Slurm job of the evaluation; None if the evaluation was not submitted."""
    process: ProcessId | None = None
    """The newest process of the evaluation; None if no process was started."""
    num_starts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """The measured metrics by name, without `PREFIX`."""
    reason: str | None = None
    """Why the evaluation failed or was skipped, or what is wrong with the checkpoint."""
    log_tail: list[str] = field(default_factory=list)
    """The last lines of the log of a failed evaluation."""

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


def evaluations_dir(run: RunDir) -> Path:
    """Return the folder of all evaluations of a run, which does not exist before the first one."""
    return run.path / "evaluations"


def folder_of(run: RunDir, step: int) -> Path:
    """Return the folder of an evaluation."""
    return evaluations_dir(run) / run.checkpoint_dir(step).name


def log_of(run: RunDir, step: int) -> Path:
    """Return the log of an evaluation, with the output of the newest start of its command."""
    return folder_of(run, step) / "log.txt"


def step_lock(run: RunDir, step: int) -> Path:
    """Return the lock that the process of an evaluation holds until it exits."""
    return folder_of(run, step) / ".lock"


@contextmanager
def queue_lock(run: RunDir, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the lock with which processes change the queue of a run's evaluations, one at a time.

    Raises LockBusy after `timeout_s`, and OSError if the run folder cannot be written.
    """
    ensure_folder(evaluations_dir(run), 0o700)
    with file_lock(evaluations_dir(run) / ".lock", timeout_s, quiet=True):
        yield


def seal_of(checkpoint: Checkpoint) -> str | None:
    """Return the hash of a checkpoint's manifest; None if the manifest cannot be read."""
    found = read_object(checkpoint.manifest_file).get(SEAL)
    return found if isinstance(found, str) else None


def read_evaluation(run: RunDir, step: int) -> Evaluation | None:
    """Return the state of an evaluation; None if there is none, or if its file cannot be read."""
    content = read_object(folder_of(run, step) / STATE_NAME)
    return read_record(Evaluation, {**content, "step": step}) if content else None


def read_evaluations(run: RunDir) -> dict[int, Evaluation]:
    """Return the evaluations of a run by step, in ascending order."""
    found = {}
    for file in sorted(evaluations_dir(run).glob(f"{CHECKPOINT_PREFIX}*/{STATE_NAME}")):
        digits = file.parent.name.removeprefix(CHECKPOINT_PREFIX)
        if digits.isdecimal() and (one := read_evaluation(run, int(digits))) is not None:
            found[one.step] = one
    return dict(sorted(found.items()))


def write_evaluation(run: RunDir, evaluation: Evaluation) -> None:
    """Write the state of an evaluation; the caller must hold the lock of the evaluation."""
    write_json(folder_of(run, evaluation.step) / STATE_NAME, {**to_json(evaluation), "time": utc_now()})


def is_evaluating(run: RunDir, step: int) -> bool:
    """Return whether a process holds the lock of an evaluation."""
    return is_locked(step_lock(run, step))


class ResultError(ValueError):
    """Raised if a command has not written its metrics as it should."""


def read_result(file: Path) -> dict[str, float]:
    """Return the metrics in the file that a command wrote; raise ResultError if it contains other values."""
    try:
        found = read_json(file)
    except FileNotFoundError:
        raise ResultError("the command wrote no metrics to the file TRAINKIT_EVAL_OUT") from None
    except (OSError, ValueError) as error:
        raise ResultError(f"the file TRAINKIT_EVAL_OUT cannot be read: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ResultError("the file TRAINKIT_EVAL_OUT does not contain a JSON object with metrics")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ResultError(f"the metric {name} in TRAINKIT_EVAL_OUT is not a finite number: {value!r:.60}")
    return {str(name).removeprefix(PREFIX): float(value) for name, value in found.items()}


def append_metrics(run: RunDir, step: int, metrics: Mapping[str, float]) -> None:
    """Add the metrics of a step to the run's curves; the caller must hold the `queue_lock`."""
    values = {f"{PREFIX}{name}": value for name, value in metrics.items()}
    append_jsonl(evaluations_dir(run) / "metrics.jsonl", {"time": utc_now(), "step": step, **values})


def best_of(evaluations: Iterable[Evaluation], metric: str | None, mode: str) -> Evaluation | None:
    """Return the evaluation with the best value of a metric, the earliest of equal ones; None without one."""
    sign = -1.0 if mode == "max" else 1.0
    measured = [one for one in evaluations if one.state == "done" and metric in one.metrics]
    return min(measured, key=lambda one: (sign * one.metrics[metric or ""], one.step), default=None)
