"""Terminate attempts in several ways, and compare each diagnosis with the true cause.

    python -m benchmarks.diagnosis_campaign --runs 60 --seed 0

Starts a cluster of four hosts on this machine (as root; see tools/slurm_cluster). Up to six runs, each with
two ranks, are active on the cluster at the same time. In each run, one or two ranks are killed, each in a
separate attempt. The run restarts after each kill, usually inside its allocation. After the kills, Slurm
terminates all six jobs: by a preemption with or without grace time, at the time limit, by the loss of a host,
or by scancel. In half of the rounds, the cluster has no accounting. In every other run, the requeued job
loses another rank, after which the run is cancelled. `trainkit diagnose --attempt` must name the cause of
every attempt's end, and each killed rank with its host.

The benchmark prints one line per run; the same seed draws the same runs. The exit code is 0 if all diagnoses
are correct.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.on_slurm import survival
from tests.on_slurm.login import Login, log_of, settings, wait_for
from tools.slurm_cluster.cluster import Cluster, up
from tools.slurm_cluster.processes import Pid
from trainkit.run.rundir import RunDir

AT_ONCE = 6
COMMANDS_AT_ONCE = 2
NUM_RANKS = 2
OPTIONS = ("--partition", "low", "--nodes", str(NUM_RANKS), "--gpus-per-node", "1")
CAUSES = {
    "preemption": "preempted",
    "preemption without notice": "preempted",
    "time limit": "time-limit",
    "lost host": "node-failure",
    "scancel": "cancelled",
}
WEIGHTS = (4, 3, 1, 1, 1)
WAITS = """
import os, signal, sys, time
asked, is_deaf = [], sys.argv[1] == "deaf"
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN if is_deaf else lambda n, frame: asked.append(n))
print("started", flush=True)
while not asked:
    time.sleep(0.02)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
sys.exit(75)
"""


@dataclass(frozen=True)
class Kill:
    """A SIGKILL to a rank, some seconds after all ranks of an attempt have started."""

    rank: int
    after_s: float


@dataclass
class Flight:
    """One run: the kills before and after Slurm ends its job, and the true cause of each attempt's end."""

    number: int
    before: Sequence[Kill]
    after: Sequence[Kill]
    login: Login = field(init=False)
    run: RunDir = field(init=False)
    done: list[tuple[str, int | None, str | None]] = field(default_factory=list)
    """The expected signature of each attempt and, if a rank was killed, its rank and host."""

    def submit(self, ears: str) -> None:
        """Submit the run, with ranks that handle or ignore signals."""
        limits = settings("resources.time='10'", "requeue.grace_s=10", "requeue.max_crashes=10")
        self.run = self.login.submit(*OPTIONS, *limits, "--", "python", "waits.py", ears)

    def kill(self, kills: Sequence[Kill]) -> None:
        """Kill each rank in a new attempt after all ranks have started; await the end of the last one."""
        self._wait_for_ranks()
        for kill in kills:
            time.sleep(kill.after_s)
            pid = self._pid(kill.rank)
            self.done.append(("killed", kill.rank, self.hosts()[kill.rank]))
            os.kill(pid, signal.SIGKILL)
            self._wait_for_ranks()

    def cancel(self) -> None:
        """Cancel the run; call this directly after `kill`."""
        done = self.login.trainkit("cancel", str(self.run.path), "--now")
        assert done.returncode == 0, done.stderr
        self.done.append(("cancelled", None, None))

    def wrong(self) -> list[str]:
        """Return the attempts whose diagnosis differs from the true cause."""
        wrong = []
        for attempt, (name, rank, host) in enumerate(self.done, 1):
            done = self.login.trainkit("diagnose", str(self.run.path), "--attempt", str(attempt), "--json")
            found = json.loads(done.stdout)
            is_right = (found["name"], found["rank"]) == (name, rank)
            if not is_right or (host is not None and found["host"] != host):
                said = f"{found['name']}, rank {found['rank']} on {found['host']}: {found['cause']}"
                wrong.append(f"attempt {attempt} was {name}, rank {rank} on {host}; diagnose says {said}")
        return wrong

    def hosts(self) -> list[str]:
        """Return the hosts of the ranks in the newest attempt, in rank order."""
        return survival.hosts_of(self.run, len(self.done) + 1)

    def _wait_for_ranks(self) -> None:
        what = f"all ranks of attempt {len(self.done) + 1} of run {self.number}"
        attempt = len(self.done) + 1
        wait_for(lambda: all("started" in log_of(self.run, rank, attempt) for rank in range(NUM_RANKS)), what)

    def _pid(self, rank: int) -> int:
        """Return the pid of a rank in the newest attempt; this machine sees the processes of all hosts."""
        wanted = {
            "TRAINKIT_JOB_RUN_DIR": str(self.run.path),
            "TRAINKIT_JOB_ATTEMPT": str(len(self.done) + 1),
            "RANK": str(rank),
        }
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # not a process, or a process that is exiting
                lines = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                is_rank = wanted.items() <= dict(line.partition("=")[::2] for line in lines).items()
                if is_rank and b"waits.py" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        raise AssertionError(f"rank {rank} of run {self.number} has ended by itself")


