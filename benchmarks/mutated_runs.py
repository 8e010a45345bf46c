"""Mutate run folders at random, and execute commands that read runs and commands that change runs.

    python -m benchmarks.mutated_runs [--changes 20000] [--seed 0] [--run finished] [--only NUMBER]

The benchmark uses the runs of `tests/golden`, a run of a function, and a run whose supervisor is alive.
`run_mutations.py` defines the mutations. After each mutation, forks of this process execute a command that
only reads, and another command, which usually changes the run. The following are considered faults:

- an unexpected exception, or a traceback of trainkit;
- a command that takes longer than `LIMIT_S`;
- an undocumented exit code;
- a signal to a process that is not part of the run;
- a file changed by a command that only reads, or a change outside of the run.

The same seed and number yield the same mutation and commands. `--only` repeats one mutation, and prints its
traceback. A supervisor that would be started exits immediately.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import io
import json
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import click
import jinja2

from benchmarks.forked import fork, forked_modules, preload
from benchmarks.run_mutations import mutate
from tests.golden.__main__ import HERE, PROGRAMS, unpack_run, write_text_file
from tests.golden.__main__ import RUNS as RECORDED
from trainkit.cli.main import COMMANDS, load_command
from trainkit.cli.main import main as trainkit
from trainkit.errors import TrainkitError
from trainkit.job.processes import dies_with
from trainkit.run.process import ProcessId

RUNS = (*sorted(RECORDED), "function", "live")
NEIGHBOUR = "command"
"""Name of another run in the same folder, which no mutation changes."""
LIMIT_S = 30
AT_A_TIME = 50
"""Number of mutations of a run between two progress lines."""
COMMANDS_AT_ONCE = 2
"""Number of commands after each mutation."""
MEMORY_BYTES = 6 * 2**30
READING = (
    *("status", "status --json", "status {run}", "status {run} --json", "logs {run} --all --lines 3"),
    *("diagnose {run}", "diagnose {run} --json", "report {run}", "report {run} --json", "watch {run} --once"),
    *("ckpt ls {run}", "ckpt ls {run} --json", "ckpt verify {run}", "logs {run}", "logs {run} --rank 1"),
    *("logs {run} --node 0", "logs {run} --attempt 1", "status --all", "status --sort loss --all"),
    *("status --where train.steps=6", "status --tag x", "compare {run} {other}", "compare {run} --csv"),
    *("compare {other} {run} --json", "ckpt verify {run} --json", "ckpt prune {run} --keep-last 1 --dry-run"),
    *(
        "submit {run} --dry-run",
        "data show {run} --step 1",
        "status {run}/0",
        "diagnose {run}/0",
        "status last",
    ),
    *("check {run}/config.yaml", "plan {run}/config.yaml", "watch {run}/1 --once", "logs {run}/1"),
    *("diagnose {run} --attempt 1", "report {run} --out page.html", "status {run}/attempts/001"),
    *("debug {run} --rank 0", "attach {run}", "ckpt verify {run} --step 3"),
)
"""Commands that write nothing except the page of a report."""
ACTING = (
    *("cancel {run}", "cancel {run} --json", "requeue {run}", "resume {run}", "resume {run} --now --json"),
    *(
        "resume {run} --as again",
        "resume {run} --set train.steps=20",
        "resume {run} --nodes 2",
        "submit {run}",
    ),
    *("resume {run} --new-code", "resume {run} --backend local", "submit {run} --name again --now"),
    *("submit quickstart --run-dir {run} --set device=cpu", "submit {run} --set seed=3 --set device=cpu"),
    *("submit --after {run} --backend local -- true", "ckpt prune {run} --keep-last 1", "cancel {run}/0"),
    *(
        "resume {run}/0",
        "requeue {run}/1",
        "cancel {run} --now",
        "ckpt export {run} --out exported",
        "sync {run}",
    ),
    "stacks {run}",
)
"""Commands that change a run or start something."""
WRITES = re.compile(r"page\.html|runs/\w[\w-]*/(\d/)?report\.html|runs(/\w[\w-]*(/\d)?)?")
"""Paths that reading commands may write; a folder changes together with its content."""
STREAMS = ("strict", "backslashreplace")
"""Error handlers of Python's standard output and standard error for text that cannot be encoded."""


def make_project(project: Path, names: Iterable[str]) -> None:
    """Create a project folder with recorded runs for the commands, as on a machine without Slurm."""
    project.mkdir(parents=True)
    write_text_file(project)
    for name in {*names, NEIGHBOUR}:
        unpack_run(HERE / "folders" / name, project, os.uname().nodename)
    (project / "bin").mkdir()


