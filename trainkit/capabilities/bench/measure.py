"""Measures the runs of a bench: computes one summary row per run from the files in the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from statistics import fmean, median, quantiles
from typing import Any

from trainkit.capabilities.bench.run_bench import (
    COUNTED_PROFILED_STEPS,
    FINISHED,
    Bench,
    BenchRun,
    profiled_ranks,
)
from trainkit.formats import JsonObject
from trainkit.run.events import StepRecord, training_curve
from trainkit.run.files import numbers, parse_time

KERNEL_OF_NCCL = "nccl"
WORK_OF_GLOO = "gloo:"
NEEDED = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
COMMUNICATING_OPS = ("c10d::", "_c10d_functional::wait_tensor")


def trace_exposed_comm_s(trace: JsonObject, device: str, since_s: float = 0.0) -> float | None:
    """Return the exposed communication time in seconds from a trace of the PyTorch profiler.

    Events before the Unix time `since_s` are ignored, and `device` is ``cpu`` or ``cuda``. Returns None if
    the trace contains no compute operations, for example if the user may not read the GPU's counters.
    """
    begin_us = since_s * 1e6 - float(trace.get("baseTimeNanoseconds") or 0) / 1e3
    sent: list[tuple[float, float]] = []
    inside: list[tuple[float, float]] = []
    computed: list[tuple[float, float]] = []
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X":
            continue
        name, start_us = str(event.get("name")), float(event["ts"])
        end_us = start_us + float(event.get("dur") or 0.0)
        span = max(start_us, begin_us), max(end_us, begin_us)
        if device == "cuda":
            if event.get("cat") == "kernel":
                (sent if KERNEL_OF_NCCL in name.lower() else computed).append(span)
        elif name.startswith(WORK_OF_GLOO):
            sent.append(span)
        elif event.get("cat") == "cpu_op" and event.get("tid") == event.get("pid"):
            # Training runs in the main thread of the process. Other threads that record operations belong to
            # gloo.
            (inside if name.startswith(COMMUNICATING_OPS) else computed).append(span)
    if not computed:
        return None
    # The profiler records an operation on a sharded tensor and its communication as a single span, so the
    # whole span is considered exposed communication.
    exposed_us = covered([*sent, *inside, *computed]) - covered([*inside, *computed]) + covered(inside)
    return exposed_us / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by at least one span; a span is a (start, end) pair."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def keep_needed(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a trace object that `trace_exposed_comm_s` needs.

    The JSON parser calls this function as its ``object_hook``, so that unneeded fields use no memory.
    """
    if "ph" not in value:
        return value
    is_needed = value.get("cat") in ("kernel", "cpu_op") or str(value.get("name")).startswith(WORK_OF_GLOO)
    return {key: value[key] for key in NEEDED if key in value} if is_needed else {}


Row = dict[str, Any]
"""A row of summary.csv, which maps each column to its value, or to None if the value is unknown."""
MEDIANS = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "step_s", "data_wait_s")
MEASURED = (
    "samples_per_s",
    *MEDIANS,
    "step_s_p10",
    "step_s_p90",
    "mem_gib_peak",
    "exposed_comm_s",
    "loss",
)
"""Columns whose value in a trial's row is the median over the trial's repeats."""


def row_of(bench: Bench, item: BenchRun, status: str, failure: str) -> tuple[Row, str]:
    """Return the summary row of a run, and the reason why its exposed communication is unknown.

    The reason is empty if the exposed communication is known.
    """
    records = training_curve(bench.run_dir(item))
    exposed, missing = exposed_comm_s(bench, item, records)
    row: Row = {
        **item.values,
        **item.degrees,
        "device_batch_size": item.device_batch_size,
        "pp_microbatches": item.pp_microbatches if item.degrees["pp"] > 1 else None,
        **measured(records, bench.length.measured),
        "exposed_comm_s": exposed,
        "loss": records[-1].number("loss") if records else None,
        "status": status,
        "verdict": failure or None,
        "run": item.run,
    }
    return row, missing


