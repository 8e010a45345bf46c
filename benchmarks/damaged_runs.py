"""Changes every value in the files of recorded runs once, and then types the commands that read runs.

    python -m benchmarks.damaged_runs [--run finished] [--part 1/2] [--seed 0] [--record FILE]

A value is replaced by one of another type, by a number or text that nobody expects, or by brackets without an
end. Each command must end within 10 s with one of its documented exit codes and without an exception, and
`status` must name the changed run and its neighbour. Prints each change after which that was not so. With
`--record`, a file keeps what was tried, and the same command continues from there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import jinja2
import yaml

from tests.golden.__main__ import HERE, RUNS, unpack_run, write_text_file
from trainkit.cli.main import main as trainkit
from trainkit.errors import TrainkitError

LIMIT_S = 10
AT_A_TIME = 40
"""Changes between two lines of a record."""
DEEP, LONG = "@DEEP@", "@LONG@"
"""Written as 100,000 brackets, and as a number of 5,000 digits."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1e308, 2**63, 1.5, "", "x", "\0", "../../x", "\x1b[31m", "\ud800", "1e9"),
    *([], [[]], {}, {"a": [1]}, [None], ["x", 1], {"": None}, DEEP, LONG),
)
COMMANDS = (
    *("status", "status --json", "status {run}", "status {run} --json", "logs {run} --all --lines 3"),
    *("diagnose {run}", "diagnose {run} --json", "report {run}", "report {run} --json", "watch {run} --once"),
    *("ckpt ls {run}", "ckpt ls {run} --json", "ckpt verify {run}"),
)
OF_DATA = "data show {run} --step 1"
"""For runs on a small text: other data would be prepared first, for longer than `LIMIT_S`."""
NEIGHBOUR = "command"
OF_STREAMS = ("strict", "backslashreplace")
"""What Python does on its standard output and standard error with text that cannot be encoded."""
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Change:
    """A value of a file to replace."""

    file: Path
    """Relative to the run."""
    line: int | None
    """Of a .jsonl file, counted from 0."""
    place: Place
    """The keys and indices of the value in its document, which is replaced as a whole if it is empty."""


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every value of a document."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def changes(run: Path) -> Iterator[Change]:
    """Every value of the files of a run."""
    for file in sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink()):
        name = file.relative_to(run)
        if "code" in name.parts or "work" in name.parts:  # the user's own files
            continue
        if file.suffix == ".jsonl":
            for line, text in enumerate(file.read_text().splitlines()):
                yield from (Change(name, line, place) for place in places(json.loads(text)))
        elif file.suffix in (".json", ".yaml"):
            yield from (
                Change(name, None, place) for place in places(document_of(file.name, file.read_text()))
            )


def document_of(name: str, text: str) -> Any:
    """What is in a JSON or YAML file."""
    return json.loads(text) if name.endswith(".json") else yaml.load(text, yaml.CSafeLoader)


def changed(text: str, change: Change, value: Any) -> str:
    """The text of a file with another value."""
    if change.line is not None:
        lines = text.splitlines(keepends=True)
        own = Change(change.file.with_suffix(".json"), None, change.place)
        lines[change.line] = changed(lines[change.line], own, value) + "\n"
        return "".join(lines)
    document = {"": document_of(change.file.name, text)}
    inner: Any = document
    for key in ("", *change.place[:-1]) if change.place else ():
        inner = inner[key]
    inner[change.place[-1] if change.place else ""] = value
    new = json.dumps(document[""]) if change.file.suffix == ".json" else yaml.safe_dump(document[""])
    return new.replace(f'"{DEEP}"', DEEP).replace(DEEP, "[" * 100_000).replace(f'"{LONG}"', "9" * 5_000)


class TooLong(BaseException):
    """A command took longer than `LIMIT_S`."""


def fault(line: str) -> tuple[str, str]:
    """What is wrong with how a command ended, empty if nothing is, and what it printed."""

    def stop(*_: object) -> None:
        raise TooLong

    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in OF_STREAMS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = trainkit(["--debug", *shlex.split(line)])
    except (TrainkitError, click.ClickException) as error:
        code = error.exit_code
    except TooLong:
        return f"longer than {LIMIT_S} s", ""
    except BaseException as error:  # a traceback of any kind is what is looked for
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = "" if place is None else f" in {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        return f"{type(error).__name__}: {str(error)[:200]}{where}", ""
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    printed = b""
    for stream in (output, errors):
        stream.seek(0)
        printed += stream.buffer.read()
    return "" if code in (0, 1, 2, 3) else f"exit code {code}", printed.decode()


