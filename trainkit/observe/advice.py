"""The values that the advice of a diagnosis refers to: from the config, the plan and the disk of a run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit.config import RunConfig, read_effective
from trainkit.errors import TrainkitError
from trainkit.run.files import read_json
from trainkit.run.manifest import Checkpoint, published
from trainkit.run.rundir import AttemptDir, RunDir

_MEM = re.compile(r"(\d+)([KMGT]?)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def run_values(run: RunDir, attempt: AttemptDir) -> dict[str, str]:
    """The values of an attempt, by placeholder; what is unknown, or means nothing here, is left out."""
    plan = _plan(attempt)
    values = {
        "run": quote(str(run.path)),
        "attempt": str(attempt.number),
        "attempt_dir": str(attempt.path),
        "checkpoints_dir": str(run.checkpoints_dir),
        **_plan_values(plan),
        **_disk_values(run),
    }
    if not attempt.logs_dir.exists():
        values["missing_logs_dir"] = str(attempt.logs_dir)
    try:
        config = read_effective(attempt.config_file if attempt.config_file.is_file() else run.config_file)
    except (OSError, TrainkitError):
        return values
    if not plan.get("command"):
        values["trainer_config"] = quote(str(run.config_file))
    return values | _config_values(config, plan)


def _plan(attempt: AttemptDir) -> dict[str, Any]:
    for file in (attempt.plan_file, attempt.run.plan_file):
        try:
            plan = read_json(file)
        except (OSError, ValueError):
            continue
        if isinstance(plan, dict):
            return plan
    return {}


def _plan_values(plan: Mapping[str, Any]) -> dict[str, str]:
    values = {}
    if isinstance(plan.get("command"), list):
        values["command"] = " ".join(quote(str(word)) for word in plan["command"])
    elif isinstance(plan.get("batch"), dict):
        values |= _batch_values(plan["batch"])
    if plan.get("launcher") and plan.get("command"):
        values["launcher"] = str(plan["launcher"])
    return values


def _batch_values(batch: Mapping[str, Any]) -> dict[str, str]:
    """The batch, and the next smaller one with the same global batch."""
    size, steps, whole = (
        batch.get(key) for key in ("device_batch_size", "accumulation_steps", "global_batch_size")
    )
    if not all(isinstance(value, int) for value in (size, steps, whole)):
        return {}
    assert isinstance(size, int)
    assert isinstance(steps, int)
    values = {"device_batch_size": str(size), "global_batch_size": str(whole)}
    if size < 2:
        values["smallest_batch"] = "1"
    elif batch.get("pp_microbatches") is None:
        divisor = next(number for number in range(2, size + 1) if size % number == 0)
        values |= {"smaller_batch": str(size // divisor), "more_accumulation": str(steps * divisor)}
    return values


def _config_values(config: RunConfig, plan: Mapping[str, Any]) -> dict[str, str]:
    resources = config.resources
    values: dict[str, str] = {}
    if plan.get("backend") not in (None, "local"):
        if resources.mem is None:
            values["mem_unset"] = "not set"
        elif match := _MEM.fullmatch(resources.mem):
            values |= {"mem": resources.mem, "more_mem": f"{-(-int(match[1]) * 3 // 2)}{match[2]}"}
        if resources.time is not None:
            values |= {"time": resources.time, "more_time": _twice(resources.time)}
    if not plan.get("command"):
        if config.data.num_workers:
            values["num_workers"] = str(config.data.num_workers)
        values |= {
            "lr": f"{config.optimizer.lr:g}",
            "smaller_lr": f"{config.optimizer.lr / 3:.2g}",
            "warmup_steps": str(config.schedule.warmup_steps),
            "precision": config.precision.dtype,
        }
    values["network"] = config.launch.network
    values["grace_s"] = f"{config.requeue.grace_s:g}"
    return values


def _twice(time: str) -> str:
    """Twice a time limit in Slurm's format, as ``D-HH:MM:SS``; empty for a form without a number."""
    match = _CLOCK.fullmatch(time)
    if match is None:
        return ""
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None:
        seconds = days * 86_400 + first * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = first * 3600 + (second or 0) * 60 + third
    else:
        seconds = first * 60 + (second or 0)  # MINUTES or MINUTES:SECONDS
    seconds *= 2
    clock = f"{seconds % 86_400 // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
    return f"{seconds // 86_400}-{clock}" if seconds >= 86_400 else clock


def _disk_values(run: RunDir) -> dict[str, str]:
    values: dict[str, str] = {}
    try:
        folder = run.path.resolve()
        free = shutil.disk_usage(folder).free
        values |= {"filesystem": str(_mount_point(folder)), "free": _size(free)}
        older = published(run.checkpoints_dir)[:-1]
        if older:
            values |= {"num_older": str(len(older)), "older_size": _size(sum(map(_checkpoint_bytes, older)))}
    except OSError:
        pass  # the folder may be on a disk that fails: the advice then goes without these values
    if checkpoints := published(run.checkpoints_dir):
        values["newest_step"] = str(checkpoints[-1].step)
    else:
        values["no_checkpoint"] = "no checkpoint"
    return values


def _mount_point(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if path.is_mount()), folder)


def _checkpoint_bytes(checkpoint: Checkpoint) -> int:
    return sum(path.stat().st_size for path in checkpoint.path.iterdir() if path.is_file())


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
