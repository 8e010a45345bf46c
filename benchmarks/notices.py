"""Count the lost steps and the signals of each workload when Slurm or trainkit stops the workload.

    python -m benchmarks.notices [--slurm 24.11] [--cgroups] [--cases bash ...] [--asks cancel ...] [--keep]

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster), and submits each workload
on two hosts, up to eight workloads at a time. With `--cgroups`, the number of workloads depends on the CPUs.
The benchmark requires torch, transformers, lightning, accelerate and deepspeed in its Python environment. A
stop request is sent to all runs at the same time, after each run has passed step 20 of its attempt. The next
stop request is sent to the following attempt. A preloaded library (`notice_cases/heard.c`, compiled with gcc)
records each signal that a rank handles, with the name of its sender.

The benchmark prints the output of `status` and `diagnose` for each attempt, and a table of "signals of a rank
/ steps lost". A step is considered lost if the next attempt computes it again. The exit code is 0 if no step
is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.on_slurm.login import Login, settings, wait_for
from tests.on_slurm.survival import newest_attempt, preempt, steps_of
from tools.slurm_cluster.cluster import NUM_HOSTS, up
from tools.slurm_cluster.processes import Pid
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

PARTS = Path(__file__).parent / "notice_cases"
LIGHTNING_EXAMPLE = Path(__file__).parents[1] / "examples/lightning_train.py"
NUM_RANKS = 2
AT_ONCE = 8
"""Maximum number of runs that fit on the GPUs of the cluster at the same time."""
MIN_STEPS = 20
TIMEOUT_S = 240.0
RETURNS = ("requeue", "restart", "resubmit")
LIMIT = settings("resources.time='2'", "requeue.grace_s=20")
CONFIG = """\
name: notices
device: cpu
requeue: {grace_s: 20}
logging: {tensorboard: false}
"""
TASK = """\
task: tasks.py:%s
train: {steps: 20000, device_batch_size: 2, global_batch_size: 4, log_every: 1, eval_every: null}
data: {num_workers: %d}
checkpoint: {every_steps: null}
precision: {dtype: fp32}
"""
BUILT_IN = """\
model: {preset: nano, num_layers: 1}
data: {source: text.txt, seq_len: 64}
train: {steps: 20000, device_batch_size: 4, global_batch_size: 8, log_every: 1, eval_every: null}
checkpoint: {every_steps: null}
precision: {dtype: fp32}
"""
PYTHON = sys.executable
SAVED_BY_TRAINKIT = ("trainer", "task", "stream", "loop")


def _flag(kind: str, *options: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return "", options, (PYTHON, "flag.py", kind)


LIGHTNING = ("--num-nodes", "{num_nodes}", "--devices", "{devices}", "--max-steps", "20000")
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "flag": _flag("plain"),
    "default after first": _flag("default"),
    "counter": _flag("counter"),
    "bash": ("", (), ("bash", "trap.sh")),
    "C": ("", (), ("./steps",)),
    "pool": _flag("pool"),
    "loader": _flag("loader"),
    "torchrun": _flag("ddp", "--launcher", "torchrun"),
    "accelerate": _flag("ddp", "--launcher", "accelerate"),
    "trainer": (BUILT_IN, (), ()),
    "task": (TASK % ("Mapped", 2), (), ()),
    "stream": (TASK % ("Streamed", 0), (), ()),
    "loop": ("train: {steps: 20000}\n", (), (PYTHON, "attached.py")),
    "HF Trainer": ("", (), (PYTHON, "hf_trainer.py", "jit")),
    "HF Trainer, agreed": ("", (), (PYTHON, "hf_trainer.py", "callback")),
    "Lightning": ("", ("--launcher", "lightning"), (PYTHON, "lightning_fit.py", *LIGHTNING)),
    "DeepSpeed": ("", ("--launcher", "deepspeed"), (PYTHON, "deepspeed_loop.py")),
}
"""Maps a workload to its config, its options and its command."""


@dataclass
class Cell:
    """The effect of one stop request on a run."""

    signals: str
    lost: int | None
    """Number of lost steps; None if no later attempt has started."""
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"{self.signals} / {'?' if self.lost is None else self.lost}"


def submit(login: Login, name: str, more: Iterable[str]) -> RunDir:
    """Submit a workload on two hosts."""
    text, own, command = CASES[name]
    config = login.folder / f"{re.sub(r'[^a-z]+', '-', name.lower())}.yaml"
    config.write_text(CONFIG + text)
    return login.submit(
        *("--nodes", str(NUM_RANKS), "--gpus-per-node", "1", "--partition", "low", "--no-snapshot"),
        *settings("resources.cpus_per_gpu=1", "resources.mem=6G"),
        *settings(f"launch.env.LD_PRELOAD={login.folder / 'heard.so'}"),
        *(*own, *more, *(("--", *command) if command else ())),
        config=config,
    )


def steps(name: str, run: RunDir, attempt: int) -> list[int]:
    """Return the steps that an attempt has computed so far."""
    if name in SAVED_BY_TRAINKIT:
        return steps_of(run, attempt)
    log = run.attempt(attempt).rank_log(0)
    text = log.read_text(errors="replace") if log.exists() else ""
    return [int(number) for number in re.findall(r"^step (\d+)", text, re.MULTILINE)]


def has_ended(run: RunDir, attempt: int) -> bool:
    return newest_attempt(run) > attempt or run.attempt(attempt).end_file.exists()


def has_steps(name: str, run: RunDir, attempt: int) -> bool:
    """Return whether an attempt has computed enough steps for a stop request, or has already ended."""
    return len(steps(name, run, attempt)) >= MIN_STEPS or has_ended(run, attempt)


def heard(run: RunDir, attempt: int) -> tuple[str, str]:
    """Return the signals of each rank in an attempt, with their names and senders."""
    counts, seen = [], []
    for who in (*map(str, range(NUM_RANKS)), "launcher"):
        file = run.path / f"heard-{attempt}-{who}"
        lines = file.read_text().splitlines() if file.exists() else []
        counts.append(sum(line.startswith("rank ") for line in lines))
        seen += [f"{who}: {count} x {line}" for line, count in Counter(lines).items()]
    ranks = sorted(set(counts[:NUM_RANKS]))
    return "-".join(map(str, ranks)), "; ".join(seen) or "no handler was called"


def ask(login: Login, what: str, runs: Iterable[RunDir]) -> None:
    """Ask all runs to stop in the given way."""
    if what == "preempted":
        preempt(login.cluster)
    for run in runs:
        if what in ("USR2", "TERM"):
            login.run(["scancel", f"--signal={what}", login.job_id(run)], check=True)
        elif what in ("requeue", "cancel"):
            login.trainkit(what, str(run.path), check=True)


def wait_or_note(condition: Callable[[], bool], what: str) -> bool:
    """Return whether a condition became true in time; if not, print a note and continue."""
    try:
        wait_for(condition, what, TIMEOUT_S, 0.2)
    except AssertionError as error:
        print(f"- {error}", flush=True)
        return False
    return True


def judge(login: Login, name: str, run: RunDir, attempt: int) -> Cell:
    """Wait until a run continues after a stop request in an attempt; return the request's effect."""
    if not wait_or_note(lambda: has_ended(run, attempt), f"the end of attempt {attempt} of {name}"):
        return Cell("?", None, ["never ended"])
    wait_or_note(run.attempt(attempt).end_file.exists, f"end.json of attempt {attempt} of {name}")
    end = read_json(run.attempt(attempt).end_file)
    signals, senders = heard(run, attempt)
    status = login.status(run)
    which = ("--attempt", str(attempt))
    diagnosed = login.trainkit("diagnose", str(run.path), *which).stdout.strip().splitlines()
    lines = [
        senders,
        f"end: {end['state']}, {end['action']}, {end['cause']}: {end['reason']}",
        f"status: {json.dumps({key: status[key] for key in ('state', 'reason') if key in status})}",
        f"diagnose: {' | '.join(diagnosed[:3])}",
    ]
    if end["action"] not in RETURNS:
        resumed = login.trainkit("resume", str(run.path))
        lines += [f"resume: {resumed.stderr.strip()}"] if resumed.returncode else []
    last = max(steps(name, run, attempt), default=0)
    after = attempt + 1
    if not wait_or_note(lambda: bool(steps(name, run, after)), f"a step of attempt {after} of {name}"):
        return Cell(signals, None, lines)
    return Cell(signals, last + 1 - steps(name, run, after)[0], lines)


