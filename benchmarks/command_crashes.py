"""Kill a command before each of its writes, and check the state that the next command finds.

    python -m benchmarks.command_crashes
    python -m benchmarks.command_crashes --only cancel --every 3 --seed 1

The benchmark covers all commands that change a run, and the supervisor of a run that waits in this machine's
queue. The benchmark kills each command with SIGKILL before each file that it opens for writing, and before
each rename, fsync, lock, folder creation, link, signal and process start. After the kill, no file of the run
may be truncated or missing, `status` must show a state, at most one supervisor may run, and the next commands
must work. The commands run in forks of this process.
"""

from __future__ import annotations

import argparse
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.control_races import OPTIONS, Place, has_started, is_alive, is_settled, newest, wait_for
from benchmarks.forked import Command, forked_modules, preload
from trainkit.backend import backend_of
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {
    *("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink", "os.link", "os.truncate", "os.chmod"),
    "fcntl.flock",
}
ALWAYS = {"os.fork", "os.kill", "subprocess.Popen"}
NEW_RUN = "submit"
COMMANDS: dict[str, tuple[str, ...]] = {
    "submit": ("submit", "--now", "--name", "run", *OPTIONS),
    "cancel": ("cancel", "RUN"),
    "cancel --now": ("cancel", "RUN", "--now"),
    "requeue": ("requeue", "RUN"),
    "requeue ended": ("requeue", "RUN"),
    "resume ended": ("resume", "RUN", "--now", "--nodes", "2"),
    "queue": ("submit", "--name", "run", *OPTIONS),
}
STATES = (
    "running",
    "starting",
    "stopping",
    "cancelled",
    "stopped",
    "failed",
    "died",
    "pending",
    "restarting",
)


def crash_at(number: int, root: str, counted: Path) -> None:
    """Kill this process before write `number`, counted from 1; if `number` is 0, record writes in a file."""
    own, count = os.getpid(), 0

    def step(what: str) -> None:
        nonlocal count
        if os.getpid() != own:
            return
        count += 1
        if count == number:
            os.kill(own, signal.SIGKILL)
        if number == 0:
            descriptor = real_open(counted, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            real_write(descriptor, f"{what}\n".encode())
            os.close(descriptor)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            is_write = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                mode is None and isinstance(flags, int) and flags & WRITES
            )
            if is_write and str(path).startswith(root) and str(path) != str(counted):
                step(f"open {path}")
        elif event in ALWAYS or (event in CHANGES and (event[:2] != "os" or str(args[0]).startswith(root))):
            step(f"{event} {args[:2]}")

    real_open, real_write, real_fsync = os.open, os.write, os.fsync

    def fsync(descriptor: int) -> None:
        step("fsync")
        real_fsync(descriptor)

    os.fsync = fsync
    sys.addaudithook(audit)