def make_function_run(project: Path) -> None:
    """Create a run of a function; the call and the return value are pickles in the run folder."""
    import trainkit as package

    with forked_modules():
        run = package.submit(max, 1, 2, backend="local", name="function", now=True, device="cpu")
        assert run.result() == 2


def make_live_run(project: Path, pid: int) -> None:
    """Create a run whose supervisor is the given process."""
    unpacked = unpack_run(HERE / "folders" / "cancelled", project / "other", os.uname().nodename)
    shutil.rmtree(project / "runs" / "live", ignore_errors=True)
    live = unpacked.rename(project / "runs" / "live")
    job = json.loads((live / "job.json").read_text())
    own = ProcessId.of(pid)
    job["attempts"][0].update(pid=own.pid, boot_id=own.boot_id, start_ticks=own.start_ticks)
    job["attempts"][0]["folder"] = str(live)
    (live / "job.json").write_text(json.dumps(job))
    (live / "attempts/001/end.json").unlink()
    (project / "other" / "runs").rmdir()
    (project / "other").rmdir()


class Stranger(BaseException):
    """Raised if a signal is sent to a process that is not part of the run."""


Entries = dict[str, tuple[int, ...]]


def entries(folder: Path, inside: str = "") -> Entries:
    """Return all entries below a folder, with the properties that reveal a change."""
    found: Entries = {}
    for entry in os.scandir(folder / inside):
        name = f"{inside}{entry.name}"
        stat = entry.stat(follow_symlinks=False)
        found[name] = (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if entry.is_dir(follow_symlinks=False):
            found |= entries(folder, f"{name}/")
    return found


def differing(before: Entries, after: Entries) -> list[str]:
    """Return the names of entries that are new, missing or changed."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class Place:
    """A project folder for the commands of one process, and a copy that restores the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project, self.kept = folder, folder / "project", folder / "kept"
        environ = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CONFIG", "CACHE")}
        os.environ.update(environ, PATH=str(self.project / "bin"), COLUMNS="110", HOME=str(folder / "home"))
        make_project(self.project, RECORDED)
        os.chdir(self.project)
        (self.folder / "outside" / "inner").mkdir(parents=True)
        for name in ("mine.txt", "inner/mine.txt", "job.json"):
            (self.folder / "outside" / name).write_text("of the user\n")
        for name, body in PROGRAMS.items():
            program = self.folder / "slurm" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)
        shutil.copytree(HERE / "slurm", self.folder / "slurm", dirs_exist_ok=True)
        for line in READING:  # import the modules that the forks need, and compile the template of a report
            ended = typed(line.format(run="runs/finished", other=f"runs/{NEIGHBOUR}"))
            assert not ended.wrong, ended
        (self.project / "page.html").unlink()
        gc.freeze()  # otherwise each fork would copy every page of memory that garbage collection touches
        make_function_run(self.project)
        self.sleeper = subprocess.Popen(
            ["/bin/sleep", "inf"],
            stdout=subprocess.DEVNULL,
            preexec_fn=dies_with(os.getpid(), signal.SIGKILL),
        )
        make_live_run(self.project, self.sleeper.pid)
        for name in RUNS:
            (self.project / "runs" / name / "mine.txt").write_text("of the user\n")
        shutil.move(self.project / "runs", self.folder / "runs")
        self.known: Entries = {}

    def use(self, name: str) -> None:
        """Copy one run and its neighbour into the project."""
        shutil.rmtree(self.project / "runs", ignore_errors=True)
        for each in {name, NEIGHBOUR}:
            shutil.copytree(self.folder / "runs" / each, self.project / "runs" / each, symlinks=True)
        if name == "live":
            job_file = self.project / "runs" / "live" / "job.json"
            job = json.loads(job_file.read_text())
            job["attempts"][0]["inode"] = job_file.parent.stat().st_ino
            job_file.write_text(json.dumps(job))
            shutil.copyfile(job_file, self.folder / "runs" / "live" / "job.json")
        for each in ("state", "cache", "config", "home"):
            shutil.rmtree(self.folder / each, ignore_errors=True)
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.project, self.kept, symlinks=True)
        self.known = entries(self.project)

    def restore(self) -> None:
        """Undo all changes in the project."""
        found = entries(self.project)
        wrong = [name for name in differing(self.known, found) if self.is_wrong(name, found)]
        for name in reversed([name for name in wrong if name in found]):
            path = self.project / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for name in wrong:
            source, target = self.kept / name, self.project / name
            if os.path.lexists(target) or not os.path.lexists(source):
                continue
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copy2(source, target, follow_symlinks=False)
        if wrong:
            self.known = entries(self.project)
        shutil.rmtree(self.folder / "state", ignore_errors=True)

    def is_wrong(self, name: str, found: Entries) -> bool:
        """Return whether a changed entry must be restored; a folder with changed content need not be."""
        old, new = self.known.get(name), found.get(name)
        return old is None or new is None or old[:2] != new[:2] or not (self.kept / name).is_dir()


