"""Run two commands on the same run at seeded moments, and compare their output with what happens.

    python -m benchmarks.control_races --rounds 200 --seed 0
    python -m benchmarks.control_races --rounds 20 --pair cancel-wait requeue

All pairs of `OPERATIONS` are tried, on this machine. Each round checks:

- The exit codes and messages of the commands agree with the behaviour of the run.
- Two attempts never run at the same time.
- No earlier attempt runs after `cancel --wait` has returned.
- The run uses the layout of the `resume` command that was accepted.
- The next commands work (`status`, then `requeue`, `resume` or `cancel`).

Commands, supervisors and agents run in forks of this process (`benchmarks/forked.py`), and a rank is a shell
script. The same seed yields the same moments, but the operating system may schedule the processes
differently.
"""

from __future__ import annotations

import argparse
import itertools
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.forked import Command, fork, forked_modules, preload
from tests.support.programs import is_running
from trainkit.backend import backend_of
from trainkit.run.files import parse_time, read_json
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir, is_supervised

OPERATIONS: dict[str, tuple[str, ...]] = {
    "cancel": ("cancel", "RUN"),
    "cancel-now": ("cancel", "RUN", "--now"),
    "cancel-wait": ("cancel", "RUN", "--wait"),
    "requeue": ("requeue", "RUN"),
    "resume": ("resume", "RUN", "--now"),
    "resume-2": ("resume", "RUN", "--now", "--nodes", "2"),
    "submit": ("submit", "--now", "--name", "NAME"),
    "crash": (),
}
STATES = ("running", "running", "running", "starting", "ended")
"""States of the run at the beginning of a round."""
ROUNDS_OF_A_RUN = 12
TIMEOUT_S = 120.0
REFUSED = (
    *("is running as", "is being cancelled", "cannot be locked", "is not running"),
    *("has ended, but Slurm still lists its job", "is already pending"),
)
"""Messages of a command that is refused because the other command of the pair came first."""
WORKER = """
echo "$TRAINKIT_JOB_ATTEMPT $$" >> "$TRAINKIT_JOB_RUN_DIR/ranks.txt"
while read attempt pid; do
  if [ "$attempt" != "$TRAINKIT_JOB_ATTEMPT" ] && grep -qs "^State:.[^ZX]" "/proc/$pid/status"; then
    echo "$attempt $pid $$" >> "$TRAINKIT_JOB_RUN_DIR/overlap.txt"
  fi
done < "$TRAINKIT_JOB_RUN_DIR/ranks.txt"
trap 'sleep 0.0'$(( $$ % 9 ))'; exit 75' TERM USR2
echo started
sleep 600 & wait $!
exit 0
"""
OPTIONS = (
    *("--backend", "local", "--gpus-per-node", "1", "--no-snapshot", "--set", "device=cpu"),
    *("--set", "requeue.grace_s=20"),
    *("--set", "requeue.max=1000", "--set", "requeue.max_crashes=1000", "--", "sh", "worker.sh"),
)


@dataclass
class Place:
    """A folder with a run, which is used for the rounds of one process, and the commands for the run."""

    folder: Path
    number: int = 0
    cwd: Path | None = None
    """Working directory of the commands; defaults to `folder`."""
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "worker.sh").write_text(WORKER)
        self.environ = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state")}

    def start(self, *argv: str) -> Command:
        self.number += 1
        log = self.folder / f"command-{self.number}.log"
        return Command(*argv, cwd=self.cwd or self.folder, environ=self.environ, log=log)

    def run(self, *argv: str) -> Command:
        command = self.start(*argv)
        wait_for(lambda: command.poll() is not None)
        return command

    def submit(self) -> RunDir:
        done = self.run("submit", "--now", "--name", f"r{self.number}", *OPTIONS)
        assert done.code == 0, done.said
        return RunDir(next(line for line in done.said.splitlines() if line.startswith("/")))