class Case:
    """A command that is killed before one of its writes."""

    def __init__(self, folder: Path, kind: str, number: int) -> None:
        self.place, self.kind, self.number = Place(folder), kind, number
        self.run, self.wrong = RunDir(folder / "runs/run"), list[str]()
        self.counted = folder / "counted"

    def play(self) -> int:
        """Run the case; return the number of writes if the command was not killed."""
        if self.kind not in (NEW_RUN, "queue"):
            self._must("submit", "--now", "--name", "run", *OPTIONS)
            wait_for(lambda: has_started(self.run))
            (self.run.path / "kept.txt").write_text("of the user")
            if self.kind.endswith("ended"):
                self._must("cancel", str(self.run.path), "--now")
        self.before = len(read_job(self.run).attempts)
        argv = [str(self.run.path) if word == "RUN" else word for word in COMMANDS[self.kind]]
        kill: Callable[[], None] = lambda: crash_at(self.number, str(self.place.folder), self.counted)  # noqa: E731
        if self.kind == "queue":
            self._queue(argv, kill)
        else:
            log = self.place.folder / "killed.log"
            command = Command(*argv, cwd=self.place.folder, environ=self.place.environ, log=log, before=kill)
            wait_for(lambda: command.poll() is not None)
            if command.code not in (0, -signal.SIGKILL):
                self.wrong.append(f"exited with {command.code}: {command.said}")
        self._judge()
        return len(self.counted.read_text().splitlines()) if self.counted.exists() else 0

    def _queue(self, argv: Sequence[str], kill: Callable[[], None]) -> None:
        """Kill the supervisor of a run that waits in this machine's queue."""

        def before(module: str) -> None:
            if module == "trainkit.job.supervisor":
                kill()

        with forked_modules(before):
            self._must(*argv)
        wait_for(lambda: not is_alive(self.run) or has_started(self.run))

    def _must(self, *argv: str) -> Command:
        done = self.place.run(*argv)
        if done.code:
            self.wrong.append(f"then `{' '.join(argv[:3])}` -> {done.code}: {done.said}")
        return done

    def _judge(self) -> None:
        if not wait_for(lambda: not self.run.exists() or self._is_still(), 30):
            self.wrong.append(f"it does not settle: {newest(self.run)}")
        self._judge_files()
        if not self.run.exists():
            self._must("status")
        else:
            done = self._must("status", str(self.run.path), "--json")
            state = str(json.loads(done.said.splitlines()[-1])["state"]) if done.code == 0 else ""
            if state not in (*STATES, "incomplete"):
                self.wrong.append(f"status says {state}")
        if len(read_job(self.run).attempts) < self.before:
            self.wrong.append("an attempt is gone")
        if self.kind == NEW_RUN:
            again = self._must(*COMMANDS["submit"])
            folder = next((line for line in again.said.splitlines() if line.startswith("/")), "")
            if again.code == 0:
                self._must("cancel", folder, "--wait")
        if self.run.exists():
            self._next()

    def _is_still(self) -> bool:
        entry = newest(self.run)
        asked = (
            entry.alive() and (entry.is_cancelled or entry.requeue_requested_at) and not entry.cancelled_now
        )
        return not asked and (is_settled(self.run) or not entry.attempt)

    def _next(self) -> None:
        """Run the commands that a user would run next: end the run, and start it again."""
        self._must("cancel", str(self.run.path), "--wait")
        if is_alive(self.run):
            self.wrong.append(f"it is alive after `cancel --wait`: {newest(self.run)}")
        words = ("requeue",) if newest(self.run).attempt else ("resume", "--now")
        self._must(words[0], str(self.run.path), *words[1:])
        if not wait_for(lambda: has_started(self.run), 30):
            self.wrong.append(f"it does not start again: {newest(self.run)}")
        if (self.run.path / "overlap.txt").exists():
            self.wrong.append("two attempts ran at once")
        self._must("cancel", str(self.run.path), "--now")

    def _judge_files(self) -> None:
        if self.before and not (self.run.path / "kept.txt").exists():
            self.wrong.append("a file of the user is gone")
        for path in [file for file in self.run.path.rglob("*.json") if not file.name.startswith(".")]:
            try:
                json.loads(path.read_text())
            except (OSError, ValueError) as error:
                self.wrong.append(f"{path} is cut off: {error}")

    def clear(self) -> None:
        for job_file in self.place.folder.glob("runs/*/job.json"):
            run = RunDir(job_file.parent)
            entry = newest(run)
            if entry.alive():
                backend_of(entry).kill(run, entry)
        with suppress(OSError):
            shutil.rmtree(self.place.folder)


def play_kind(folder: Path, kind: str, every: int, seed: int) -> int:
    """Kill a command before each of its writes, or before one in `every`; return the number of failures."""
    whole = Case(folder / f"{kind.replace(' ', '-')}-0", kind, 0)
    num_writes, wrong = whole.play(), 0
    if whole.wrong:
        wrong += 1
        print(f"WRONG {kind}, not killed: {'; '.join(whole.wrong)}", flush=True)
    steps = whole.counted.read_text().splitlines()
    whole.clear()
    first = random.Random(f"{seed} {kind}").randint(1, every)
    states = Counter[str]()
    for number in range(first, num_writes + 1, every):
        case = Case(folder / f"{kind.replace(' ', '-')}-{number}", kind, number)
        case.play()
        states["wrong" if case.wrong else "right"] += 1
        if case.wrong:
            wrong += 1
            print(f"WRONG {kind} {number}, at {steps[number - 1]}: {'; '.join(case.wrong)}", flush=True)
        case.clear()
    print(f"{kind}: {num_writes} writes, killed at {sum(states.values())}, {wrong} wrong", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--every", type=int, default=1, help="kill at every Nth write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    preload()
    folder, began_s = Path(tempfile.mkdtemp(prefix="command-crashes-")), time.monotonic()
    with forked_modules():
        num_wrong = sum(play_kind(folder, kind, args.every, args.seed) for kind in args.only)
    print(f"{num_wrong} wrong, {time.monotonic() - began_s:.0f} s")
    if not num_wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
