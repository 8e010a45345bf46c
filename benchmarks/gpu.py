"""Test trainkit on one NVIDIA GPU and measure its speed, within nine minutes.

    make gpu                        or: python -m benchmarks.gpu [--only PART …] [--wheels FOLDER]

Runs the tests of tests/gpu, then the benchmarks, the most informative ones first. Each part is a process with
a separate time limit, so a failure affects only that part. The record has one table per part, and is written
to OUT/DEVICE-torch-VERSION, as .md and as .json. The record is rewritten after every row, so that the
finished rows of an interrupted part are kept. `--only` replaces the given parts of an existing record and
keeps the other parts. The exit code is 1 if a test fails or a part does not finish, and 2 if there is no GPU.

The parts:

    tests          tests/gpu on the device: exact resume after SIGKILL, asynchronous saves, nccl, compile,
                   memory; with two GPUs also sharding, replicas, tensor, context and pipeline parallelism
    1b             trainkit and three hand-written loops on 1b, a model with 1.50 billion parameters
    profile        the use of the GPU's time in three steps of 1b
    large          Llama 3 8B or, on a GPU with 80 GB, 3b (3.61 billion parameters), 8 microbatches a step
    save           how long saving a state of 2.7 GB blocks training, and how it slows the next steps
    hugging-face   the transformers Trainer, if installed, with the model of 1b
    350m           trainkit, compiled and not, and the hand-written loops; then in float32 and TF32
    options        1b with a mask of documents, computed or read, and in float8
    context        attention of 8b under context parallelism, by two kernels
    world          what one GPU shows about many, and two or more GPUs in earnest; only with `--only world`,
                   which takes up to 15 minutes; described in benchmarks/world.py

1b and 3b have the sizes of Llama 3.2, but separate weights for embedding and head. The hand-written loops are
described in benchmarks/training_loop.py. Loops that are compared take turns: after every step if they fit
into memory together, and else in the order A, B, A, B. Speeds are medians with the middle 95 % of the medians
of 2,000 resamples of the steps. If the planner predicts that a model does not fit, the benchmark does not run
it, and its row shows the required memory. Each part of a record names the commit that it measured.

The interpreter needs torch for CUDA and the packages of NEEDS. --wheels names a folder to install missing
packages from. `--device cpu` runs every part at tiny sizes; the parts are chosen for a GPU with
`--memory-gib`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "gpu"
EXIT_NO_GPU = 2
NEEDS = {
    "numpy": "numpy",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
}
"""Maps a module to the package that provides it."""
USABLE = 0.92
"""Usable fraction of a GPU's memory; copied from `trainkit.plan.gpus`, which may not be importable yet."""
MFU_GOAL = 0.55
"""Minimum MFU to reach for models with 3 and 8 billion parameters in bf16."""
OPPONENTS = ("careful", "autocast", "bound", "hand-written", "Hugging Face Trainer")
"""The loops that trainkit is compared with; records of earlier versions have only `hand-written`."""
HIDDEN = ("table", "steps_ms")
"""Keys of rows that are not columns: the title of the row's table, and the times of all steps."""
MEMORY_GOAL = 0.1
"""Maximum relative difference between the planned and the measured peak memory of a rank."""
STALL_GOAL = 0.1
"""Maximum time for which a save may block training, relative to torch.save."""
Record = dict[str, Any]


def error(message: str, hint: str) -> int:
    """Print the missing requirement, and return the exit code."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return EXIT_NO_GPU


@dataclass(frozen=True)
class Part:
    """One part of the record, which runs in a separate process."""

    title: str
    limit_s: float
    by_default: bool = True
    """False if the part runs only if `--only` names the part."""


PARTS = {
    "tests": Part("Tests", 200),
    "1b": Part("1b, 1.50 billion parameters", 120),
    "profile": Part("Time of a step of 1b", 60),
    "large": Part("Llama 3 8B, or 3b with 3.61 billion parameters, 8 microbatches a step", 180),
    "save": Part("Saving the state", 90),
    "hugging-face": Part("1b with the Trainer of transformers", 120),
    "350m": Part("350m, and 350m in float32", 150),
    "options": Part("1b with a mask of documents, and in float8", 200),
    "context": Part("Attention of 8b under context parallelism", 30),
    "world": Part("One rank of many, and two ranks", 900, by_default=False),
}


INSPECT = """
import importlib.util, json, pathlib, re, sys

