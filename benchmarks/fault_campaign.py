"""Inject random faults into several concurrent runs, and check that each run has the correct loss curve.

    python -m benchmarks.fault_campaign --faults 200 --seed 0

Starts a Slurm cluster of four hosts on this machine (as root; see tools/slurm_cluster). Two runs, each on two
hosts, train at any time, with every backend, with and without spare hosts. The faults are:

- SIGKILL of a rank, and a killed slurmd;
- a host that is disconnected from the network for 5 to 60 s;
- a stopped slurmctld;
- a full disk, and a damaged newest checkpoint;
- a host that sees an outdated folder.

The losses of each run must be equal, digit for digit, to the losses of an undisturbed run. A full disk, or
faults that occur faster than checkpoints are saved, may stop a run. If the reason for the stop matches the
faults, the benchmark resumes the run. No intact checkpoint may be lost, no job or process may be left behind,
and no port may clash. The benchmark prints one line per fault; the same seed draws the same faults.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.faults import Administrator, Fault, Striker, draw, one_of
from benchmarks.flight import Flight, processes_of
from tests.on_slurm import survival
from tests.on_slurm.login import BACKENDS, Login, settings
from tests.on_slurm.shared_disk import shared_small_disk
from tests.on_slurm.survival import Curve
from tools.slurm_cluster.cluster import Cluster, up
from tools.slurm_cluster.processes import Pid

RUNS_AT_ONCE = 2
NUM_STEPS = 300
PATIENCE_S = 90.0
"""Maximum time in seconds that a fault waits until the run computes steps."""
LOOK_EVERY_S = 1.0
HELP_EVERY_S = 5.0
LEFT_S = 90.0
"""Maximum time in seconds within which a reconnected host must kill its remaining processes."""
RETRY_S = 60.0
"""Seconds after which slurmstepd repeats a message that slurmctld missed, such as the end of a step."""
SLURM_OPTIONS = {"UnkillableStepTimeout": "600", "MinJobAge": "60"}
"""Options that keep Slurm from draining a host because of messages that could not be sent while the host was
disconnected."""


class Campaign:
    """The faults drawn from one seed, and the runs that they affect."""

    def __init__(
        self, login: Login, striker: Striker, faults: list[Fault], expected: Curve, seed: int
    ) -> None:
        self.login = login
        self.striker = striker
        self.administrator = Administrator(login.cluster, striker.away)
        self.faults = faults
        self.expected = expected
        self.chance = random.Random(f"runs of {seed}")
        self.flights: list[Flight] = []
        self.num_runs = 0
        self.num_struck = 0
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.began_s = time.monotonic()
        self._slurm_whole_at = 0.0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:7.1f} s  {text}", flush=True)

    def fly(self) -> None:
        """Inject all faults, and wait until every run has ended."""
        waiting = list(self.faults)
        last_s = look_s = help_s = time.monotonic()
        while waiting or self.flights:
            now = time.monotonic()
            self.striker.mend()
            if self.striker.active & {"cut", "slurmd", "slurmctld"}:
                self._slurm_whole_at = time.time() + RETRY_S
            if waiting and (victims := self._victims(waiting[0], now - last_s)):
                self._strike(waiting.pop(0), victims)
                last_s = time.monotonic()
            if self._slurm_answers():
                if now > help_s + HELP_EVERY_S:
                    help_s = now
                    self._help()
                if now > look_s + LOOK_EVERY_S:
                    look_s = now
                    self._look()
                while waiting and len(self.flights) < RUNS_AT_ONCE and "disk" not in self.striker.active:
                    self._submit()
            time.sleep(0.1)

    def _slurm_answers(self) -> bool:
        return "slurmctld" not in self.striker.active

    def _victims(self, fault: Fault, since_s: float) -> list[Flight]:
        """Return the runs that a fault can affect now."""
        if since_s < fault.gap_s:
            return []
        found = [one for one in self.flights if self.striker.can_strike(fault, one)]
        if not fault.waits or since_s > PATIENCE_S:
            return found
        return [one for one in found if one.computes()]

    def _strike(self, fault: Fault, victims: list[Flight]) -> None:
        flight = one_of(victims, fault.who)
        where = flight.where()
        done = self.striker.strike(fault, flight)
        self.num_struck += 1
        self.counts[fault.kind] += 1
        self.say(f"{fault.number:4d} {done} ({where})")
        for one in self.flights:
            if one is flight or fault.kind in ("slurmd", "cut", "slurmctld", "disk"):
                one.faults.append(done)
                one.recent_faults += 1
                one.disk_was_full |= fault.kind == "disk"

    def _help(self) -> None:
        for done in self.administrator.help():
            self.counts["help of an administrator"] += 1
            self.say(f"     administrator: {done}")

    def _submit(self) -> None:
        self.num_runs += 1
        backend, per = self.chance.choice(BACKENDS), self.chance.choice(("gpu", "node"))
        spare = self.chance.choice((0, 0, 1))
        run_dir = self.striker.disk / f"run-{self.num_runs:03d}"
        options = ("--backend", backend, "--per", per, "--run-dir", str(run_dir))
        config = self.login.folder / "survivor.yaml"
        run = self.login.submit(
            *options, *settings(f"resources.spare_nodes={spare}"), config=config, timeout_s=300
        )
        self.flights.append(Flight(self.login, run, f"{backend}, a task a {per}, {spare} spare"))

    def _look(self) -> None:
        for flight in list(self.flights):
            flight.look(calm=not self.striker.active)
            end = flight.end(self._slurm_whole_at)
            if end is None and not any("no step for" in text for text in flight.wrong):
                continue
            if end is not None and end["state"] != "finished":
                self._after_stop(flight, end)
                continue
            self.flights.remove(flight)
            self._conclude(flight, flight.judge_end(self.expected))

    def _after_stop(self, flight: Flight, end: dict[str, object]) -> None:
        wrong = flight.judge_stop(end)
        if wrong is not None:
            self.flights.remove(flight)
            self._conclude(flight, [*flight.wrong, wrong])
            return
        if "disk" in self.striker.active or self.login.job_id(flight.run) in self.login.jobs():
            return  # the run cannot be resumed without disk space, nor while its job is ending
        flight.stops.append(str(end["reason"]))
        self.counts["resumed"] += 1
        self.say(f"     {flight.where()} stopped: {end['reason']}; resumed")
        flight.disk_was_full = False
        flight.recent_faults = 0
        done = self.login.trainkit("resume", str(flight.run.path), timeout_s=300)
        if done.returncode:
            self.flights.remove(flight)
            self._conclude(flight, [*flight.wrong, f"it cannot be resumed: {done.stderr}"])

    def _conclude(self, flight: Flight, wrong: list[str]) -> None:
        num = f"{survival.newest_attempt(flight.run)} attempts, {len(flight.faults)} faults"
        self.say(
            f"     {flight.name} ({flight.kind}): {'; '.join(wrong) or 'equal'}; {num}; {flight.comebacks()}"
        )
        self.wrong += [f"{flight.name}: {text}" for text in wrong]
        if wrong:
            self.login.trainkit("cancel", str(flight.run.path), "--now", timeout_s=300)
            shutil.copytree(flight.run.path, self.login.folder / "wrong" / flight.name, symlinks=True)
        # The disk is small, so delete the checkpoints of the run. Keep other files, so that processes that
        # are still running in the folder can be found.
        shutil.rmtree(flight.run.checkpoints_dir, ignore_errors=True)


def left_behind(login: Login, disk: Path) -> list[str]:
    """Return the jobs and processes that remain after all runs have ended and all faults have been undone."""
    deadline_s = time.monotonic() + LEFT_S
    while (jobs := login.jobs()) + (processes := processes_of(disk)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return [f"job {job} is left" for job in jobs] + [f"process {line} is left" for line in processes]


def reference(login: Login) -> Curve:
    """Return the loss curve of an undisturbed run."""
    config = survival.survivor_config(login.folder, num_steps=NUM_STEPS)
    run = login.submit("--backend", "local", "--run-dir", str(login.folder / "reference"), config=config)
    end = survival.wait_until_over(login, run, 600)
    if end["state"] != "finished":
        raise SystemExit(login.logs_and_attempts(run))
    return survival.curve(run)


def campaign(cluster: Cluster, folder: Path, num_faults: int, seed: int) -> int:
    """Run one campaign; return its exit code."""
    login = Login(cluster, folder)
    (folder / "old").mkdir()
    expected = reference(login)
    with shared_small_disk(cluster, folder / "disk", "192m") as disk:
        striker = Striker(cluster, disk)
        under_way = Campaign(login, striker, draw(num_faults, seed), expected, seed)
        try:
            under_way.fly()
        except KeyboardInterrupt:
            under_way.wrong.append("interrupted")
        finally:
            striker.mend(everything=True)
        if under_way.flights:
            cluster.run(["scancel", "--user=root"], timeout_s=30)
        under_way.wrong += left_behind(login, disk)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(under_way.counts.items()))
    struck = f"{under_way.num_struck} of {num_faults} faults, {under_way.num_runs} runs"
    print(f"{struck}, {len(under_way.wrong)} wrong ({counts})")
    for text in under_way.wrong:
        print(f"WRONG {text}")
    return 1 if under_way.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="an empty folder; it keeps the files of failed checks")
    args = parser.parse_args()
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="fault-campaign-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cluster = up(options=SLURM_OPTIONS, owner=Pid.of(os.getpid()))
    try:
        code = campaign(cluster, folder, args.faults, args.seed)
    finally:
        shutil.copytree(cluster.folder / "log", folder / "slurm-log")
        cluster.down()
    if code == 0 and args.keep is None:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
