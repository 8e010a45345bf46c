"""What the runs of a bench measured: a row for each, from the files of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trainkit.bench.exposed import exposed_s, lean
from trainkit.bench.record import Bench, BenchRun
from trainkit.bench.shorten import COUNTED_PROFILED_STEPS, profiled_ranks
from trainkit.rundir import read_metrics
from trainkit.times import parse_time

Row = dict[str, Any]
"""A value for every column; None where it is not known."""
MEDIANS = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "step_s", "data_wait_s")


def row_of(bench: Bench, item: BenchRun, status: str, verdict: str) -> tuple[Row, str]:
    """The row of a run, and why its exposed communication is not known; empty when it is."""
    records = read_metrics(bench.run_dir(item))
    exposed, why = exposed_comm_s(bench, item, records)
    row: Row = {
        "layout": item.layout,
        **item.degrees,
        "device_batch_size": item.device_batch_size,
        "pp_microbatches": item.pp_microbatches if item.degrees["pp"] > 1 else None,
        **measured(records, bench.length.measured),
        "exposed_comm_s": exposed,
        "loss": records[-1].get("loss") if records else None,
        "status": status,
        "verdict": verdict or None,
        "run": item.run,
    }
    return row, why


def measured(records: Sequence[Mapping[str, Any]], steps: range) -> Row:
    """The medians over some steps of a training curve, and the peak of memory at the last of them."""
    counted = [record for record in records if record["step"] in steps]
    row: Row = {"steps": len(counted), "samples_per_s": _median(_samples_per_s(records, steps))}
    for name in MEDIANS:
        row[name] = _median(record.get(name) for record in counted)
    row["mem_gib_peak"] = counted[-1].get("mem_gib_peak") if counted else None
    return row


def _samples_per_s(records: Sequence[Mapping[str, Any]], steps: range) -> Iterator[float]:
    for before, record in pairwise([{"step": 0, "samples_seen": 0}, *records]):
        # Only a step right after the one before tells how many samples it read.
        if record["step"] in steps and record["step"] == before["step"] + 1:
            yield (record["samples_seen"] - before["samples_seen"]) / record["step_s"]


def _median(values: Any) -> float | None:
    known = list(values)
    return median(known) if known and None not in known else None


def exposed_comm_s(
    bench: Bench, item: BenchRun, records: Sequence[Mapping[str, Any]]
) -> tuple[float | None, str]:
    """Seconds a step of exposed communication, the mean over the ranks that were profiled; else why not."""
    ends = {record["step"]: parse_time(record.get("time")) for record in records}
    # The ranks begin the first of these steps when each has started its profiler.
    begin = ends.get(bench.length.first_profiled)
    if begin is None or bench.length.steps not in ends:
        return None, "it did not come to its end"
    run = bench.run_dir(item)
    attempt = run.attempt(run.attempt_numbers()[-1])
    found = []
    for rank in profiled_ranks(prod(item.degrees.values())):
        file = attempt.rank_profile(rank)
        trace = _read_trace(file)
        if isinstance(trace, str):
            return None, trace
        seconds = exposed_s(trace, bench.device, begin.timestamp())
        if seconds is None:
            what = "kernels: the counters of this GPU may not be read" if bench.device == "cuda" else "steps"
            return None, f"{file} has no {what}"
        found.append(seconds / COUNTED_PROFILED_STEPS)
    return fmean(found), ""


def _read_trace(file: Path) -> dict[str, Any] | str:
    try:
        trace = json.loads(file.read_bytes(), object_hook=lean)
    except (OSError, ValueError) as error:
        return f"{file} cannot be read ({error})"
    return trace if isinstance(trace, dict) else f"{file} is no trace"


def by_speed(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order in which they are read: what finished, the fastest first, then the others."""
    return sorted(rows, key=lambda row: (row["status"] != "finished", -(row["tokens_per_s"] or 0.0)))