def trial_row(rows: Sequence[Row]) -> Row:
    """Return the summary row of a trial: the medians over its runs, and the range of their speeds.

    If a run did not finish, the trial's row shows the state of that run.
    """
    known = [row for row in rows if row["step_s"] is not None]
    unfinished = [row for row in rows if row["status"] != FINISHED]
    status = unfinished[0]["status"] if unfinished else FINISHED
    if unfinished and len(rows) > 1:
        status = f"{status} ({len(unfinished)} of {len(rows)})"
    speeds = [row["tokens_per_s"] for row in known if row["tokens_per_s"] is not None]
    has_range = len(speeds) > 1
    return {
        **rows[0],
        **{name: _median_of_known(row[name] for row in rows) for name in MEASURED},
        "tokens_per_s_min": min(speeds) if has_range else None,
        "tokens_per_s_max": max(speeds) if has_range else None,
        "steps": sum(row["steps"] for row in rows),
        "repeats": len(known),
        "status": status,
        "verdict": next((row["verdict"] for row in unfinished if row["verdict"]), None),
        "run": " ".join(row["run"] for row in rows),
    }


def measured(records: Sequence[StepRecord], steps: range) -> Row:
    """Return the medians of the metrics over `steps`, and the peak memory at the last of these steps."""
    counted = [record for record in records if record.step in steps]
    row: Row = {"steps": len(counted), "samples_per_s": _median(_samples_per_s(records, steps))}
    for name in MEDIANS:
        row[name] = _median(record.number(name) for record in counted)
    durations = list(numbers(counted, "step_s"))
    deciles = quantiles(durations, n=10, method="inclusive") if len(durations) > 1 else durations
    row["step_s_p10"], row["step_s_p90"] = (deciles[0], deciles[-1]) if deciles else (None, None)
    row["mem_gib_peak"] = counted[-1].number("mem_gib_peak") if counted else None
    return row


def _samples_per_s(records: Sequence[StepRecord], steps: range) -> Iterator[float]:
    for before, record in pairwise([StepRecord({"step": 0, "samples_seen": 0}), *records]):
        # The number of samples in a step is the total after this step minus the total after the previous
        # step, so the previous step must be logged too.
        if record.step in steps and record.step == before.step + 1:
            seen, earlier = record.count("samples_seen") or 0, before.count("samples_seen") or 0
            yield (seen - earlier) / (record.number("step_s") or math.inf)


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values, or None if any value is unknown."""
    given = list(values)
    return None if None in given else _median_of_known(given)


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def exposed_comm_s(bench: Bench, item: BenchRun, records: Sequence[StepRecord]) -> tuple[float | None, str]:
    """Return the exposed communication in seconds per step, or None and the reason if it is unknown.

    The value is the mean over the profiled ranks.
    """
    ends = {record.step: parse_time(record.time) for record in records}
    # On all ranks, the first profiled step begins only after every rank has started its profiler.
    begin = ends.get(bench.length.first_profiled)
    if begin is None or bench.length.steps not in ends:
        return None, "the run did not reach its last step"
    run = bench.run_dir(item)
    attempt = run.attempt(run.attempt_numbers()[-1])
    found = []
    for rank in profiled_ranks(prod(item.degrees.values())):
        file = attempt.rank_profile(rank)
        try:
            trace = json.loads(file.read_bytes(), object_hook=keep_needed)
            seconds = trace_exposed_comm_s(trace, bench.device, begin.timestamp())
        except (OSError, ValueError, AttributeError, KeyError) as error:
            return None, f"{file} cannot be read ({error})"
        if seconds is None:
            missing = (
                "kernels, because you have no permission to read the performance counters of this GPU"
                if bench.device == "cuda"
                else "steps"
            )
            return None, f"{file} contains no {missing}"
        found.append(seconds / COUNTED_PROFILED_STEPS)
    return fmean(found), ""


def speed(row: Row) -> float | None:
    """Return the tokens per second, or the samples per second for a task that does not count tokens."""
    value: float | None = row["samples_per_s"] if row["tokens_per_s"] is None else row["tokens_per_s"]
    return value


def by_speed(trials: Iterable[Sequence[Row]]) -> list[tuple[Row, Sequence[Row]]]:
    """Sort trials by speed: finished trials first, starting with the fastest.

    Each item in `trials` contains the rows of one trial's runs. Returns each trial's summary row together
    with the rows of its runs.
    """
    made = [(trial_row(rows), rows) for rows in trials]
    return sorted(made, key=lambda item: (item[0]["status"] != FINISHED, -(speed(item[0]) or 0.0)))
