"""Summarizes health samples for `watch`, for the report and for advice on out-of-memory failures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from trainkit.capabilities.health.samples import HealthSample, health_dir, health_file, samples_reversed
from trainkit.capability import HostView, Reading
from trainkit.run.files import Record, mean, numbers, read_jsonl, seconds_between
from trainkit.run.rundir import AttemptDir, RunDir

SILENT_SAMPLES = 3
"""A node is considered silent if this number of consecutive samples is missing."""
HOTTEST_C, FULL = 90, 0.95
IDLE_SHARE = 0.5
"""A node's GPUs are considered unusually idle if their utilization is below this fraction of the median over
all nodes."""
SILENT, BROKEN, LIMITED, UNUSUAL = 5, 4, 2, 1
"""Severities of node problems; a higher number means a more severe problem."""
HEALTH_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes of samples to parse for all nodes together."""
MAX_SAMPLES = 1000
"""Maximum number of a host's newest samples to search for samples from one attempt."""


def hosts_of(samples: Mapping[str, HealthSample], reading: Reading, now: datetime) -> dict[str, HostView]:
    """Describe the nodes of the newest attempt, or of earlier attempts if the newest has no samples yet."""
    own = {host: sample for host, sample in samples.items() if sample.attempt == reading.attempt} or samples
    busy = [share for share in (mean(sample.gpus, "util_percent") for sample in own.values()) if share]
    usual = statistics.median(busy) if len(busy) > 2 else None
    every_s = reading.plan.number("health_every_s")
    silent_s = None if every_s is None else SILENT_SAMPLES * float(every_s)
    silent_s = silent_s if reading.state in ("running", "stopping", "starting") else None
    return {host: _host(sample, now, usual, silent_s) for host, sample in own.items()}


def _host(
    sample: HealthSample, now: datetime, usual_percent: float | None, silent_s: float | None
) -> HostView:
    gpus = sample.gpus
    age_s = seconds_between(sample.text("time"), now)
    gpu_percent = mean(gpus, "util_percent")
    found = list(_problems(sample, gpus))
    if silent_s is not None and age_s is not None and age_s > silent_s:
        found.append((SILENT, f"no sample for {age_s:.0f} s"))
    if usual_percent is not None and gpu_percent is not None and gpu_percent < IDLE_SHARE * usual_percent:
        found.append((UNUSUAL, f"GPUs {gpu_percent:.0f} % busy, usual {usual_percent:.0f} %"))
    fullest = max(gpus, key=lambda gpu: gpu.number("mem_used_gib") or 0.0, default=Record({}))
    values = {
        "age_s": age_s,
        "cpu_percent": sample.number("cpu_percent"),
        "mem_used_gib": sample.number("mem_used_gib"),
        "mem_total_gib": sample.number("mem_total_gib"),
        "job_mem_gib": sample.number("job_mem_gib"),
        "num_gpus": len(gpus),
        "gpu_percent": gpu_percent,
        "gpu_mem_used_gib": fullest.number("mem_used_gib"),
        "gpu_mem_total_gib": fullest.number("mem_total_gib"),
        "temperature_c": max(map(float, numbers(gpus, "temperature_c")), default=None),
        "power_w": sum(map(float, powers)) if (powers := numbers(gpus, "power_w")) else None,
        "net_mib_s": _sum(sample, "net_rx_mib_s", "net_tx_mib_s"),
        "disk_mib_s": _sum(sample, "disk_read_mib_s", "disk_write_mib_s"),
    }
    return HostView(values, found)


def _problems(sample: HealthSample, gpus: Sequence[Record]) -> Iterator[tuple[int, str]]:
    """Yield the problems found in a node's sample, each with its severity."""
    by_problem: dict[tuple[int, str], list[int | None]] = {}
    for gpu in gpus:
        for problem in _gpu_problems(gpu):
            by_problem.setdefault(problem, []).append(gpu.count("index"))
    for (severity, text), indices in by_problem.items():
        name = f"GPU {indices[0]}" if len(indices) == 1 else f"{len(indices)} GPUs"
        yield severity, f"{name}: {text}"
    used, total = sample.number("mem_used_gib"), sample.number("mem_total_gib")
    if used is not None and total and used > FULL * total:
        yield LIMITED, f"memory {used / total:.0%} full"


def _gpu_problems(gpu: Record) -> Iterator[tuple[int, str]]:
    if gpu.values.get("ecc_errors"):
        yield BROKEN, "ECC errors"
    # Ignore the power limit, because a busy GPU normally reaches it.
    limits = [reason for reason in gpu.texts("throttle") if reason != "power"]
    if limits:
        yield LIMITED, f"throttled ({', '.join(limits)})"
    elif (gpu.number("temperature_c") or 0.0) >= HOTTEST_C:
        yield LIMITED, f"{HOTTEST_C} °C or more"


def _sum(sample: HealthSample, *keys: str) -> float | None:
    values = [value for value in map(sample.number, keys) if value is not None]
    return sum(values) if values else None


@dataclass(frozen=True)
class NodeUse:
    """The utilization of one node; unmeasured values are None."""

    host: str
    num_samples: int
    cpu_mean_percent: float | None
    job_mem_peak_gib: float | None
    job_mem_by: str | None
    """The method that measured `job_mem_peak_gib`: ``cgroup`` or ``processes``."""
    mem_total_gib: float | None
    gpu_mean_percent: float | None
    gpu_mem_peak_gib: float | None
    gpu_mem_total_gib: float | None


def read_nodes(run: RunDir) -> list[NodeUse]:
    """Return the utilization of each node, computed from its samples.

    If the samples exceed `HEALTH_BYTES`, an equal fraction of each node's samples is skipped.
    """
    files = sorted(health_dir(run).glob("*.jsonl"))
    every = max(1, sum(file.stat().st_size for file in files) // HEALTH_BYTES)
    found = []
    for file in files:
        samples = list(map(HealthSample, read_jsonl(file, every=every)))
        gpus = [gpu for sample in samples for gpu in sample.gpus]
        found.append(
            NodeUse(
                host=file.stem,
                num_samples=len(samples),
                cpu_mean_percent=mean(samples, "cpu_percent"),
                job_mem_peak_gib=max(numbers(samples, "job_mem_gib"), default=None),
                job_mem_by=samples[-1].text("job_mem_by") if samples else None,
                mem_total_gib=max(numbers(samples, "mem_total_gib"), default=None),
                gpu_mean_percent=mean(gpus, "util_percent"),
                gpu_mem_peak_gib=max(numbers(gpus, "mem_used_gib"), default=None),
                gpu_mem_total_gib=max(numbers(gpus, "mem_total_gib"), default=None),
            )
        )
    return found


def memory_in_use(attempt: AttemptDir, host: str) -> str:
    """Return the memory use in an attempt's last sample, such as ``61.2 of 64.0 GiB``, or "" if unknown."""
    try:
        samples = islice(samples_reversed(health_file(attempt.run, host)), MAX_SAMPLES)
        sample = next((one for one in samples if one.attempt == attempt.number), HealthSample({}))
    except OSError:
        return ""
    used, total = sample.number("mem_used_gib"), sample.number("mem_total_gib")
    return "" if used is None or total is None else f"{used:.1f} of {total:.1f} GiB"