def without_privileges() -> None:
    """Drop root's privilege to read and write every file."""
    if os.geteuid() == 0:
        version, override, search = 0x20080522, 1 << 1, 1 << 2
        header, data = (ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, data) == 0
        data[0] &= ~(override | search)
        assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


def guard_signals(allowed: int) -> None:
    """Reject signals that `os.kill` sends to any process except this process, its children and `allowed`."""
    own, fork_, kill = {allowed, os.getpid()}, os.fork, os.kill

    def recorded() -> int:
        pid = fork_()
        own.add(pid or os.getpid())
        return pid

    def guarded(pid: int, number: int) -> None:
        if number != 0 and pid not in own:
            raise Stranger(f"signal {number} to process {pid}")
        kill(pid, number)

    os.fork, os.kill, os.killpg = recorded, guarded, guarded


class TooLong(BaseException):
    """Raised if a block exceeds its time limit."""


@contextlib.contextmanager
def within(limit_s: int) -> Iterator[None]:
    """Raise `TooLong` in the block after `limit_s` seconds of CPU time."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Typed(NamedTuple):
    """The result of an executed command."""

    wrong: str
    """A description of the fault; empty if there is none."""
    output: str
    errors: str


def typed(line: str) -> Typed:
    """Execute a command in this process."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in STREAMS]
    wrong = ""
    code: Any = None
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = trainkit(["--debug", *shlex.split(line)])
    except (TrainkitError, click.ClickException) as error:
        code = error.exit_code
        streams[1].write(f"error: {error.message}\nhint: {getattr(error, 'hint', '')}")
        if not str(error.message).strip():
            wrong = "an error without a message"
    except OSError as error:  # without --debug, trainkit prints a message that names the file, and a hint
        if not error.filename or line.startswith("status"):
            wrong = described(error)
        code = 1
    except BaseException as error:  # the benchmark must detect tracebacks of any type
        wrong, code = described(error), 1
    printed = []
    for stream in streams:
        stream.seek(0)
        printed.append(stream.buffer.read().decode(errors="replace"))
    if VERBOSE:
        print(f"$ {line}", *printed, wrong, sep="\n", file=sys.stderr)
    if not wrong and code not in (0, 1, 2, 3):
        wrong = f"exit code {code}"
    if not wrong and "Traceback (most recent" in printed[1]:
        wrong = f"a traceback: {printed[1][-300:]}"
    return Typed(wrong, *printed)


VERBOSE = False


def described(error: BaseException) -> str:
    """Describe an exception, including the place at which it was raised."""
    if VERBOSE:
        traceback.print_exception(error)
    steps = traceback.extract_tb(error.__traceback__)
    own = [step for step in steps if "/trainkit/" in step.filename]
    where = f" in {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error)[:200]}{where}"


def type_all(place: Place, name: str, lines: Sequence[tuple[str, bool]], slurm: bool) -> None:
    """Execute commands, each marked as read-only or not; print a JSON line before each and for each fault."""
    gc.disable()
    without_privileges()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    guard_signals(place.sleeper.pid if name == "live" else os.getpid())
    if slurm:
        os.environ["PATH"] = f"{place.folder / 'slurm'}:{os.environ['PATH']}"
        os.environ["SLURM_CONF"] = str(place.folder / "slurm" / "slurm.conf")

    def end(module: str) -> None:
        if module not in ("trainkit.job.supervisor", "trainkit.backends.local.group"):
            raise SystemExit(1)
        time.sleep(0.5)  # stay alive, because the command asks the kernel for this process's user
        raise SystemExit(0)

    with forked_modules(before=end):
        for line, reads in lines:
            before = entries(place.project), entries(place.folder / "outside")
            print(json.dumps([line, None]), flush=True)
            wrong = typed(line.format(run=f"runs/{name}", other=f"runs/{NEIGHBOUR}")).wrong
            after = entries(place.project), entries(place.folder / "outside")
            changed = differing(before[0], after[0])
            allowed = (
                WRITES
                if reads
                else re.compile(rf"(?!runs/{NEIGHBOUR}/|.*mine\.txt)(runs|again|exported)\b.*")
            )
            touched = [each for each in changed if not allowed.fullmatch(each)]
            # An array task that has not started gets its folder from the first command that reads the task.
            touched = [each for each in touched if not made_of_task(each, before[0])]
            touched += [
                f"outside/{each}"
                for each in differing(before[1], after[1])
                if each in before[1] and not (place.folder / "outside" / each).is_dir()
            ]
            if not wrong and touched and not (name == NEIGHBOUR and not reads):
                wrong = f"changed {', '.join(touched[:4])}"
            if wrong:
                print(json.dumps([line, wrong]), flush=True)


