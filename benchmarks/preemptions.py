"""Check the recorded end of scripts that handle no signals and whose ranks die before their agents.

    python -m benchmarks.preemptions [--slurm 24.11] [--ends 60] [--seed 0] [--ways preempted ...] [--calm]

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster), and submits the script with
seeded options: one or two hosts with 1 to 4 ranks each, one task per GPU or per node, and both backends. As
many runs as possible are active at the same time. Each run may crash once (`requeue.max_crashes: 1`). Ranks
and agents have a higher priority than slurmstepd, so that a rank is dead and its agent has reaped the rank
before slurmstepd signals the agent. `--calm` keeps the normal priorities.

The ways to end a run are preemption (requeued with a grace time of 10 s or without one, or cancelled),
scancel of a job or of a step, the time limit, a drained host, and a SIGTERM that a user sends without Slurm.
Only the SIGTERM from a user is a crash. The benchmark prints each wrong record and a table. The exit code is
0 if all recorded ends are correct and no run has written a note about a node.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.on_slurm.login import BACKENDS, Login, settings
from tests.on_slurm.preemptions import Shape, hurry, notes_about_nodes
from tests.on_slurm.survival import preempt, set_preemption
from tests.support.programs import ranks_of
from tools.slurm_cluster.cluster import NUM_HOSTS, up
from tools.slurm_cluster.config_files import NUM_GPUS
from tools.slurm_cluster.processes import Pid
from trainkit.run.rundir import RunDir

AGAIN = 4
"""Number of times that a run is preempted before other runs replace it."""
END_S = 400.0
Runs = Sequence[tuple[Shape, RunDir]]


def draw_shapes(rng: random.Random) -> list[Shape]:
    """Draw some shapes that fit together on the hosts of the cluster."""
    free, shapes = [NUM_GPUS] * NUM_HOSTS, list[Shape]()
    for _ in range(12):
        shape = Shape(
            rng.choice((1, 2)), rng.randint(1, NUM_GPUS), rng.choice(("gpu", "node")), rng.choice(BACKENDS)
        )
        fitting = [host for host, gpus in enumerate(free) if gpus >= shape.ranks_per_host][: shape.hosts]
        if len(fitting) == shape.hosts:
            shapes.append(shape)
            for host in fitting:
                free[host] -= shape.ranks_per_host
    return shapes


@dataclass(frozen=True)
class Way:
    """A way to end runs."""

    end: Callable[[Login, Runs], None]
    expected: tuple[str, str | None]
    """The expected action and cause in end.json."""
    again: int = 1
    """Number of times that a run can end in this way."""
    options: tuple[str, ...] = ()
    share: int = 4
    """The number of ends for this way is the requested number divided by `share`."""


def _preempted(mode: str, grace_s: int) -> Callable[[Login, Runs], None]:
    def end(login: Login, runs: Runs) -> None:
        set_preemption(login.cluster, mode, grace_s)
        preempt(login.cluster)

    return end


def _scancel(*options: str, step: str = "") -> Callable[[Login, Runs], None]:
    def end(login: Login, runs: Runs) -> None:
        login.run(["scancel", *options, *(f"{login.job_id(run)}{step}" for _, run in runs)], check=True)

    return end


def _wait(login: Login, runs: Runs) -> None:
    """Wait for the time limit; Slurm sends the warning signal."""


def _drained(login: Login, runs: Runs) -> None:
    """Drain a host as an administrator would for a reboot, which kills the processes on the host."""
    hosts = ",".join(login.cluster.hosts)
    login.run(["scontrol", "update", f"nodename={hosts}", "state=drain", "reason=reboot"], check=True)
    _kill(login, runs)


def _kill(login: Login, runs: Runs) -> None:
    for _, run in runs:
        os.kill(ranks_of(run)[0], signal.SIGTERM)


REQUEUED = ("requeue", "preempted")
STOPPED = ("stopped", None)
LIMIT = tuple(settings("resources.time='2'", "requeue.grace_s=20"))
WAYS = {
    "preempted": Way(_preempted("REQUEUE", 10), REQUEUED, AGAIN, share=1),
    "preempted, no grace time": Way(_preempted("REQUEUE", 0), REQUEUED, AGAIN),
    "preempted, cancelled": Way(_preempted("CANCEL", 10), REQUEUED, AGAIN),
    "scancel": Way(_scancel(), STOPPED),
    "scancel --signal=TERM of the step": Way(_scancel("--signal=TERM", step=".0"), STOPPED),
    "time limit": Way(_wait, ("requeue", "timeout"), options=LIMIT),
    "drained": Way(_drained, REQUEUED),
    "killed": Way(_kill, ("restart", "crash")),
}


def book(login: Login, way: Way, rng: random.Random, count: int, *, calm: bool) -> Counter[str]:
    """End runs in one way until there are `count` ends; return how often each kind of end was recorded."""
    found = Counter[str]()
    while found.total() < count:
        runs = [(shape, shape.submit(login, *way.options)) for shape in draw_shapes(rng)]
        for attempt in range(1, way.again + 1):
            for shape, run in runs:
                shape.wait_for_ranks(login, run, attempt)
                if not calm:
                    hurry(run)
            way.end(login, runs)
            for shape, run in runs:
                end = login.wait_for_end(run, attempt, END_S)
                is_right = (end["action"], end["cause"]) == way.expected
                is_right &= end["verdict"] is None or end["cause"] == "crash"
                found["as expected" if is_right else f"{end['action']}, {end['cause']}"] += 1
                if not is_right:
                    print(f"- {shape}, attempt {attempt}: {end['reason']} ({run.path})", flush=True)
        for _, run in runs:
            login.trainkit("cancel", "--now", str(run.path))
        login.cluster.restore()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slurm", help="a version such as 24.11; default: the installed one")
    parser.add_argument(
        "--ends", type=int, default=60, help="number of preemptions; each other way gets a fourth of it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--calm",
        action="store_true",
        help="keep the normal priorities, so that the order of the signals is random",
    )
    args = parser.parse_args()
    folder, began_s = Path(tempfile.mkdtemp(prefix="preemptions-")), time.monotonic()
    cluster = up(accounting=False, owner=Pid.of(os.getpid()), slurm=args.slurm)
    rows = dict[str, tuple[Counter[str], int]]()
    try:
        login = Login(cluster, folder)
        for name in args.ways:
            way, rng = WAYS[name], random.Random(f"{name} {args.seed}")
            before = len(notes_about_nodes(login))
            found = book(login, way, rng, max(1, args.ends // way.share), calm=args.calm)
            rows[name] = (found, len(notes_about_nodes(login)) - before)
            set_preemption(cluster, "REQUEUE", 10)
    finally:
        cluster.down()
    print(f"\nSlurm {args.slurm or 'as installed'}, {time.monotonic() - began_s:.0f} s:\n")
    print("| way | ends | as expected | otherwise | notes about nodes |\n|---|---|---|---|---|")
    for name, (found, notes) in rows.items():
        others = [f"{count} {how}" for how, count in found.items() if how != "as expected"]
        cells = (name, found.total(), found["as expected"], "; ".join(others) or "-", notes)
        print(f"| {' | '.join(map(str, cells))} |")
    all_right = all(set(found) == {"as expected"} and not notes for found, notes in rows.values())
    if all_right:
        shutil.rmtree(folder)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