def driver():
    # Not from torch, which knows the CUDA version only, nor from nvidia-smi, which a container may lack.
    try:
        import pynvml
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        file = pathlib.Path("/proc/driver/nvidia/version")
        found = re.search(r"Kernel Module\\D*([\\d.]+)", file.read_text()) if file.is_file() else None
        return found and found[1]

def power_limit_w():
    try:
        import pynvml
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000
    except Exception:
        return None

found = {"python": sys.version.split()[0], "driver": driver()}
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if importlib.util.find_spec("torch") is None:
    found["torch"] = None
else:
    import torch
    found.update(torch=torch.__version__, cuda=torch.version.cuda, gpus=torch.cuda.device_count())
    if found["gpus"]:
        device = torch.cuda.get_device_properties(0)
        found.update(device=device.name, memory=device.total_memory, power_limit_w=power_limit_w())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = torch.backends.cudnn.version()
print(json.dumps(found))
"""


def inspect(environ: dict[str, str]) -> Record:
    """Return the versions, the GPU and the missing modules of this interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, *NEEDS], env=environ, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise SystemExit(f"error: {sys.executable} does not run:\n{done.stderr}")
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def run_part(
    argv: list[str], limit_s: float, environ: dict[str, str], save: Callable[[Record], None]
) -> None:
    """Run one part in a separate process group; `save` is called with all known rows after every new row."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainkit-gpu-") as folder:
        file = Path(folder) / "rows.jsonl"

        def known(problem: str | None) -> Record:
            lines = file.read_text().splitlines() if file.is_file() else []
            why = {} if problem is None else {"problem": problem}
            seconds = round(time.monotonic() - started, 1)
            return {"seconds": seconds, "rows": [json.loads(line) for line in lines], **why}

        command = [sys.executable, "-m", "benchmarks.gpu_parts", argv[0], argv[1], folder, *argv[2:]]
        process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, stdout=sys.stderr)
        try:
            size = -1
            while process.poll() is None and time.monotonic() - started < limit_s:
                now = file.stat().st_size if file.is_file() else 0
                if now != size:
                    size = now
                    save(known("cut off"))
                time.sleep(0.2)
            code = process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        late = f"did not end within {limit_s:.0f} s"
        save(known(late if code is None else f"exit code {code}" if code else None))


def commit_of(folder: Path) -> str | None:
    """Return the commit of a checkout, marked if files have changed; None without git or a checkout."""
    if shutil.which("git") is None:
        return None
    argv = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty=, changed",
        "--abbrev=12",
        "--exclude=*",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or None


def is_good(part: Record) -> bool:
    """Return whether a part has finished without a problem and without a failed test."""
    return "problem" not in part and all(row.get("result") != "failed" for row in part["rows"])


def ratio_to(mine: Record, other: Record, num_resamples: int = 2000) -> str:
    """Return the speed of `mine` divided by the speed of `other`, with the middle 95 % of the resamples."""
    ratio = f"{mine['tokens/s'] / other['tokens/s']:.2f} x {other['loop']}"
    if "steps_ms" not in mine or "steps_ms" not in other:
        return ratio  # a record of an earlier version
    draw = random.Random(0)

    def median(row: Record) -> float:
        return statistics.median(draw.choices(row["steps_ms"], k=len(row["steps_ms"])))

    ratios = sorted(median(other) / median(mine) for _ in range(num_resamples))
    low, high = ratios[num_resamples // 40], ratios[-1 - num_resamples // 40]
    return f"{ratio}, {low:.2f} to {high:.2f}"


def goals(parts: dict[str, Record]) -> Iterator[str]:
    """Yield one sentence per goal: whether it was reached, or by how much it was missed."""
    for name in ("1b", "large", "350m", "hugging-face"):
        speeds = {row["loop"]: row for row in parts.get(name, {}).get("rows", []) if "tokens/s" in row}
        # Earlier versions measured trainkit against the Trainer of transformers in the part 1b only.
        measured = {row["loop"]: row for row in parts.get("1b", {}).get("rows", []) if "tokens/s" in row}
        mine = speeds.get("trainkit") or (measured.get("trainkit") if name == "hugging-face" else None)
        if mine is None:
            continue
        for loop in OPPONENTS:
            if loop in speeds:
                other, is_goal = speeds[loop], loop != "bound"
                reached = "reached" if mine["tokens/s"] >= other["tokens/s"] else "goal: 1.00"
                yield f"{mine['model']}: {ratio_to(mine, other)}{f' ({reached})' if is_goal else ''}"
        if name == "large" and mine["MFU"] is not None:
            is_reached = "reached" if mine["MFU"] >= MFU_GOAL else f"goal: {MFU_GOAL:.0%}"
            yield f"{mine['model']}: {mine['MFU']:.1%} MFU ({is_reached})"
    ranks = [row for row in parts.get("world", {}).get("rows", []) if "plan / peak" in row]
    if ranks:
        close = sum(abs(row["plan / peak"] - 1) <= MEMORY_GOAL for row in ranks)
        is_goal = "reached" if close == len(ranks) else "goal: all"
        yield f"world: the memory of {close} of {len(ranks)} ranks is within 10 % of the plan ({is_goal})"
    blocked = {row["way"]: row["blocked s"] for row in parts.get("save", {}).get("rows", []) if "save" in row}
    if {"trainkit", "torch.save and fsync"} <= set(blocked):
        ratio = blocked["trainkit"] / blocked["torch.save and fsync"]
        is_goal = "reached" if ratio <= STALL_GOAL else f"goal: {STALL_GOAL}"
        yield f"save: blocks {ratio:.3f} x as long as torch.save ({is_goal})"


def markdown(record: Record) -> str:
    """Return the record as Markdown."""
    env = record["environment"]
    several = f"{env['gpus']} x " if env.get("gpus", 0) > 1 else ""
    where = (
        f"{several}{env['device']}, driver {env['driver']}"
        if env.get("device")
        else "CPU, tiny sizes: no figure counts"
    )
    versions = (
        f"Python {env['python']}, torch {env['torch']}, nccl {env.get('nccl')}, cudnn {env.get('cudnn')}"
    )
    lines = [f"# {where}", "", f"{versions}."]
    lines += ["", *(f"- {goal}" for goal in goals(record["parts"]))]
    for name, part in record["parts"].items():
        lines += ["", f"## {PARTS[name].title}", ""]
        for title in dict.fromkeys(row.get("table") for row in part["rows"]):
            rows = [row for row in part["rows"] if row.get("table") == title]
            columns = list(dict.fromkeys(key for row in rows for key in row if key not in HIDDEN))
            lines += [f"### {title}", ""] if title else []
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            for row in rows:
                cells = ("" if row.get(key) is None else str(row[key]) for key in columns)
                lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
            lines.append("")
        problem = f": {part['problem']}" if "problem" in part else ""
        watts = f", power limit {part['power_limit_w']:.0f} W" if part.get("power_limit_w") else ""
        commit = part.get("commit") or "not recorded"
        lines.append(f"{part['date']}, {part['seconds']} s, commit {commit}{watts}{problem}.")
    return "\n".join(lines) + "\n"


def install(wheels: Path, missing: list[str], target: str) -> None:
    """Install packages from a folder of wheels, without a package index."""
    packages = [NEEDS[module] for module in missing]
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*argv, "--target", target, *packages], check=True, stdout=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--memory-gib", type=float, help="upper limit of the GPU's memory (cpu: 80)")
    parser.add_argument("--minutes", type=float, help="limit of all parts (default: 9; with world: 15 more)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for missing packages")
    parser.add_argument(
        "--out", type=Path, help="folder of the record (default: benchmarks/gpu; none for cpu)"
    )
    args = parser.parse_args()
    names = args.only or [name for name, part in PARTS.items() if part.by_default]
    minutes = args.minutes if args.minutes is not None else 9 + 15 * ("world" in names)
    deadline_s = time.monotonic() + 60 * minutes
    # On a stop signal, also stop the running part and remove its folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="trainkit-gpu-site-") as site:
        paths = [str(ROOT), site, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        found = inspect(environ)
        if found["torch"] is None:
            return error(
                f"{sys.executable} has no torch", "PYTHON=… make gpu chooses an interpreter that has it"
            )
        if args.device == "cuda" and not found["gpus"]:
            seen = f"torch {found['torch']} of {sys.executable} sees none"
            return error(
                f"this machine has no NVIDIA GPU: {seen}", "run it on a GPU node: srun --gpus 1 make gpu"
            )
        if found["missing"] and args.wheels is None:
            packages = " ".join(NEEDS[module] for module in found["missing"])
            version = ".".join(found["python"].split(".")[:2])
            target = f"--only-binary=:all: --python-version {version} --platform manylinux_2_28_x86_64"
            hint = (
                f"{sys.executable} -m pip install {packages}; if this machine has no index, run on"
                f" another machine: pip download {target} --dest wheels {packages}, then: make gpu"
                " WHEELS=wheels"
            )
            return error(f"{sys.executable} lacks {packages}", hint)
        if found["missing"]:
            install(args.wheels, found["missing"], site)
        memory = memory_bytes(found.get("memory"), args.memory_gib)
        out = args.out or (RECORDS if args.device == "cuda" else None)
        stem = None if out is None else out / stem_of(found)
        commit = commit_of(ROOT)
        record: Record = {"environment": found, "parts": {}}
        if args.only is not None and stem is not None and Path(f"{stem}.json").is_file():
            record["parts"] = json.loads(Path(f"{stem}.json").read_text())["parts"]

        def save(name: str, part: Record) -> None:
            measured = {"date": time.strftime("%Y-%m-%d"), "commit": commit, **part}
            measured["power_limit_w"] = found.get("power_limit_w")
            parts = {**record["parts"], name: measured}
            record["parts"] = {name: parts[name] for name in PARTS if name in parts}
            if stem is not None:
                write(record, stem)

        for name in names:
            limit_s = min(PARTS[name].limit_s, deadline_s - time.monotonic())
            if limit_s > 5:
                argv = [name, args.device, str(round(USABLE * memory))]
                run_part(argv, limit_s, environ, lambda part, name=name: save(name, part))
            else:
                save(name, {"seconds": 0.0, "rows": [], "problem": f"{minutes:g} minutes were over"})
            part = record["parts"][name]
            print(f"{name}: {part.get('problem', 'done')} ({part['seconds']} s)", file=sys.stderr, flush=True)
    print(markdown(record), end="")
    return 0 if all(is_good(part) for part in record["parts"].values()) else 1


def memory_bytes(found: int | None, wanted_gib: float | None) -> float:
    """Return the smaller of the GPU's memory and `wanted_gib` in bytes; without a GPU, default to 80 GiB."""
    return min(found or math.inf, (wanted_gib or (math.inf if found else 80)) * 2**30)


def stem_of(found: Record) -> str:
    """Return the file name of the record for a GPU and a torch version, without suffix."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", found.get("device") or "CPU").strip("-")
    several = f"{found['gpus']}-x-" if found.get("gpus", 0) > 1 else ""
    return f"{several}{device}-torch-{found['torch'].partition('+')[0]}"


def write(record: Record, stem: Path) -> None:
    """Write the record atomically, as Markdown and as JSON."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(record, indent=1) + "\n"), (".md", markdown(record))):
        new = Path(f"{stem}{suffix}.new")
        new.write_text(text)
        new.replace(f"{stem}{suffix}")


if __name__ == "__main__":
    sys.exit(main())