def disturb(login: Login, names: list[str], asks: list[str]) -> dict[tuple[str, str], Cell]:
    """Submit workloads, and stop them in the given ways, one after another."""
    found: dict[tuple[str, str], Cell] = {}
    for series, more in (([a for a in asks if a != "limit"], ()), (asks, LIMIT)):
        if not series or (more and "limit" not in asks):
            continue
        runs = {name: submit(login, name, more) for name in names}
        for number, what in enumerate(["limit"] if more else series, 1):
            for name, run in list(runs.items()):
                is_ready = partial(has_steps, name, run, number)
                if not wait_or_note(is_ready, f"{MIN_STEPS} steps of {name}"):
                    runs.pop(name)
                    found[name, what] = Cell("?", None, [f"no {MIN_STEPS} steps: see {run.path}"])
            ask(login, what, runs.values())
            for name, run in runs.items():
                cell = found[name, what] = judge(login, name, run, number)
                print(f"- {what}, {name}: {cell.text}", flush=True)
                for line in cell.lines:
                    print(f"  - {line}", flush=True)
        for run in runs.values():
            login.trainkit("cancel", "--now", str(run.path))
        login.cluster.cancel_all()
    return found


ASKS = ("preempted", "requeue", "USR2", "TERM", "cancel", "limit")