def wait_for(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> bool:
    """Wait for a condition; return whether it became true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def newest(run: RunDir) -> AttemptRecord:
    return read_job(run).newest or AttemptRecord()


def is_alive(run: RunDir) -> bool:
    return newest(run).alive() is True


def has_started(run: RunDir) -> bool:
    """Return whether the ranks of the newest attempt are alive and have installed their handlers."""
    entry = newest(run)
    lines = (run.path / "ranks.txt").read_text().split("\n") if (run.path / "ranks.txt").exists() else []
    if not all(
        is_running(int(pid)) for number, pid in map(str.split, lines[:-1]) if int(number) == entry.attempt
    ):
        return False
    if not entry.attempt:
        return False
    ranks = range(read_json(run.attempt(entry.attempt).plan_file)["num_nodes"])
    logs = (run.attempt(entry.attempt).rank_log(rank) for rank in ranks)
    return all(log.exists() and "started" in log.read_text() for log in logs)


def is_settled(run: RunDir) -> bool:
    """Return whether the run has ended, or is running and has not been asked to end."""
    entry = newest(run)
    if not entry.alive():
        return True
    is_asked = entry.is_cancelled or entry.requeue_requested_at is not None
    return not is_asked and not run.attempt(entry.attempt).end_file.exists() and has_started(run)


class Round:
    """One pair of operations on one run."""

    def __init__(self, place: Place, run: RunDir, pair: Sequence[str], chance: random.Random) -> None:
        self.place, self.run, self.pair, self.chance = place, run, pair, chance
        self.wrong: list[str] = []
        self.outcome = ""
        """Exit codes in the order of the pair, and the state of the run after both commands."""
        self.state = chance.choice(STATES)
        self.delay_s = chance.choice((0.0, chance.uniform(0.0, 0.12), chance.uniform(0.0, 0.6)))
        self.order = chance.sample(range(2), 2)
        self.commands: dict[int, Command] = {}

    def prepare(self) -> None:
        """Bring the run into the initial state of the round; all commands used for this must succeed."""
        if self.state == "ended" and is_alive(self.run):
            self._require("cancel", str(self.run.path), "--now")
        elif self.state != "ended" and not is_alive(self.run):
            again = ("requeue",) if self.chance.random() < 0.7 else ("resume", "--now", "--nodes", "1")
            self._require(again[0], str(self.run.path), *again[1:])
        if self.state == "running" and not wait_for(lambda: has_started(self.run)):
            self.wrong.append("its ranks did not start")
        self.before = len(read_job(self.run).attempts)

    def _require(self, *argv: str) -> None:
        done = self.place.run(*argv)
        if done.code:
            self.wrong.append(f"the next command {argv[0]} failed with {done.code}: {done.said}")

    def play(self) -> list[str]:
        self.prepare()
        if self.wrong:
            return self.wrong
        for count, index in enumerate(self.order):
            if count:
                time.sleep(self.delay_s)
            self._operate(index)
        if not wait_for(self._have_returned):
            self.wrong.append(f"a command did not return: {[one.argv for one in self.commands.values()]}")
            for command in self.commands.values():
                if command.poll() is None:
                    os.kill(command.pid, signal.SIGKILL)
        if not wait_for(lambda: is_settled(self.run), 60):
            self.wrong.append(f"it does not settle: {newest(self.run)}")
        self._judge()
        return self.wrong

    def _operate(self, index: int) -> None:
        name = self.pair[index]
        if name == "crash":
            pids = (line.split()[1] for line in (self.run.path / "ranks.txt").read_text().splitlines())
            for pid in map(int, pids):
                try:
                    if os.getpgid(pid) == pid:
                        os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return
        words = [str(self.run.path) if word == "RUN" else word for word in OPERATIONS[name]]
        words = [self.run.name if word == "NAME" else word for word in words]
        self.commands[index] = self.place.start(*words, *(OPTIONS if name == "submit" else ()))

    def _have_returned(self) -> bool:
        return None not in [command.poll() for command in self.commands.values()]

    def _judge(self) -> None:
        attempts = read_job(self.run).attempts
        started = [entry for entry in attempts[self.before :] if entry.reason != "restart"]
        accepted = Counter[str]()
        for index, command in self.commands.items():
            self._judge_command(index, command, accepted)
        if Counter(entry.reason for entry in started) != accepted:
            self.wrong.append(f"{dict(accepted)} said that they started an attempt, and {started} were")
        for before, after in itertools.pairwise(attempts):
            if before.is_cancelled and after.reason == "restart":
                self.wrong.append(f"attempt {before.attempt} was cancelled, and {after.attempt} followed")
        overlap = self.run.path / "overlap.txt"
        if overlap.exists():
            self.wrong.append(f"two attempts ran at once: {overlap.read_text()}")
            overlap.unlink()
        alive = is_alive(self.run)
        if alive != is_supervised(self.run):
            self.wrong.append(f"alive {alive}, but its supervisor's lock says otherwise")
        leftover = [entry for entry in attempts[:-1] if entry.pid != newest(self.run).pid and entry.alive()]
        if leftover:
            self.wrong.append(f"two supervisors: {leftover}")
        shown = self.place.run("status", str(self.run.path), "--json")
        state = json.loads(shown.said.splitlines()[-1])["state"] if shown.code == 0 else shown.said
        restarting = ("restarting",) if "crash" in self.pair else ()
        expected = (
            ("running", "starting", *restarting) if alive else ("cancelled", "stopped", "failed", "finished")
        )
        if state not in expected:
            self.wrong.append(f"status says {state}, alive is {alive}")
        codes = (self.commands[index].code for index in sorted(self.commands))
        self.outcome = f"{' '.join(map(str, codes))} {'runs' if alive else 'ended'}"

    def _judge_command(self, index: int, command: Command, accepted: Counter[str]) -> None:
        name, said, code = self.pair[index], command.said, command.code
        alive = is_alive(self.run)
        if code not in (0, 1, 2) or "unexpected" in said or "Traceback" in said:
            self.wrong.append(f"{name} exited with {code}: {said}")
        elif code == 2 and not any(text in said for text in REFUSED):
            self.wrong.append(f"{name} was refused: {said}")
        if name.startswith("cancel"):
            self._judge_cancel(index, command)
        elif code == 0 and name == "submit":
            folder = next(line for line in said.splitlines() if line.startswith("/"))
            if folder == str(self.run.path) or not wait_for(lambda: is_alive(RunDir(folder))):
                self.wrong.append(f"submit took {folder}")
            self._require("cancel", folder, "--now")
            # A rank that has just started may still write to the folder.
            wait_for(lambda: shutil.rmtree(folder, ignore_errors=True) or not Path(folder).exists())
        elif code == 0 and "will be requeued" in said:
            is_last = newest(self.run).attempt == self.before
            if is_last and not self._was_cancelled() and not alive:
                self.wrong.append(f"requeue said {said}, and nothing followed")
        elif code == 0 and name in ("requeue", "resume", "resume-2"):
            accepted[name.partition("-")[0]] += 1
            entries = read_job(self.run).attempts[self.before :]
            own = [self.run.attempt(entry.attempt) for entry in entries if entry.reason == "resume"]
            if name == "resume-2" and 2 not in [read_json(one.plan_file)["num_nodes"] for one in own]:
                self.wrong.append("resume-2 was accepted, and no attempt has 2 nodes")

    def _was_cancelled(self) -> bool:
        return any(entry.is_cancelled for entry in read_job(self.run).attempts[self.before - 1 :])

    def _judge_cancel(self, index: int, command: Command) -> None:
        name, said = self.pair[index], command.said
        if self.run.name not in said:
            self.wrong.append(f"{name} does not name the folder: {said}")
        if command.code or "already ended" in said:
            if command.code == 1 and "has been started as" not in said:
                self.wrong.append(f"{name}: {said}")
            return
        if not self._was_cancelled():
            self.wrong.append(f"{name} said {said}, and no attempt is cancelled")
        if name != "cancel-wait":
            return
        entry, returned = newest(self.run), command.printed_at
        submitted = parse_time(entry.submitted_at)
        assert submitted is not None
        # The command reads the state before it prints, so a run that started shortly before the output is
        # allowed.
        if is_alive(self.run) and submitted.timestamp() < returned - 0.25:
            self.wrong.append(f"{name} returned 0 at {returned:.2f}, and attempt {entry} is alive")


def play_pair(folder: Path, pair: Sequence[str], rounds: int, seed: int) -> int:
    """Run the rounds of a pair and print the problems; return the number of rounds with a problem."""
    chance = random.Random(f"{seed} {pair}")
    # The delay before a restart doubles with every crash of a run, up to several minutes.
    rounds_of_a_run = 5 if "crash" in pair else ROUNDS_OF_A_RUN
    place, run, num_wrong, outcomes = Place(folder), None, 0, Counter[str]()
    for number in range(rounds):
        if run is None:
            run = place.submit()
            wait_for(partial(has_started, run))
        one = Round(place, run, pair, chance)
        wrong = one.play()
        outcomes[one.outcome] += 1
        what = f"{' x '.join(pair)} {number}: {one.state}, {one.order}, {one.delay_s:.3f} s"
        if wrong:
            num_wrong += 1
            print(f"WRONG {what}: {'; '.join(wrong)}", flush=True)
            for index, command in one.commands.items():
                print(f"      {pair[index]} -> {command.code}: {command.said.strip()}", flush=True)
        if wrong or number % rounds_of_a_run == rounds_of_a_run - 1:
            place.run("cancel", str(run.path), "--now")
            if not wrong:
                shutil.rmtree(run.path, ignore_errors=True)
            run = None
    for left in (folder / "runs").glob("*/job.json"):
        entry = newest(RunDir(left.parent))
        if entry.alive():
            backend_of(entry).kill(RunDir(left.parent), entry)
    shown = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{' x '.join(pair)}: {rounds} rounds, {num_wrong} wrong ({shown})", flush=True)
    return num_wrong


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return all pairs of operations, including an operation paired with itself, except two crashes."""
    found = itertools.combinations_with_replacement(names, 2)
    return [pair for pair in found if pair != ("crash", "crash")]


def play(pairs: Sequence[tuple[str, str]], rounds: int, seed: int, folder: Path, num_workers: int) -> int:
    """Run all pairs in separate processes; return the number of pairs with a problem."""
    preload()
    waiting, running, wrong = list(pairs), dict[int, tuple[str, str]](), list[tuple[str, str]]()
    with forked_modules():
        while waiting or running:
            while waiting and len(running) < num_workers:
                pair = waiting.pop(0)
                place = folder / "-x-".join(pair)
                running[fork(lambda p=pair, f=place: min(1, play_pair(f, p, rounds, seed)))] = pair
            pid, status = os.wait()
            if pid in running and (pair := running.pop(pid)) and status:
                wrong.append(pair)
    if wrong:
        print(f"wrong: {', '.join(' x '.join(pair) for pair in wrong)}")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pair", nargs=2, choices=OPERATIONS, action="append", help="may be repeated")
    args = parser.parse_args()
    pairs = list(map(tuple, args.pair)) if args.pair else pairs_of(list(OPERATIONS))
    folder = Path(tempfile.mkdtemp(prefix="control-races-"))
    began_s = time.monotonic()
    num_wrong = play(pairs, args.rounds, args.seed, folder, args.workers)
    print(
        f"{len(pairs)} pairs of {args.rounds} rounds, {num_wrong} wrong, {time.monotonic() - began_s:.0f} s"
    )
    if not num_wrong:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"kept: {folder}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