def draw(num_runs: int, seed: int) -> list[tuple[str, bool, list[Flight]]]:
    """Draw how Slurm terminates the jobs of a round, whether the cluster has accounting, and the runs."""
    chance = random.Random(seed)

    def kills(count: int) -> list[Kill]:
        return [Kill(chance.randrange(NUM_RANKS), chance.uniform(0.0, 2.0)) for _ in range(count)]

    rounds = []
    for first in range(0, num_runs, AT_ONCE):
        end, has_accounting = chance.choices(list(CAUSES), WEIGHTS)[0], chance.random() < 0.5
        numbers = range(first + 1, min(first + AT_ONCE, num_runs) + 1)
        flights = [Flight(number, kills(chance.choice((1, 1, 2))), kills(number % 2)) for number in numbers]
        rounds.append((end, has_accounting, flights))
    return rounds


class Campaign:
    """The runs drawn from one seed, and the cluster on which they run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.counts: Counter[str] = Counter()
        self.num_wrong = 0

    def fly(self, end: str, has_accounting: bool, flights: Sequence[Flight]) -> None:
        """Run one round of runs, which Slurm terminates in the given way."""
        is_deaf = end == "preemption without notice"
        with survival.preemption(self.cluster):
            survival.set_preemption(self.cluster, "REQUEUE", 0 if is_deaf else 10)
            if not has_accounting:
                self.cluster.stop_accounting()
            _each(flights, lambda flight: flight.submit("deaf" if is_deaf else "listens"), COMMANDS_AT_ONCE)
            _each(flights, lambda flight: flight.kill(flight.before))
            self._end(end, flights)
            back = [flight for flight in flights if flight.done[-1][0] != "cancelled"]
            _each(back, lambda flight: flight.kill(flight.after))
            _each(back, lambda flight: flight.cancel(), COMMANDS_AT_ONCE)
            flights[0].login.wait_until_idle()
            found = _each(flights, lambda flight: flight.wrong(), COMMANDS_AT_ONCE)
        self.cluster.restore()
        how = f"{end}, {'with' if has_accounting else 'without'} accounting"
        for flight, wrong in zip(flights, found, strict=True):
            self.counts.update(name for name, _, _ in flight.done)
            self.num_wrong += len(wrong)
            names = " ".join(name if rank is None else f"{name}({rank})" for name, rank, _ in flight.done)
            print(f"{flight.number:3d} {'WRONG' if wrong else 'right'}  {how}: {names}", flush=True)
            for text in wrong:
                print(f"           {text}", flush=True)

    def _end(self, end: str, flights: Sequence[Flight]) -> None:
        """Make Slurm terminate all jobs, and wait until the jobs have ended."""
        jobs = [flight.login.job_id(flight.run) for flight in flights]
        index = len(self.cluster.hosts)
        lost, cause = None, CAUSES[end]
        if end == "lost host":
            lost = max(host for flight in flights for host in flight.hosts())
            index = self.cluster.hosts.index(lost) + 1
        for flight, job in zip(flights, jobs, strict=True):
            is_spared = lost is not None and lost not in flight.hosts()
            if end == "scancel" or is_spared:
                self.cluster.run(["scancel", job], check=True)
            elif end == "time limit":
                self.cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=1"], check=True)
            flight.done.append(("cancelled" if is_spared else cause, None, None if is_spared else lost))
        if cause == "preempted":
            survival.preempt(self.cluster)
            return
        if lost is not None:
            self.cluster.kill_host(index)
        for flight, job in zip(flights, jobs, strict=True):
            flight.login.wait_for_end(flight.run, len(flight.done))
            if end == "time limit":
                self.cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=10"], check=True)
        if lost is not None:
            self.cluster.revive_host(index)


def _each(flights: Sequence[Flight], act: Callable[[Flight], Any], at_once: int = AT_ONCE) -> list[Any]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(act, flights))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="diagnosis-campaign-"))
    cluster = up(owner=Pid.of(os.getpid()))
    try:
        campaign = Campaign(cluster)
        for end, has_accounting, flights in draw(options.runs, options.seed):
            for flight in flights:
                # Use a separate home folder, so that the hosts that one run excludes are not excluded by the
                # next run.
                home = folder / f"run-{flight.number:03d}"
                home.mkdir(parents=True)
                flight.login = Login(cluster, home)
                flight.login.script(WAITS, "waits.py")
            campaign.fly(end, has_accounting, flights)
    finally:
        cluster.down()
    shown = ", ".join(f"{count} {name}" for name, count in campaign.counts.most_common())
    print(f"{options.runs} runs, {campaign.counts.total()} attempts ({shown}): {campaign.num_wrong} wrong")
    if campaign.num_wrong:
        print(f"kept: {folder}")
    elif options.keep is None:
        shutil.rmtree(folder)
    return int(campaign.num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
