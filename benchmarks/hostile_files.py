"""Puts what is no file in the place of each file of recorded runs, and types the commands that read runs.

    python -m benchmarks.hostile_files [--run finished] [--kind "a pipe"]

A folder, a pipe, a socket, links to nothing, to themselves and to a device, a file that nobody may read,
zeros, and a file where a folder is expected. Each command must end within 10 s with one of its documented
exit codes and without an exception, but for one that names the file, which is an error with a hint; `status`
shows the rest. Root may read every file; with this in front, it may not:

    setpriv --bounding-set=-dac_override,-dac_read_search
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2

from benchmarks.damaged_runs import faults, make_project
from tests.golden.__main__ import RUNS


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "unreadable": lambda path: (path.write_text("{}"), path.chmod(0)),
    "zeros": lambda path: path.write_bytes(bytes(100_000)),
    "a file": lambda path: path.write_text("x\n"),
}
"""What stands in the place of a file; "a file" is for a folder."""


NAMES_A_FILE = re.compile(r"\w+: \[Errno \d+\] [^:]+: '/")
"""An OSError, of which `trainkit` without --debug prints the file and a hint."""


def places(run: Path) -> Iterator[Path]:
    """The files and folders of a run, but for the user's own."""
    for path in sorted(run.rglob("*")):
        if not {"code", "work"} & set(path.relative_to(run).parts):
            yield path


def tried(project: Path, name: str, place: Path, kind: str) -> Iterator[str]:
    """Put something in the place of a file, type the commands, and undo it; yields a line for each fault."""
    kept = project / "kept"
    place.rename(kept)
    try:
        KINDS[kind](place)
        for line, wrong in faults(name):
            if place.name == "attempts" and wrong.endswith("hidden"):
                continue  # without attempts it is no run
            if not line.startswith("status") and NAMES_A_FILE.match(wrong):
                continue
            yield f"{place.relative_to(project / 'runs')} is {kind}: {line}: {wrong}"
    finally:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        kept.rename(place)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="append", choices=sorted(RUNS), help="a recorded run; default: all")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS))
    options = parser.parse_args()
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)  # type: ignore[method-assign]
    folder = Path(tempfile.mkdtemp())
    number = wrong = 0
    for name in options.run or sorted(RUNS):
        project = folder / name / "project"
        os.environ.update({f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CONFIG", "CACHE")})
        os.environ.update(PATH=str(project / "bin"), COLUMNS="110", HOME=str(folder))
        make_project(project, [name])
        os.chdir(project)
        for place in places(project / "runs" / name):
            for kind in options.kind or KINDS:
                number += 1
                for line in tried(project, name, place, kind):
                    wrong += 1
                    print(line, flush=True)
    print(f"{number} changes, {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
