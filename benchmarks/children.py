"""Check that a stop signal affects the children of a rank as without trainkit, and that workers survive.

    python -m benchmarks.children [--count 200] [--seed 1] [--kinds sigwait ...] [--slurm 24.11]

Starts a rank with `--count` children of each kind (`notice_cases/children.py`), both with trainkit and
without. After all children are ready, every process receives a signal at a seeded moment. Without
`--slurm`, this process sends the signals that Slurm would send, one kind at a time. With `--slurm`, two jobs
with children of all kinds are preempted in a cluster on this machine (as root; `installed` is the installed
version). pyenv provides the old Python versions. The exit code is 0 if the children of each kind exit as
without trainkit and the workers survive.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.notice_cases.children import HEARS, OLD_PYTHONS, SPARED
from tests.job.test_spare_children import AGENT, lines, signal_step
from tests.on_slurm.login import TIMEOUT_S, Login, log_of, settings, wait_for
from tests.on_slurm.survival import preempt, set_preemption
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
from trainkit.job.node.worker_env import STARTUP_FOLDER

PROGRAM = Path(__file__).parent / "notice_cases/children.py"
READY, LAST = "all are ready", "signals of the rank"
LONGEST_DELAY_S = 1.0


def played(count: int, kinds: Sequence[str], delay_s: float, *, with_trainkit: bool) -> str:
    """Signal a rank and all of its descendants; return the output of the rank."""
    path = os.environ.get("PYTHONPATH", "")
    environ = {**os.environ, "RANK": "0"} | (
        {"PYTHONPATH": f"{STARTUP_FOLDER}:{path}"} if with_trainkit else {}
    )
    argv = [sys.executable, "-c", AGENT, str(PROGRAM), str(count), *kinds]
    agent = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed = ""
        while READY not in printed and agent.poll() is None:
            printed += lines(agent, 1)[0] + "\n"
        time.sleep(delay_s)
        signal_step(agent)
        while LAST not in printed and (line := lines(agent, 1)[0]):
            printed += line + "\n"
        return printed
    finally:
        # Kill the whole group, because a Pool starts new workers in place of workers that have exited.
        os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


def preempted(
    login: Login, count: int, kinds: Sequence[str], spared: Sequence[str], delay_s: float
) -> list[str]:
    """Preempt a job with and a job without trainkit at the same time; return the output of each rank."""
    output = login.folder / "bare.log"
    command = [sys.executable, str(PROGRAM), str(count)]
    bare = ["srun", *command, *kinds]
    options = [
        "--partition=low",
        "--nodes=1",
        "--exclusive",
        "--mem=0",
        f"--output={output}",
        "--open-mode=append",
    ]
    login.run(["sbatch", *options, f"--wrap=exec {shlex.join(bare)}"], check=True)
    run = login.submit(
        *("--nodes", "1", "--gpus-per-node", "1", "--partition", "low", "--no-snapshot"),
        *settings("requeue.grace_s=50", "resources.extra.exclusive=true"),
        *("--", *command, *kinds, *spared),
    )
    texts = [lambda: output.read_text() if output.exists() else "", lambda: log_of(run)]
    for text in texts:
        wait_for(lambda text=text: READY in text(), READY, 3 * TIMEOUT_S, 0.5)  # type: ignore[misc]
    time.sleep(delay_s)
    preempt(login.cluster)
    for text in texts:
        wait_for(lambda text=text: LAST in text(), LAST, TIMEOUT_S, 0.5)  # type: ignore[misc]
    return [text() for text in texts]


def outcomes(printed: str, kind: str) -> str:
    """Return how the children of a kind have exited, and their output."""
    return "; ".join(line[len(kind) + 2 :] for line in printed.splitlines() if line.startswith(f"{kind}: "))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*HEARS, *OLD_PYTHONS, *SPARED]
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=known, default=known)
    parser.add_argument("--slurm", help="a version such as 24.11, or installed; default: none")
    args = parser.parse_args()
    draw, kinds, found = random.Random(args.seed), args.kinds, {}
    compared = [kind for kind in kinds if kind not in SPARED]
    workers = [kind for kind in kinds if kind in SPARED]
    if args.slurm is None:
        for kind in kinds:
            delay_s = draw.uniform(0, LONGEST_DELAY_S)
            bare = "" if kind in SPARED else played(args.count, [kind], delay_s, with_trainkit=False)
            found[kind] = bare, played(args.count, [kind], delay_s, with_trainkit=True)
            report(found, [kind], args.count)
        return 0 if all(is_right(found, kind, args.count) for kind in kinds) else 1
    version = None if args.slurm == "installed" else args.slurm
    folder = Path(tempfile.mkdtemp(prefix="children-"))
    cluster = up(accounting=False, owner=Pid.of(os.getpid()), slurm=version)
    try:
        set_preemption(cluster, "REQUEUE", 60)
        delay_s = draw.uniform(0, LONGEST_DELAY_S)
        both = preempted(Login(cluster, folder), args.count, compared, workers, delay_s)
    finally:
        cluster.down()
    found = dict.fromkeys(kinds, (both[0], both[1]))
    report(found, kinds, args.count)
    shutil.rmtree(folder)
    return 0 if all(is_right(found, kind, args.count) for kind in kinds) else 1


def is_right(found: dict[str, tuple[str, str]], kind: str, count: int) -> bool:
    """Return whether all children of a kind have exited as without trainkit or, for workers, as intended."""
    bare, with_trainkit = (outcomes(text, kind) for text in found[kind])
    return with_trainkit == (f"{count} x {SPARED[kind]}" if kind in SPARED else bare) != ""


def report(found: dict[str, tuple[str, str]], kinds: Sequence[str], count: int) -> None:
    """Print a line for each kind."""
    for kind in kinds:
        bare, with_trainkit = (outcomes(text, kind) for text in found[kind])
        verdict = "right" if is_right(found, kind, count) else "WRONG"
        print(f"| {kind} | {bare or 'not compared'} | {with_trainkit} | {verdict} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
