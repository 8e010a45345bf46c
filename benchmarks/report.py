"""Measure the duration of `trainkit report` for a long run or for a group of runs, and the size of the page.

    python -m benchmarks.report [--lines 1000000] [--repeats 3]
    python -m benchmarks.report --runs 12 --lines 100000

The run is generated, with a record per step, an evaluation every 500 steps, and a resume in the middle. For
comparison, the benchmark measures the time to parse the same lines as JSON in one process. With `--runs`,
each run of a sweep has `--lines` records, and a headless Chromium opens the page. The benchmark measures the
time until the page is loaded, and the time until the script has redrawn every line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from tests.support.browser import Browser, browser
from tests.support.sweeps import made_up_sweep
from trainkit.config import RunConfig, dump_effective
from trainkit.run.files import as_utc, write_json
from trainkit.run.rundir import RunDir

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
STARTUP_S, STEP_S, EVAL_EVERY = 10.0, 0.5, 500
MIB = 1024**2
GOAL_S, GOAL_MB, GOAL_OPEN_S = 5.0, 3.0, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument(
        "--runs", type=int, default=0, metavar="N", help="number of runs; measures the report of a sweep"
    )
    args = parser.parse_args()
    if args.runs:
        return measure_group(args.runs, args.lines, args.repeats)
    with tempfile.TemporaryDirectory(prefix="trainkit-report-") as folder:
        run = RunDir(Path(folder) / "long")
        write_run(run, args.lines)
        size_mib = run.metrics_file.stat().st_size / MIB
        print(f"{args.lines:,} lines, {size_mib:.0f} MiB, {len(os.sched_getaffinity(0))} CPUs")
        seconds = statistics.median(report_s(run.path) for _ in range(args.repeats))
        parse_s = statistics.median(json_s(run) for _ in range(args.repeats))
        page_mb = (run.path / "report.html").stat().st_size / 1e6
        print(f"trainkit report: {seconds:.2f} s, median of {args.repeats} (goal: {GOAL_S:.0f} s)")
        print(f"parsing the JSON alone: {parse_s:.2f} s; ratio {seconds / parse_s:.2f}")
        print(f"page: {page_mb:.3f} MB (goal: {GOAL_MB:.0f} MB)")
        return int(seconds > GOAL_S or page_mb > GOAL_MB)


def measure_group(num_runs: int, num_lines: int, repeats: int) -> int:
    """Print the times for creating and opening a sweep's report, and its size; return 1 on a missed goal."""
    with tempfile.TemporaryDirectory(prefix="trainkit-report-") as folder:
        group = Path(folder) / "sweep"
        write_group(group, num_runs, num_lines)
        size_mib = sum(file.stat().st_size for file in group.glob("*/metrics.jsonl")) / MIB
        print(
            f"{num_runs} runs of {num_lines:,} lines, {size_mib:.0f} MiB, {len(os.sched_getaffinity(0))} CPUs"
        )
        before = os.times()
        seconds = statistics.median(report_s(group) for _ in range(repeats))
        after = os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        page = group / "report.html"
        page_mb = page.stat().st_size / 1e6
        with browser(Path(folder) / "profile") as chromium:
            chromium.open(page, 1400)  # loading the first page includes the start of the browser
            opened = [open_s(chromium, page) for _ in range(repeats)]
        open_median_s, draw_s = (statistics.median(times) for times in zip(*opened, strict=True))
        print(f"trainkit report: {seconds:.2f} s, median of {repeats} (goal: {GOAL_S:.0f} s)")
        print(f"processor time of one: {cpu_s / repeats:.2f} s, in a process per core")
        print(f"page: {page_mb:.2f} MB (goal: {GOAL_MB:.0f} MB)")
        print(
            f"opened in {open_median_s:.2f} s (goal: {GOAL_OPEN_S:.0f} s); all drawn again in {draw_s:.2f} s"
        )
        return int(seconds > GOAL_S or page_mb > GOAL_MB or open_median_s > GOAL_OPEN_S)