def options(doc: str | None, cases: Iterable[str], asks: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options for the cases, and for the ways to stop them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slurm", help="a version such as 24.11; default: the installed one")
    parser.add_argument(
        "--cgroups", action="store_true", help="confine jobs, and let Slurm find their processes by cgroup"
    )
    parser.add_argument("--cases", nargs="+", choices=cases, default=[*cases])
    parser.add_argument("--asks", nargs="+", choices=asks, default=[*asks])
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    return parser


@contextmanager
def on_cluster(args: argparse.Namespace, folder: Path) -> Iterator[tuple[Login, int]]:
    """Yield a login node, and how many two-rank runs it can start at the same time; print the duration."""
    began_s = time.monotonic()
    cluster = up(accounting=False, owner=Pid.of(os.getpid()), slurm=args.slurm, with_cgroups=args.cgroups)
    try:
        at_once = NUM_HOSTS // NUM_RANKS * (os.cpu_count() or 1) if args.cgroups else AT_ONCE
        yield Login(cluster, folder), at_once
    finally:
        cluster.down()
    how = f"Slurm {args.slurm or 'as installed'}{', cgroups' if args.cgroups else ''}"
    print(f"\n{how}, {time.monotonic() - began_s:.0f} s")


def print_cells(
    what: str, columns: Sequence[str], rows: Mapping[str, Sequence[Cell | None]], folder: Path | None
) -> None:
    """Print a table of cells, and the folder of the runs if the folder is kept."""
    print(f"\n| {what} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cell.text if cell else '-' for cell in cells)} |")
    if folder is not None:
        print(f"\nthe runs are in {folder}")


def prepare(folder: Path) -> None:
    """Write the scripts, the program and the library into a folder."""
    for part in (*PARTS.glob("*.py"), *PARTS.glob("*.sh"), LIGHTNING_EXAMPLE):
        shutil.copy(part, folder)
    for source, target in (("heard.c", ("-shared", "-fPIC", "-o", "heard.so")), ("steps.c", ("-o", "steps"))):
        command = ["gcc", "-O1", *target, str(PARTS / source), "-ldl"]
        subprocess.run(command, cwd=folder, check=True)
    (folder / "text.txt").write_text("".join(f"line {n} says {n * n}\n" for n in range(4000)))


def main() -> int:
    args = options(__doc__, CASES, ASKS).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="notices-"))
    prepare(folder)
    found: dict[tuple[str, str], Cell] = {}
    with on_cluster(args, folder) as (login, at_once):
        for first in range(0, len(args.cases), at_once):
            found |= disturb(login, args.cases[first : first + at_once], args.asks)
    rows = {name: [found.get((name, what)) for what in args.asks] for name in args.cases}
    print_cells("workload", args.asks, rows, folder if args.keep else None)
    if not args.keep:
        shutil.rmtree(folder)
    return 0 if all(cell.lost is not None and cell.lost <= 0 for cell in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
