"""Measure the cost of commands that read a run whose files are very large.

    python -m benchmarks.large_files [--gib 2] [--only line|events|metrics] [--folder FOLDER]

- `line`: the log of each rank ends with a line of `--gib` GiB that has no newline character.
- `events`: events.jsonl contains 512 MiB of events from two attempts.
- `metrics`: the size of metrics.jsonl is `--gib` GiB.

Prints the wall time, the CPU time and the peak memory of each command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mutated_runs import make_project

COMMANDS = (
    *("status runs/{run}", "status", "watch runs/{run} --once", "logs runs/{run} --lines 5"),
    *("diagnose runs/{run}", "report runs/{run} --out page.html", "ckpt ls runs/{run}"),
)
RUN = "crashed"
WRITTEN_BYTES = 2**24


def grow(file: Path, lines: list[str], num_bytes: int) -> None:
    """Append lines to a file repeatedly until it has grown by `num_bytes`."""
    block = "".join(f"{line}\n" for line in lines).encode()
    block *= max(1, WRITTEN_BYTES // len(block))
    with file.open("ab") as stream:
        while stream.tell() < num_bytes:
            stream.write(block)


def make_line(run: Path, num_bytes: int) -> None:
    """Append one long line to the logs of both ranks."""
    for log in run.glob("attempts/002/logs/rank-*.log"):
        with log.open("ab") as stream:
            for _ in range(num_bytes // WRITTEN_BYTES):
                stream.write(b"x" * WRITTEN_BYTES)


def make_events(run: Path, num_bytes: int) -> None:
    """Make each attempt log its saves and evaluations a million times, between its first and last events."""
    file = run / "events.jsonl"
    found = file.read_text().splitlines(keepends=True)
    file.write_text("")
    attempts = sorted({json.loads(line)["attempt"] for line in found})
    for index, number in enumerate(attempts, 1):
        own = [line for line in found if json.loads(line)["attempt"] == number]
        time_s, middle = json.loads(own[-1])["time"], len(own) // 2
        with file.open("a") as stream:
            stream.writelines(own[:middle])
        more = [{"event": "evaluated", "val_loss": 2.5}, {"event": "checkpoint_begin"}]
        more += [{"event": "checkpoint_commit", "reason": "every 1 steps"}]
        lines = [json.dumps({"time": time_s, "attempt": number, "step": 3, **one}) for one in more]
        grow(file, lines, num_bytes * index // len(attempts))
        with file.open("a") as stream:
            stream.writelines(own[middle:])


def make_metrics(run: Path, num_bytes: int) -> None:
    """Append the record of the run's last step repeatedly."""
    file = run / "metrics.jsonl"
    grow(file, file.read_text().splitlines()[-1:], num_bytes)


def measured(project: Path, line: str) -> tuple[float, float, float, int]:
    """Return the wall time, the CPU time, the peak memory in MiB, and the exit code of a command."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "trainkit", *line.split()],
        cwd=project,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    return time.monotonic() - started, cpu_s, usage.ru_maxrss / 1024, child.returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--only", choices=["line", "events", "metrics"])
    parser.add_argument("--folder", type=Path, help="where the files are written; default: a temporary one")
    options = parser.parse_args()
    large = int(options.gib * 2**30)
    makers = {"line": (make_line, large), "events": (make_events, 2**29), "metrics": (make_metrics, large)}
    for name, (make, num_bytes) in makers.items():
        if options.only not in (None, name):
            continue
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            os.environ.update(
                {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CONFIG", "CACHE")}
            )
            make_project(folder / "project", [RUN])
            make(folder / "project/runs" / RUN, num_bytes)
            for line in COMMANDS:
                seconds, cpu_s, mib, code = measured(folder / "project", line.format(run=RUN))
                figures = f"{seconds:6.1f} s {cpu_s:6.1f} s of CPU {mib:7,.0f} MiB  exit {code}"
                print(f"{name:8} {line.format(run=RUN):36} {figures}", flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
