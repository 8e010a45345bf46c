"""Measure the time that trainkit adds to plain Slurm, from submit to job id and from job start to first step.

    make cluster                            # or your own cluster
    python benchmarks/slurm_start.py

Runs with trainkit and runs with a hand-written script alternate. The hand-written script starts the same
worker with srun and sets the rank environment itself, with a fixed port and no supervisor. Each job runs
alone, and all jobs run on the same nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

CONFIG = """\
name: bench
device: cpu
model: {preset: nano}
data: {seq_len: 64}
train: {steps: 1, device_batch_size: 4, global_batch_size: null, eval_every: null}
checkpoint: {every_steps: null}
logging: {tensorboard: false}
"""
HAND_WRITTEN = """\
#!/bin/bash
#SBATCH --job-name=by-hand
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --time=10
#SBATCH --output={run}/by-hand.log
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=15432 TRAINKIT_JOB_ATTEMPT=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={interface}
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \\
  LOCAL_WORLD_SIZE={per_node} NODE_RANK=$SLURM_NODEID exec {python} -u -P -m trainkit.trainer {run}'
"""


LIBRARIES = "python -c 'import click, jinja2, pydantic, yaml; pydantic.BaseModel'"
WITH_SUBMITIT = LIBRARIES.replace("jinja2", "submitit")
"""A command that only imports the libraries of a backend, to measure the machine's speed; submitit renders no
template.
"""
LIBRARIES_FACTOR = 2.5
"""Maximum time from submit to job id, in addition to the time of sbatch, as a multiple of the time to import
the libraries."""


def call(argv: list[str], cwd: Path) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{argv}: {done.stderr}")
    return done.stdout


def trainkit(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("trainkit")), *arguments]


def wait_until_over(job_id: str, cwd: Path) -> None:
    while call(
        ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}", "--states=all"], cwd
    ).strip() not in (*("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),):
        time.sleep(0.5)


def first_step(run: Path) -> float:
    """Return the time at which rank 0 completed its first step."""
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "first_step":
            return datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()
    raise SystemExit(f"{run}: there was no first step")


def submissions(folder: Path, rounds: int) -> None:
    """Measure the seconds from the command to the job id, for held jobs."""
    (folder / "mine.yaml").write_text(CONFIG)
    script = folder / "plain.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --hold\n#SBATCH --output=/dev/null\ntrue\n")
    commands = {
        "sbatch": ["sbatch", "--parsable", str(script)],
        **{
            name: [sys.executable, "-c", name.removeprefix("python -c ").strip("'")]
            for name in (LIBRARIES, WITH_SUBMITIT)
        },
        "trainkit submit": trainkit(
            "submit", "mine.yaml", "--nodes", "4", "--set", "resources.extra.hold=true"
        ),
        "trainkit submit --backend submitit": trainkit(
            *("submit", "mine.yaml", "--nodes", "4", "--set", "resources.extra.hold=true"),
            *("--backend", "submitit"),
        ),
    }
    times_s: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, argv in commands.items():
            began = time.perf_counter()
            answer = call(argv, folder)
            times_s[name].append(time.perf_counter() - began)
            if answer:
                call(["scancel", answer.split()[-1]], folder)
    print("| command | median ms | min | max |\n|---|---|---|---|")
    for name, values in times_s.items():
        middle, low, high = (f(values) * 1e3 for f in (statistics.median, min, max))
        print(f"| `{name}` | {middle:.0f} | {low:.0f} | {high:.0f} |", flush=True)
    medians_ms = {name: 1e3 * statistics.median(values) for name, values in times_s.items()}
    for name in (name for name in times_s if name.startswith("trainkit")):
        libraries_ms = medians_ms[WITH_SUBMITIT if "submitit" in name else LIBRARIES]
        budget_ms = medians_ms["sbatch"] + LIBRARIES_FACTOR * libraries_ms
        print(f"`{name}`: {medians_ms[name]:.0f} ms of {budget_ms:.0f} ms", flush=True)


def starts(folder: Path, rounds: int, nodes: int, per_node: int, interface: str) -> None:
    """Measure the seconds from the start of the batch script to the first step."""
    times_s: dict[str, list[float]] = {"by hand": [], "trainkit": []}
    shape = ["--nodes", str(nodes), "--gpus-per-node", str(per_node)]
    for number in range(rounds):
        ours, theirs = folder / f"ours-{number}", folder / f"theirs-{number}"
        for run in (ours, theirs):
            # Both scripts contain a line that records the start time.
            mark = f"launch.setup=['date +%s.%N > {run}/began']"
            answer = call(
                trainkit(
                    *("submit", "mine.yaml", *shape, "--run-dir", str(run), "--set", mark),
                    *(["--set", "resources.extra.hold=true"] if run == theirs else []),
                ),
                folder,
            )
            job_id = answer.split()[-1]
            if run == theirs:
                call(["scancel", job_id], folder)
                text = HAND_WRITTEN.format(
                    nodes=nodes, per_node=per_node, run=run, python=sys.executable, interface=interface
                )
                script = run / "by-hand.sbatch"
                script.write_text(
                    text.replace("export MASTER_ADDR", f"date +%s.%N > {run}/began\nexport MASTER_ADDR", 1)
                )
                job_id = call(["sbatch", "--parsable", str(script)], folder).strip()
            wait_until_over(job_id, folder)
            took_s = first_step(run) - float((run / "began").read_text())
            times_s["trainkit" if run == ours else "by hand"].append(took_s)
    print("\n| script | nodes x ranks | median s | min | max |\n|---|---|---|---|---|")
    for name, values in times_s.items():
        middle, low, high = (f(values) for f in (statistics.median, min, max))
        print(f"| {name} | {nodes} x {per_node} | {middle:.2f} | {low:.2f} | {high:.2f} |", flush=True)
    ratio = statistics.median(times_s["trainkit"]) / statistics.median(times_s["by hand"])
    print(f"\nratio {ratio:.3f}")


def main() -> None:
    # If PYTHONDONTWRITEBYTECODE were set, Python would compile a checkout at each start, unlike an installed
    # package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--interface", default="eth0", help="of the nodes, for the hand-written script")
    args = parser.parse_args()
    # The folder is in the working directory, because all nodes must be able to access it.
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as name:
        folder = Path(name).absolute()
        submissions(folder, 2 * args.rounds)
        starts(folder, args.rounds, args.nodes, args.per_node, args.interface)


if __name__ == "__main__":
    main()
