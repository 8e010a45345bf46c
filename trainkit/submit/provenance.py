"""Where a run comes from: versions, the command line, the code as git knows it, host and user."""

from __future__ import annotations

import getpass
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit import __version__
from trainkit.config.contradictions import LOOKS_SECRET
from trainkit.times import utc_now

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
