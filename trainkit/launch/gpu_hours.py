"""Limits the GPU-hours of a submission to `resources.max_gpu_hours`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainkit.backend import backend_named
from trainkit.config import LoadedConfig
from trainkit.errors import ConfigError
from trainkit.formats import plural, time_limit_s, time_text, worker_time
from trainkit.plan.launch import LaunchPlan

KEY = "resources.max_gpu_hours"
REASON = "gpu_hours"
ROUNDING = 1e-9
"""The tolerated relative rounding error in a sum of GPU-hours; without it, a submission exactly at the limit
could be rejected."""


def with_gpu_hours(loaded: LoadedConfig, plans: Sequence[LaunchPlan]) -> list[LaunchPlan]:
    """Return the plans of a submission's runs with the reason ``gpu_hours``: the GPU-hours and their limit.

    Raises ConfigError if the jobs may use more GPU-hours than the config allows. Runs on this machine have no
    time limit and are not checked. Without a limit, the plans are returned unchanged.
    """
    limit = loaded.config.resources.max_gpu_hours
    if limit is None or not all(plan.is_job for plan in plans):
        return list(plans)
    counted = [plan for plan in plans if _num_gpus(plan)]
    text = _checked(loaded, limit, counted) if counted else _no_gpus(limit, plans[0])
    return [replace(plan, reasons={**plan.reasons, REASON: text}) for plan in plans]


def _no_gpus(limit: float, plan: LaunchPlan) -> str:
    """Return a sentence which says that a limit has no effect."""
    return f"none, because device is {plan.device} ({KEY} is {limit:g})"


def _checked(loaded: LoadedConfig, limit: float, plans: Sequence[LaunchPlan]) -> str:
    """Return a sentence with the GPU-hours of runs and their limit; raise ConfigError above the limit."""
    hours = [_hours(plan, _num_jobs(plan)) for plan in plans]
    if None in hours:
        message = f"is {limit:g}, but a job without a time limit may use any number of GPU-hours"
        raise ConfigError([loaded.problem(KEY, message, "set resources.time (--time)")])
    total = sum(one or 0.0 for one in hours)
    terms = dict.fromkeys(map(_terms, plans))
    sizes = next(iter(terms)) if len(terms) == 1 else "the sum"
    runs = f" {'x' if len(terms) == 1 else 'of'} {len(plans):,} runs" if len(plans) > 1 else ""
    used = worker_time(total, "GPU")
    if total <= limit * (1 + ROUNDING):
        return f"at most {used} ({KEY} is {limit:g}): {sizes}{runs}"
    hint = "use fewer nodes or GPUs, or a shorter resources.time"
    if any(_num_jobs(plan) > 1 for plan in plans):
        once, most = sum(_hours(plan, 1) or 0.0 for plan in plans), max(plan.requeue.max for plan in plans)
        if once <= limit * (1 + ROUNDING):
            hint += f", or lower requeue.max (now {most}) to at most {int(limit / once) - 1}"
        hint += ", or limit the total time of all jobs with resources.slice"
    message = f"is {limit:g}, but the submission may use up to {used}: {sizes}{runs}"
    raise ConfigError([loaded.problem(KEY, message, f"{hint}, or raise {KEY}")])


def most_nodes(loaded: LoadedConfig, plan: LaunchPlan) -> float:
    """Return the largest number of nodes for which a plan stays within the limit; inf without a limit."""
    limit, hours = loaded.config.resources.max_gpu_hours, _hours(plan, _num_jobs(plan))
    if limit is None or not hours:
        return math.inf
    num_nodes = plan.num_nodes + plan.spare_nodes
    return limit * (1 + ROUNDING) / (hours / num_nodes) - plan.spare_nodes


def _hours(plan: LaunchPlan, num_jobs: int) -> float | None:
    """Return the GPU-hours of consecutive jobs that reach their time limit; None if they have no limit."""
    limit_s = _limit_s(plan)
    return None if limit_s is None else _num_gpus(plan) * limit_s * num_jobs / 3600


def _num_gpus(plan: LaunchPlan) -> int:
    """Return the largest number of GPUs that a job may get, including the GPUs of spare nodes."""
    return (plan.num_nodes + plan.spare_nodes) * backend_named(plan.backend).gpus_per_node(plan)


def _limit_s(plan: LaunchPlan) -> float | None:
    """Return the time limit of a job in seconds, or of all jobs together for a run with slices."""
    time = backend_named(plan.backend).job_options(plan).get("time")
    return plan.requeue.total_s or (None if time is None else time_limit_s(str(time)))


def _num_jobs(plan: LaunchPlan) -> int:
    """Return how many jobs may run one after another.

    Slices share one limit and are therefore considered one job.
    """
    requeue = plan.requeue
    return 1 if requeue.total_s is not None or not requeue.on else 1 + requeue.max


def _terms(plan: LaunchPlan) -> str:
    whole = " on whole nodes" if backend_named(plan.backend).gpus_per_node(plan) > plan.gpus_per_node else ""
    limit = f"{plural(_num_gpus(plan), 'GPU')}{whole} x {time_text(int(_limit_s(plan) or 0))}"
    num_jobs = _num_jobs(plan)
    return limit if num_jobs == 1 else f"{limit} x {num_jobs:,} jobs (requeue.max is {plan.requeue.max})"
