"""Count the calls of Slurm commands while 12 programs wait for one run.

    python -m benchmarks.waiting_programs                       # 10 minutes with a minimum interval of 120 s
    python -m benchmarks.waiting_programs --min-poll-s 0        # without a minimum interval
    python -m benchmarks.waiting_programs --minutes 0.5 --min-poll-s 10

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster) and submits a run. The job
is held for the first half of the time, and runs for the second half. The programs are the examples in
docs/programs.md, four of each: the shell loop, the command of the Snakemake rule, and the poller, which is
called every 10 seconds. The exit code is 1 if Slurm is called more often than once per interval, or if a
program does not detect that the run has finished.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.on_slurm.login import HOLD, Login
from tools.slurm_cluster.cluster import up
from tools.slurm_cluster.processes import Pid
from trainkit.cluster.min_poll import VARIABLE
from trainkit.run.rundir import RunDir

PAGE = Path(__file__).parents[1] / "docs/programs.md"
COMMANDS = ("squeue", "sacct", "scontrol", "sinfo", "sacctmgr", "sdiag", "sprio", "sshare")
EACH = 4
POLL_S = 10.0
END_TIMEOUT_S = 300.0
"""Maximum time within which the programs must exit after the run has finished, in seconds: two intervals and
a margin."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--min-poll-s", type=float, default=120.0)
    args = parser.parse_args()
    seconds = args.minutes * 60
    folder = Path(tempfile.mkdtemp(prefix="waiting-programs-"))
    cluster = up(owner=Pid.of(os.getpid()))
    try:
        codes, calls = count(Login(cluster, folder), seconds, args.min_poll_s)
    finally:
        cluster.down()
        shutil.rmtree(folder)
    print(f"| programs | minutes | minimum interval s | {' | '.join(calls)} | all calls |")
    print(f"|---|---|---|{'---|' * len(calls)}---|")
    numbers = " | ".join(map(str, calls.values()))
    print(f"| {len(codes)} | {args.minutes:g} | {args.min_poll_s:g} | {numbers} | {calls.total()} |")
    if any(codes):
        sys.exit(f"error: exit codes {codes}: a program did not see that the run has finished")
    if args.min_poll_s and calls.total() > 1 + seconds / args.min_poll_s:
        sys.exit("error: Slurm was called more often than once per interval")


def count(login: Login, seconds: float, min_poll_s: float) -> tuple[list[int], Counter[str]]:
    """Return the exit codes of all programs, and how often each Slurm command was called in `seconds`."""
    (login.folder / "train.py").write_text(f"import time; time.sleep({seconds / 2})")
    run = login.submit("--gpus-per-node", "1", *HOLD, "--", "python", "train.py")
    path, log = recording_path(login)
    env = {"PATH": path, VARIABLE: f"{min_poll_s:g}"} if min_poll_s else {"PATH": path}
    environ = {**login.cluster.environ, **login.env, **env}
    programs = [
        subprocess.Popen(argv, cwd=login.folder, env=environ, stderr=subprocess.DEVNULL)
        for argv in command_lines(run)
        for _ in range(EACH)
    ]
    time.sleep(seconds / 2)
    login.run(["scontrol", "release", login.job_id(run)], check=True)
    time.sleep(seconds / 2)
    calls = Counter(log.read_text().split())
    login.wait_for_end(run)
    return [program.wait(END_TIMEOUT_S) for program in programs], calls


def recording_path(login: Login) -> tuple[str, Path]:
    """Return a PATH on which the Slurm commands record each call, and the file with the records.

    The PATH also contains `trainkit`.
    """
    folder, log = login.folder / "recording", login.folder / "calls"
    folder.mkdir()
    path = login.cluster.variables["PATH"]
    for name in COMMANDS:
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} >> "{log}"\nexec {shutil.which(name, path=path)} "$@"\n')
        script.chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{path}", log


def command_lines(run: RunDir) -> list[list[str]]:
    """Return the command lines of the three examples in docs/programs.md, for `run`."""
    page = PAGE.read_text()
    blocks = dict(
        reversed(re.findall(r"^```(bash|snakemake|python)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    )
    loop = blocks["bash"].replace("run=$(trainkit submit mine.yaml | head -n 1)", f"run={run.path}")
    [rule] = re.findall(r'^ *"(test .*)"$', blocks["snakemake"], re.MULTILINE)
    loop_of_polls = f"import time\nwhile not has_finished({str(run.path)!r}):\n    time.sleep({POLL_S})\n"
    return [
        ["bash", "-c", loop],
        ["sh", "-c", rule.replace("runs/mine", str(run.path))],
        [sys.executable, "-c", blocks["python"] + loop_of_polls],
    ]


if __name__ == "__main__":
    main()
