"""`make demo`: run the quickstart twice, kill and resume the second run, and compare the losses of both.

The demo runs the commands that a user would type, and prints each command.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TRAINKIT = Path(sys.executable).with_name("trainkit")
SUBMIT = ("submit", "quickstart", "--nodes", "2", "--backend", "local")
START_TIMEOUT_S = 300.0
NEXT = """
Next steps:

  . .venv/bin/activate                           put `trainkit` on your PATH
  trainkit status last                           show the state of the run
  trainkit logs last                             print its log
  trainkit resume last --nodes 1 --set train.steps=300 --follow
                                                 continue on one node instead of two
  trainkit drill quickstart --nodes 2            interrupt it in every way possible here
  trainkit submit quickstart --nodes 2 --dry-run show the plan of the same on a Slurm cluster, and its script
"""


def main() -> None:
    """Run the demo; exit with code 1 if the losses differ."""
    print_heading("Train a small model as two processes on this machine.")
    uninterrupted = submit("--follow")

    print_heading("Start the same training again, and kill it after its first checkpoint.")
    killed = submit()
    wait_for_checkpoint(killed)
    trainkit("cancel", "last", "--now")
    last_step = metrics(killed)[-1]["step"]

    print_heading("Resume it.")
    trainkit("resume", "last", "--follow")
    resumed_step = next(record["step"] for record in metrics(killed) if record["attempt"] == 2)

    print_heading("Compare the losses in the metrics.jsonl files of both runs.")
    print(f"  killed after step {last_step}; first step written after the resume: {resumed_step}\n")
    print("  step   uninterrupted        killed and resumed")
    expected, resumed = losses(uninterrupted), losses(killed)
    for step, loss in expected.items():
        print(f"  {step:4}   {loss:<20} {resumed.get(step, 'missing')}")
    if resumed != expected:
        sys.exit("error: the losses differ\n\nhint: please report this with the folders of both runs")
    print("\nThe losses are identical, digit for digit: the kill cost only time.")
    print(NEXT)


def print_heading(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}\n", flush=True)


def submit(*options: str) -> Path:
    """Submit the quickstart; return the run folder."""
    done = trainkit(*SUBMIT, *options)
    return Path(done.splitlines()[0])


def trainkit(*args: str) -> str:
    """Print and run a command; return its output, or exit the demo if the command fails."""
    print(f"$ {shlex.join(['trainkit', *args])}", flush=True)
    process = subprocess.Popen([TRAINKIT, *args], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    if process.wait():
        sys.exit(process.returncode)
    return "".join(lines)


def wait_for_checkpoint(run: Path) -> None:
    """Wait for the first checkpoint of a run."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not list((run / "checkpoints").glob("step-????????")):
        if time.monotonic() > deadline_s:
            sys.exit(
                f"error: {run} has no checkpoint after {START_TIMEOUT_S:.0f} s\n\nhint: trainkit logs last"
            )
        time.sleep(0.05)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics records that a run has written so far, in the order of the file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, str]:
    """Map each step to its loss as JSON text; if a step was computed twice, use its last loss."""
    return {record["step"]: json.dumps(record["loss"]) for record in metrics(run)}


if __name__ == "__main__":
    main()