def faults(name: str) -> Iterator[tuple[str, str]]:
    """Each command that reads runs and does not end as it should, and what is wrong."""
    for line in (*COMMANDS, OF_DATA) if "data" in RUNS[name] else COMMANDS:
        wrong, output = fault(line.format(run=f"runs/{name}"))
        if not wrong and line == "status --json":
            hidden = [one for one in {name, NEIGHBOUR} if f"runs/{one}" not in output]
            wrong = f"{' and '.join(hidden)} hidden" if hidden and name != "bench" else ""
        if wrong:
            yield line, wrong


def make_project(project: Path, names: Sequence[str]) -> None:
    """A folder with recorded runs, in which commands are typed, on a machine without Slurm."""
    project.mkdir(parents=True)
    write_text_file(project)
    for name in {*names, NEIGHBOUR}:
        unpack_run(HERE / "folders" / name, project, os.uname().nodename)
    (project / "bin").mkdir()


def tried(project: Path, name: str, change: Change, value: object) -> Iterator[str]:
    """Apply a change, type the commands, and undo it; yields a line for each fault."""
    file = project / "runs" / name / change.file
    before = file.read_text()
    try:
        text = changed(before, change, value)
        file.write_text(text, errors="surrogatepass")
        for line, wrong in faults(name):
            place = ".".join(map(str, change.place))
            where = f"{name}/{change.file}" + ("" if change.line is None else f":{change.line + 1}")
            yield f"{where} {place or 'whole'} = {value!r}: {line}: {wrong}"
    finally:
        file.write_text(before)


class Piece(NamedTuple):
    """Some changes of one run, in their order."""

    run: str
    part: str
    """Every Nth change, from the Ith: ``I/N``."""
    start: int
    seed: int

    def changes(self, run: Path) -> list[Change]:
        """What it changes, of which the first `AT_A_TIME` are tried."""
        first, _, step = self.part.partition("/")
        return list(changes(run))[int(first) - 1 :: int(step)][self.start :]


class Tried(NamedTuple):
    """A line of a record."""

    piece: Piece
    changes: int
    faults: list[str]


def try_piece(folder: Path, piece: Piece) -> Tried:
    """Change each value of a piece, in folders that only this process has."""
    own = folder / str(os.getpid())
    project = own / "project"
    os.environ.update({f"XDG_{kind}_HOME": str(own / kind) for kind in ("STATE", "CONFIG", "CACHE")})
    os.environ.update(PATH=str(project / "bin"), COLUMNS="110")
    shutil.rmtree(project, ignore_errors=True)
    make_project(project, [piece.run])
    os.chdir(project)
    if unchanged := list(faults(piece.run)):
        raise AssertionError(unchanged)
    here, found = piece.changes(project / "runs" / piece.run)[:AT_A_TIME], []
    for change in here:
        value = random.Random(f"{piece.seed} {piece.run} {change}").choice(VALUES)
        found += tried(project, piece.run, change, value)
    return Tried(piece, len(here), found)


def pieces(folder: Path, names: Sequence[str], part: str, seed: int) -> Iterator[Piece]:
    """All changes of some runs."""
    for name in names:
        make_project(folder / name, [name])
        count = len(Piece(name, part, 0, seed).changes(folder / name / "runs" / name))
        yield from (Piece(name, part, start, seed) for start in range(0, count, AT_A_TIME))


def read_record(file: Path) -> Iterator[Tried]:
    """What was tried before."""
    for line in file.read_text().splitlines() if file.exists() else ():
        piece, count, found = json.loads(line)
        yield Tried(Piece(*piece), count, found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="append", choices=sorted(RUNS), help="a recorded run; default: all")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth change, from the Ith")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--record", type=Path, help="keep what is done in this file, and continue from it")
    options = parser.parse_args()
    names = options.run or sorted(RUNS)
    done = [] if options.record is None else list(read_record(options.record))
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)  # type: ignore[method-assign]
    folder, started = Path(tempfile.mkdtemp()), time.monotonic()
    try:
        todo = set(pieces(folder / "counted", names, options.part, options.seed)) - {
            one.piece for one in done
        }
        with ProcessPoolExecutor(options.procs) as pool:
            for future in as_completed([pool.submit(try_piece, folder, piece) for piece in sorted(todo)]):
                done.append(future.result())
                for line in done[-1].faults:
                    print(line, flush=True)
                if options.record is not None:
                    with options.record.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count, wrong = sum(one.changes for one in done), sum(len(one.faults) for one in done)
    minutes = (time.monotonic() - started) / 60
    print(f"{count:,} changes of {len(names)} runs, {wrong} faults, {minutes:.1f} min")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
