"""Makes the folder of a new run."""

from __future__ import annotations

import getpass
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit import __version__
from trainkit.config import LoadedConfig, RunConfig, dump_effective
from trainkit.config.validation import LOOKS_SECRET
from trainkit.errors import UsageError
from trainkit.job.record import create_job
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RUNS_FOLDER, RunDir, utc_now, write_json
from trainkit.rungroup import RunGroup
from trainkit.submit.beside import beside
from trainkit.submit.secrets import refuse_leaks

GIT_LIMIT_S = 2.0
MAX_DIFF_CHARS = 1_000_000
VERSION = re.compile(r"^__version__ *= *['\"](?P<version>[^'\"]+)", re.MULTILINE)
ASSIGNMENT = re.compile(r"(?P<name>[\w.-]+)=(?P<value>.*)", re.DOTALL)


def collect_provenance(cwd: Path) -> dict[str, Any]:
    """All that tells later what was run but the command line; takes as long as a few calls of git."""
    return {
        "time": utc_now(),
        "trainkit": __version__,
        "python": platform.python_version(),
        "torch": _torch_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "cwd": str(cwd),
        "host": os.uname().nodename,
        "user": _user(),
        "git": git_state(cwd),
    }


def without_secrets(argv: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """The command line with `***` for the values of secrets, by their names or by what names look like."""
    return [_masked(arg, secrets) for arg in argv]


def _masked(arg: str, secrets: Sequence[str]) -> str:
    option, separator, assignment = arg.partition("--set=")
    prefix = separator if separator and not option else ""
    match = ASSIGNMENT.fullmatch(assignment if prefix else arg)
    if match is None:
        return arg
    last = match["name"].rpartition(".")[2]
    if last in secrets or LOOKS_SECRET.search(last):
        return f"{prefix}{match['name']}=***"
    return arg


def git_state(cwd: Path) -> dict[str, Any] | None:
    """Commit, branch and uncommitted changes of the repository around a folder; None when there is none."""
    sha = _git(cwd, "rev-parse", "HEAD")
    if sha is None:
        return None
    diff = _git(cwd, "diff", "HEAD")
    status = _git(cwd, "status", "--porcelain")
    return {
        "sha": sha.strip(),
        "branch": (_git(cwd, "rev-parse", "--abbrev-ref", "HEAD") or "").strip() or None,
        "dirty": None if status is None else bool(status.strip()),
        "diff": None if diff is None else diff[:MAX_DIFF_CHARS],
        "diff_cut_off": diff is not None and len(diff) > MAX_DIFF_CHARS,
    }


def _git(cwd: Path, *args: str) -> str | None:
    """What git says; None when there is no git, no repository, or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(cwd), *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")


def _torch_version() -> str | None:
    """Read where torch says it: to import it takes seconds, and to ask for its metadata a mail parser."""
    found = find_spec("torch")
    for folder in () if found is None else found.submodule_search_locations or ():
        try:
            match = VERSION.search(Path(folder, "version.py").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if match is not None:
            return match["version"]
    return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None  # a container whose user id has no name


RESERVED_NAME = re.compile(r"last|local-\d+|\d+(_\d+)?")


@dataclass(frozen=True)
class CodeCopier:
    """What puts a copy of the code into a run."""

    copy: Callable[[RunDir], dict[str, Any]]
    """Makes it, in a process of its own, and describes it."""
    tell: Callable[[dict[str, Any]], None]
    """Says what a person should know about it."""


def plan_text(plan: LaunchPlan) -> str:
    """The bytes of plan.json, the same in a dry run and in the run folder."""
    return plan.to_text()


def check_name(name: str) -> None:
    """Refuse a run name that RUN would understand as something else."""
    if RESERVED_NAME.fullmatch(name):
        raise UsageError(
            f"a run cannot be called {name!r}",
            hint="`last` and job ids have a meaning of their own where a run is named; choose another --name",
        )


def create_run(
    loaded: LoadedConfig,
    run_dir: Path | None,
    argv: Sequence[str],
    backend: str,
    copier: CodeCopier | None = None,
    collect: Callable[[], dict[str, Any]] | None = None,
) -> tuple[RunDir, str]:
    """Make the run folder with everything but its first attempt; gives it and the run's name.

    Without a `copier` the run trains with the files as they are. `collect` gives what `collect_provenance`
    does, for who has begun that already.
    Raises UsageError when `run_dir` is not empty, the place cannot be written, or a secret would be.
    """
    with new_place(loaded.config.name, run_dir) as (folder, name):
        run = RunDir(folder)
        run.checkpoints_dir.mkdir(mode=0o700)
        code = write_origin(run, argv, loaded.config.launch.secrets, backend, copier, collect)
        create_job(run, backend=backend, name=name, cwd=str(Path.cwd()), code=code)
    return run, name


@contextmanager
def new_place(name: str, run_dir: Path | None, option: str = "--run-dir") -> Iterator[tuple[Path, str]]:
    """A folder of its own for what is made within, and the name that goes with it; removed if that fails.

    `option` is what names `run_dir` on the command line.
    Raises UsageError when `run_dir` is not empty or the place cannot be written.
    """
    folder = None
    try:
        if run_dir is None:
            folder = _new_folder(Path(RUNS_FOLDER), name)
            name = folder.name
        else:
            folder = _empty_folder(run_dir, option)
        yield folder, name
    except BaseException as error:
        if folder is not None:
            # What is in it was made here, a moment ago; left behind it would be in the way of the next try.
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        place = run_dir or Path(RUNS_FOLDER)
        raise UsageError(
            f"cannot make a run folder at {place}: {error.strerror or error}",
            hint=f"name a place that you can write to with {option}, and check that its disk is not full",
        ) from error


def write_origin(
    run: RunDir,
    argv: Sequence[str],
    secrets: Sequence[str],
    backend: str,
    copier: CodeCopier | None,
    collect: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """Copy the code and write where a run comes from; gives the description of the copy.

    Raises UsageError when a secret would be written, and what the copier raises.
    """
    code = None
    if copier is not None:
        with beside("copying the code", lambda: copier.copy(run)) as copied:
            with suppress(OSError):  # files are read again, and what is wrong is told, where they are needed
                _load_what_submits(backend)
            code = copied()
        copier.tell(code)
    origin = collect_provenance(Path.cwd()) if collect is None else collect()
    provenance = {**origin, "argv": without_secrets(argv, secrets), "code": code}
    refuse_leaks(json.dumps(provenance), str(run.provenance_file), secrets, os.environ)
    write_json(run.provenance_file, provenance)
    return code


def _load_what_submits(backend: str) -> None:
    """What comes next would be loaded then; the code is being copied now, which takes about as long."""
    if backend == "submitit":
        importlib.import_module("submitit")
    importlib.import_module("trainkit.submit.sbatch_backend")
    from trainkit.submit.script import compile_templates

    compile_templates(Path.cwd())


def wants_copy(config: RunConfig, plan: LaunchPlan) -> bool:
    """Whether the run has a copy: a job that waits in a queue must not see what is edited meanwhile."""
    return config.launch.snapshot and plan.slurm is not None


def config_text(loaded: LoadedConfig) -> str:
    """The bytes of config.yaml."""
    return dump_effective(loaded.config)


def future_run(name: str, run_dir: Path | None) -> RunDir:
    """The run that `create_run` would make now; nothing is written."""
    if run_dir is not None:
        return RunDir(run_dir)
    return RunDir(next(folder for folder in _folders(Path(RUNS_FOLDER), name) if not folder.exists()))


def _folders(parent: Path, name: str) -> Iterator[Path]:
    yield parent / name
    for number in itertools.count(2):
        yield parent / f"{name}-{number}"


def _new_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first of `name-2`, `name-3`, … that nobody has taken."""
    parent.mkdir(parents=True, exist_ok=True)
    for folder in _folders(parent, name):
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def _empty_folder(folder: Path, option: str) -> Path:
    """The folder that was asked for, made if need be; nothing that exists in it is touched."""
    if RunDir(folder).exists():
        raise UsageError(
            f"{folder} already holds a run", hint=f"`trainkit resume {quote(str(folder))}` goes on with it"
        )
    if RunGroup(folder).exists():
        raise UsageError(
            f"{folder} already holds a group of runs", hint=f"`trainkit status {quote(str(folder))}` shows it"
        )
    if folder.exists():
        if not folder.is_dir():
            raise UsageError(f"{folder} is a file", hint=f"choose another folder with {option}")
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", hint=f"choose a new or empty folder with {option}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder
