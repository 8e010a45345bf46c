"""Checks trainkit on one NVIDIA GPU and measures it, within nine minutes.

    make gpu                        or: python -m benchmarks.gpu [--only PART …] [--wheels FOLDER]

Runs the tests of tests/gpu, then the benches. Each part is a process with its own time limit, so a failure
costs only that part. Prints one table per part, and writes them with all figures to OUT/DEVICE-torch-VERSION,
as .md and as .json. The exit code is 1 if a test fails or a part does not end, and 2 without a GPU.

The parts:

    tests      tests/gpu on the device: exact resume after SIGKILL, asynchronous saves, nccl, compile, memory;
               with two GPUs also sharding, replicas, tensor, context and pipeline parallelism
    8b         Llama 3 8B at 4,096 tokens: trainkit and a hand-written loop, one after the other
    1b, 350m   the same for smaller models; 350m with alternating steps in one process
    save       how long saving a state of 10 GB blocks training, and how it slows the next steps
    profile    where the GPU's time goes in three steps of 350m

The hand-written loop has what a careful user writes: bf16 autocast, fused AdamW, SDPA, compiled blocks and
loss, clipping. For 8B, whose float32 state would not fit, it has all weights and averages in bf16. Where
transformers is installed, its Trainer is measured on 1b and 350m too.

The interpreter needs torch for CUDA, pydantic, pyyaml, nvidia-ml-py, pytest and hypothesis; --wheels names a
folder from which those that it lacks are taken. `--device cpu` runs every part at tiny sizes, to test it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "gpu"
TOTAL_S = 540.0
EXIT_NO_GPU = 2
NEEDS = {
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
"""Module -> package."""
MFU_GOAL = 0.55
"""For 8B in bf16."""


def error(message: str, hint: str) -> int:
    """Print what is missing; returns the exit code."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return EXIT_NO_GPU


@dataclass(frozen=True)
class Part:
    """One part of the record, in a process of its own."""

    title: str
    limit_s: float


PARTS = {
    "tests": Part("Tests", 210),
    "8b": Part("Llama 3 8B, 4,096 tokens", 150),
    "1b": Part("1b, 4 x 4,096 tokens", 80),
    "350m": Part("350m, 8 x 2,048 tokens", 80),
    "save": Part("Saving the state", 90),
    "profile": Part("Time of a step of 350m", 60),
}


INSPECT = """
import importlib.util, json, sys
found = {"python": sys.version.split()[0]}
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if importlib.util.find_spec("torch") is None:
    found["torch"] = None
else:
    import torch
    found.update(torch=torch.__version__, cuda=torch.version.cuda, gpus=torch.cuda.device_count())
    if found["gpus"]:
        device = torch.cuda.get_device_properties(0)
        found.update(device=device.name, memory=device.total_memory)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


def inspect(environ: dict[str, str]) -> dict[str, Any]:
    """What this interpreter has: versions, the GPU, missing modules."""
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, *NEEDS], env=environ, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise SystemExit(f"error: {sys.executable} does not run:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None if nvidia-smi does not say."""
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def run_part(name: str, device: str, limit_s: float, environ: dict[str, str]) -> dict[str, Any]:
    """Run one part in a process group of its own; returns its rows, or why there are none."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainkit-gpu-") as folder:
        argv = [sys.executable, "-m", "benchmarks.gpu_parts", name, device, folder]
        process = subprocess.Popen(argv, cwd=ROOT, env=environ, start_new_session=True, stdout=sys.stderr)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        record: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
        result = Path(folder) / "rows.json"
        if code == 0 and result.is_file():
            return {**record, "rows": json.loads(result.read_text())}
    return {
        **record,
        "problem": f"did not end within {limit_s:.0f} s" if code is None else f"exit code {code}",
    }


def is_good(record: dict[str, Any]) -> bool:
    """Whether a part has rows, and no failed test."""
    return "rows" in record and all(row.get("result") != "failed" for row in record["rows"])


def goals(parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One sentence for each goal: reached, or by how much not."""
    for name in ("8b", "1b", "350m"):
        speeds = {row["loop"]: row for row in parts.get(name, {}).get("rows", [])}
        if not speeds:
            continue
        ratio = speeds["trainkit"]["tokens/s"] / speeds["hand-written"]["tokens/s"]
        yield f"{name}: {ratio:.2f} x the hand-written loop ({'reached' if ratio >= 1 else 'goal: 1.00'})"
        mfu = speeds["trainkit"]["MFU"]
        if name == "8b" and mfu is not None:
            yield f"{name}: {mfu:.1%} MFU ({'reached' if mfu >= MFU_GOAL else f'goal: {MFU_GOAL:.0%}'})"


def markdown(record: dict[str, Any]) -> str:
    """The record as text."""
    env = record["environment"]
    where = (
        f"{env['device']}, driver {env['driver']}"
        if env.get("device")
        else "CPU, tiny sizes: no figure counts"
    )
    lines = [f"# {where}", ""]
    lines.append(f"Python {env['python']}, torch {env['torch']}, nccl {env.get('nccl')}, {record['date']}.")
    lines += ["", *(f"- {goal}" for goal in goals(record["parts"]))]
    for name, part in record["parts"].items():
        lines += ["", f"## {PARTS[name].title}", ""]
        if "problem" in part:
            lines.append(f"Not measured: {part['problem']}.")
            continue
        columns = list(part["rows"][0])
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in part["rows"]:
            lines.append(f"| {' | '.join('' if row[key] is None else str(row[key]) for key in columns)} |")
        lines += ["", f"{part['seconds']} s."]
    return "\n".join(lines) + "\n"


def install(wheels: Path, missing: list[str], target: str) -> None:
    """Install packages from a folder of wheels, without an index."""
    packages = [NEEDS[module] for module in missing]
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*argv, "--target", target, *packages], check=True, stdout=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what the interpreter lacks")
    parser.add_argument(
        "--out", type=Path, help="folder of the record (default: benchmarks/gpu; none for cpu)"
    )
    args = parser.parse_args()
    deadline_s = time.monotonic() + TOTAL_S
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
                f"there is no NVIDIA GPU here: {seen}", "run it on a GPU node: srun --gpus 1 make gpu"
            )
        if found["missing"] and args.wheels is None:
            packages = " ".join(NEEDS[module] for module in found["missing"])
            hint = f"{sys.executable} -m pip install {packages}, or --wheels FOLDER"
            return error(f"{sys.executable} lacks {packages}", hint)
        if found["missing"]:
            install(args.wheels, found["missing"], site)
        record: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "environment": {**found, "driver": driver_version() if found["gpus"] else None},
            "parts": {},
        }
        for name in args.only:
            limit_s = min(PARTS[name].limit_s, deadline_s - time.monotonic())
            late = {"seconds": 0.0, "problem": f"no time was left of {TOTAL_S:.0f} s"}
            part = run_part(name, args.device, limit_s, environ) if limit_s > 5 else late
            record["parts"][name] = part
            print(f"{name}: {part.get('problem', 'done')} ({part['seconds']} s)", file=sys.stderr, flush=True)
    print(markdown(record), end="")
    out = args.out or (RECORDS if args.device == "cuda" else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^A-Za-z0-9]+", "-", found.get("device") or "CPU").strip("-")
        stem = out / f"{device}-torch-{found['torch'].partition('+')[0]}"
        Path(f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
        Path(f"{stem}.md").write_text(markdown(record))
    return 0 if all(is_good(part) for part in record["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
