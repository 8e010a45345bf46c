"""Measure the startup time of frequently used commands, including the start of the process.

    python benchmarks/startup.py

The benchmark prints medians of 20 runs; the commands alternate. `torchrun --help` in the same environment is
a reference for the current speed of this machine. Modules are compiled in advance, as after an installation,
even if `PYTHONDONTWRITEBYTECODE` is set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def command(name: str) -> str:
    """Return the path of a console script in this environment."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "trainkit --help": [command("trainkit"), "--help"],
    "trainkit submit --dry-run": [command("trainkit"), "submit", str(CONFIG), "--nodes", "2", "--dry-run"],
    "torchrun --help": [command("torchrun"), "--help"],
}


PASS_MS = 35
BUDGETS_MS = {"trainkit --help": 100, "trainkit submit --dry-run": 300}
"""Time budgets for a machine on which `python -c pass` takes `PASS_MS`; on other machines, the budgets are
scaled by its duration."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times_ms: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(args.runs + 1):
        for name, argv in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True, env=env)
            times_ms[name].append(1000 * (time.perf_counter() - started))
    print("| command | median ms | min | max |")
    print("|---|---|---|---|")
    for name, values in times_ms.items():
        counted = values[1:]
        print(f"| `{name}` | {statistics.median(counted):.0f} | {min(counted):.0f} | {max(counted):.0f} |")
    scale = statistics.median(times_ms["python -c pass"][1:]) / PASS_MS
    for name, budget_ms in BUDGETS_MS.items():
        took_ms = statistics.median(times_ms[name][1:])
        print(f"`{name}`: {took_ms:.0f} ms of {budget_ms * scale:.0f} ms plus the slowest answer of Slurm")


if __name__ == "__main__":
    main()