def write_group(folder: Path, num_runs: int, num_lines: int) -> None:
    """Write a sweep over the learning rate whose runs are copies of one run, each with different losses."""
    group = made_up_sweep(
        folder, {"optimizer.lr": [1e-4 * 2**index for index in range(num_runs)]}, num_steps=2
    )
    for index in range(num_runs):
        with group.run(index).metrics_file.open("w") as stream:
            for step in range(1, num_lines + 1):
                values = record(step, num_lines, num_lines)
                values["loss"] = (
                    2 + index / 10 + 3 * math.exp(-4 * step / num_lines) + step * 7919 % 101 / 500
                )
                stream.write(json.dumps(values) + "\n")


def open_s(chromium: Browser, page: Path) -> tuple[float, float]:
    """Return the seconds until a page is loaded, and the seconds for redrawing all of its charts."""
    begin = time.perf_counter()
    chromium.open(page, 1400)
    loaded = time.perf_counter()
    chromium.evaluate("for (const plot of plots) plot.reset(); document.body.offsetHeight")
    return loaded - begin, time.perf_counter() - loaded


def write_run(run: RunDir, num_lines: int) -> None:
    """Write the folder of a finished run with two attempts."""
    run.path.mkdir()
    for number in (1, 2):
        run.attempt(number).create()
    run.config_file.write_text(dump_effective(RunConfig.model_validate({"train": {"steps": num_lines}})))
    entry = {"attempt": 2, "job_id": "local-1", "submitted_at": stamp(0), "host": "a"}
    write_json(run.job_file, {"name": "long", "attempts": [entry]})
    write_json(run.plan_file, {"num_nodes": 1, "workers_per_node": 2, "world_size": 2, "device": "cpu"})
    write_json(run.attempt(2).end_file, {"state": "finished", "action": "finished", "reason": "all ranks"})
    half = num_lines // 2
    middle_s, end_s = STARTUP_S + STEP_S * half + 1, 2 * STARTUP_S + STEP_S * num_lines + 2
    events = [
        {"time": stamp(0), "attempt": 1, "event": "started"},
        {"time": stamp(STARTUP_S), "attempt": 1, "event": "training", "step": 0},
        {
            "time": stamp(middle_s),
            "attempt": 1,
            "event": "stopped",
            "state": "stopped",
            "reason": "preempted",
        },
        {"time": stamp(middle_s), "attempt": 2, "event": "started"},
        {"time": stamp(middle_s + STARTUP_S), "attempt": 2, "event": "training", "step": half},
        {"time": stamp(end_s), "attempt": 2, "event": "finished", "state": "finished"},
    ]
    for step in range(EVAL_EVERY, num_lines, EVAL_EVERY):
        attempt, time_s = place(step, half)
        evaluated = {"attempt": attempt, "event": "evaluated", "step": step, "val_loss": 3 + 1 / step}
        events.append({"time": stamp(time_s + STEP_S / 2), **evaluated})
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    with run.metrics_file.open("w") as stream:
        stream.writelines(
            json.dumps(record(step, half, num_lines)) + "\n" for step in range(1, num_lines + 1)
        )


def place(step: int, half: int) -> tuple[int, float]:
    """Return the attempt of a step, and the time of the step's end in seconds since the run began."""
    time_s = STARTUP_S + STEP_S * step
    return (1, time_s) if step <= half else (2, time_s + STARTUP_S + 1)


def record(step: int, half: int, num_lines: int) -> dict[str, object]:
    attempt, time_s = place(step, half)
    return {
        "step": step,
        "time": stamp(time_s),
        "attempt": attempt,
        "loss": 5 - step / num_lines + step * 7919 % 101 / 500,
        "grad_norm": 1 + step * 31 % 97 / 97,
        "lr": 3e-4 * step / num_lines,
        "tokens": step * 8192,
        "tokens_per_s": 16384.0 + step * 17 % 1009,
        "tokens_per_s_per_gpu": 8192.0 + step * 17 % 503,
        "mfu": None,
        "step_s": 0.4 + step % 10 / 100,
        "data_wait_s": 0.001,
        "mem_gib_peak": 1.2345,
        "samples_seen": step * 32,
    }


def stamp(seconds: float) -> str:
    return as_utc(BEGAN + timedelta(seconds=seconds))


def report_s(folder: Path) -> float:
    begin = time.perf_counter()
    argv = [sys.executable, "-m", "trainkit", "report", str(folder)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def json_s(run: RunDir) -> float:
    begin = time.perf_counter()
    with run.metrics_file.open("rb") as stream:
        for line in stream:
            json.loads(line)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
