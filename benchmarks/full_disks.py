"""Run commands on disks with 0 to 64 KiB of free space; each command must exit and give the reason.

    python -m benchmarks.full_disks

`submit` and `run` create a run on an almost full disk. In further cases, the disk also contains the working
directory of the commands and the state of the user. `cancel`, `requeue`, `resume` and `status` are applied to
a run that is running or has ended. No command may take longer than `TIMEOUT_S`, exit with an unexpected
error, or break the next command after space is available again. The benchmark needs root to mount the disks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.control_races import Place, has_started, is_alive, newest, wait_for
from benchmarks.forked import Command, forked_modules, preload
from tests.support.disks import fill, small_disk
from trainkit.backend import backend_of
from trainkit.run.rundir import RunDir

TIMEOUT_S = 30.0
KIB = 1024
NEW = ("submit", "run")
OLD = ("cancel", "cancel --now", "cancel --wait", "requeue", "resume", "status")
WORKER = ("--", "sh", "-c", "trap 'exit 75' TERM USR2; echo started; sleep 2 & wait $!")
OPTIONS = ("--gpus-per-node", "1", "--set", "device=cpu", "--set", "launch.snapshot=false")


class Disk:
    """A small disk, and the commands that are applied to a run on the disk."""

    def __init__(self, place: Place, disk: Path) -> None:
        self.place, self.disk, self.wrong = place, disk, list[str]()
        self.run = RunDir(disk / "run")

    def type(self, *argv: str) -> Command:
        command = self.place.start(*argv)
        if not wait_for(lambda: command.poll() is not None, TIMEOUT_S):
            os.kill(command.pid, signal.SIGKILL)
            wait_for(lambda: command.poll() is not None)
            self.wrong.append(f"{argv[0]} did not return: {command.said}")
        elif command.code not in (0, 1, 2) or any(
            text in command.said for text in ("unexpected error", "Traceback", "Error:")
        ):
            self.wrong.append(f"{argv[0]} -> {command.code}: {command.said}")
        elif command.code and "hint:" not in command.said and "died:" not in command.said:
            self.wrong.append(f"{argv[0]} -> {command.code} without a hint: {command.said}")
        return command

    def make(self, kind: str, free: int, whole: bool) -> str:
        """Execute `submit` or `run` on a disk with `free` free bytes; return the exit code.

        With `whole`, the disk also contains the working directory and the state of the user.
        """
        if whole:
            self.place.cwd = self.disk
            self.place.environ |= {"XDG_STATE_HOME": str(self.disk / "state")}
        filler = fill(self.disk, free)
        options = ("--now",) if kind == "submit" else ()
        command = self.type(kind, *options, "--run-dir", str(self.run.path), *OPTIONS, *WORKER)
        if kind == "submit" and command.code == 0 and not wait_for(lambda: not is_alive(self.run)):
            self.wrong.append(f"the run does not end: {self.supervisor_log()}")
        filler.unlink()
        if self.run.exists():
            self.type("status", str(self.run.path))
            self._next()
        elif command.code == 0:
            self.wrong.append(f"{kind} exited with 0, and there is no run: {command.said}")
        else:
            self.type("submit", "--now", "--run-dir", str(self.run.path), *OPTIONS, *WORKER)
            self._next()
        return str(command.code)

    def act(self, words: str, free: int, ended: bool) -> str:
        """Apply a command to a run whose disk has `free` free bytes; return the exit code."""
        script = ("--", "sh", "-c", "trap 'exit 75' TERM USR2; echo started; sleep 600 & wait $!")
        done = self.place.run("submit", "--now", "--run-dir", str(self.run.path), *OPTIONS, *script)
        assert done.code == 0, done.said
        wait_for(lambda: has_started(self.run))
        if ended:
            self.place.run("cancel", str(self.run.path), "--wait")
        filler = fill(self.disk, free)
        name, *options = words.split()
        command = self.type(name, str(self.run.path), *options)
        if name == "cancel" and command.code == 0 and not wait_for(lambda: not is_alive(self.run)):
            self.wrong.append(f"{words} -> 0, and it is alive")
        filler.unlink()
        self.type("status", str(self.run.path))
        self._next()
        return str(command.code)

    def _next(self) -> None:
        """Execute the next command after space is available again."""
        words = ("cancel", "--wait") if is_alive(self.run) else ("requeue",)
        if not newest(self.run).attempt:
            words = ("resume", "--now")
        done = self.type(words[0], str(self.run.path), *words[1:])
        if done.code:
            self.wrong.append(f"the next command {words[0]} -> {done.code}: {done.said}")

    def supervisor_log(self) -> str:
        logs = sorted(self.run.path.glob("attempts/*/logs/supervisor.log"))
        return logs[-1].read_text(errors="replace") if logs else ""

    def clear(self) -> None:
        entry = newest(self.run)
        if entry.alive():
            backend_of(entry).kill(self.run, entry)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kib", type=int, nargs="+", default=list(range(0, 68, 4)))
    parser.add_argument("--only", nargs="+", help="commands")
    args = parser.parse_args()
    preload()
    folder, began_s, num, num_wrong = Path(tempfile.mkdtemp(prefix="full-disks-")), time.monotonic(), 0, 0
    with forked_modules():
        for kind in (*NEW, *OLD):
            if args.only and kind not in args.only:
                continue
            outcomes = Counter[str]()
            for kib in args.kib:
                for second in (False, True):
                    num += 1
                    place = Place(folder / f"{num}")
                    with small_disk(folder / f"disk-{num}", "1m") as path:
                        disk = Disk(place, path)
                        if kind in NEW:
                            outcome = disk.make(kind, kib * KIB, second)
                        else:
                            outcome = disk.act(kind, kib * KIB, second)
                        outcomes[outcome] += 1
                        for text in disk.wrong:
                            print(f"WRONG {kind}, {kib} KiB, {second}: {text}", flush=True)
                        num_wrong += bool(disk.wrong)
                        disk.clear()
            shown = ", ".join(f"{count} x {outcome}" for outcome, count in outcomes.most_common())
            print(f"{kind}: exit codes {shown}", flush=True)
    print(f"{num} disks, {num_wrong} wrong, {time.monotonic() - began_s:.0f} s")
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