def made_of_task(path: str, before: Entries) -> bool:
    """Return whether a path is in the folder of an array task, and the folder did not exist before."""
    found = re.match(r"runs/[\w-]+/\d+(?=/|$)", path)
    return found is not None and found[0] not in before


def tried(place: Place, name: str, lines: Sequence[tuple[str, bool]], *, slurm: bool = False) -> list[str]:
    """Execute commands in a fork, and return their faults."""
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    errors = 2 if VERBOSE else null
    pid = fork(lambda: type_all(place, name, lines, slurm), streams=(null, writer, errors), own_session=True)
    os.close(writer)
    os.close(null)
    said, line, found = b"", "", []
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        ready = select.select([reader], [], [], max(0.0, deadline_s - time.monotonic()))[0]
        if not ready:
            found.append(f"{line}: longer than {LIMIT_S} s")
            break
        piece = os.read(reader, 65536)
        if not piece:
            break
        *complete, said = (said + piece).split(b"\n")
        for each in complete:
            line, wrong = json.loads(each)
            deadline_s = time.monotonic() + LIMIT_S
            found += [f"{line}: {wrong}"] if wrong else []
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        found.append(f"{line}: the process ended with {os.waitstatus_to_exitcode(status)}")
    return found


def try_change(place: Place, name: str, number: int, seed: int) -> tuple[str, list[str]]:
    """Apply the mutations with this number, execute commands, and undo both; return mutations and faults."""
    draw = random.Random(f"{seed} {number}")
    others = [place.folder / "runs" / each for each in RUNS if each != name]
    done = mutate(draw, place.project / "runs" / name, others)
    acting = draw.choice(ACTING) if draw.random() < 0.6 else None
    lines = [(draw.choice(READING), True), (acting or draw.choice(READING), acting is None)]
    try:
        return done, tried(place, name, lines, slurm=draw.random() < 0.2)
    finally:
        place.restore()


class Done(NamedTuple):
    """The finished mutations of one chunk of work."""

    name: str
    num_changes: int
    num_commands: int
    faults: list[str]


_place: Place | None = None


def try_piece(folder: Path, numbers: range, names: Sequence[str], seed: int) -> Done:
    """Try some mutations of one run, in a folder that only this process uses."""
    global _place
    if _place is None:
        prepare()
        _place = Place(folder / str(os.getpid()))
    name = names[numbers.start // AT_A_TIME % len(names)]
    _place.use(name)
    faults: list[str] = []
    for number in numbers:
        done, found = try_change(_place, name, number, seed)
        faults += [f"{number} {name}: {done}: {wrong}" for wrong in found]
    return Done(name, len(numbers), COMMANDS_AT_ONCE * len(numbers), faults)


def prepare() -> None:
    """Import the modules that the forks need, so that each fork does not have to import them."""
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)  # type: ignore[method-assign]
    preload()
    for name in (*COMMANDS, "data show"):
        load_command(name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="append", choices=RUNS, help="default: all")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat one change, with its traceback")
    parser.add_argument("--procs", type=int, default=2)
    options = parser.parse_args()
    names, started = options.run or RUNS, time.monotonic()
    folder, done = Path(tempfile.mkdtemp(dir="/dev/shm")), list[Done]()
    try:
        if options.only is not None:
            global VERBOSE
            VERBOSE = True
            done.append(try_piece(folder, range(options.only, options.only + 1), names, options.seed))
            print(*done[-1].faults, sep="\n")
        else:
            starts = range(0, options.changes, AT_A_TIME)
            pieces = [range(start, min(start + AT_A_TIME, options.changes)) for start in starts]
            with ProcessPoolExecutor(options.procs) as pool:
                for future in as_completed(
                    [pool.submit(try_piece, folder, piece, names, options.seed) for piece in pieces]
                ):
                    done.append(future.result())
                    print(*done[-1].faults, sep="\n", end="\n" if done[-1].faults else "", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    minutes = (time.monotonic() - started) / 60
    wrong = [line for each in done for line in each.faults]
    hangs = sum("longer than" in line for line in wrong)
    print(
        f"{sum(each.num_changes for each in done):,} changes of {len(names)} runs,"
        f" {sum(each.num_commands for each in done):,} commands, {len(wrong) - hangs} faults, {hangs} hangs,"
        f" {minutes:.1f} min"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
