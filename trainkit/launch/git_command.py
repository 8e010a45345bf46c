"""Runs Git in a folder that somebody else may have written: it starts no program that the repository names.

A repository's own config can name programs for nearly everything that Git does: filters for the files that
it compares, a monitor of the file system, hooks, a transport. Filters of the user's config do not run either:
they may read the config of the repository in turn, as git-lfs does.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from trainkit.errors import UsageError

GIT_LIMIT_S = 60.0
_KEPT = re.compile(r"GIT_(?:EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM|CONFIG_\w+)")
"""The variables of Git that reach it: where it is installed, where it looks, and the config of the user."""
_OWN = {
    "LC_ALL": "C",
    "GIT_ALLOW_PROTOCOL": "",  # a partial clone would fetch what it lacks, by a program that it names
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_OPTIONS = (
    "--no-pager",
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
)
_COMPARING = {
    "diff": ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty"),
    "status": ("--ignore-submodules=dirty",),
}
"""The commands that read the work tree, which the filters of its attributes convert, and what else they need.

In a submodule with changed files another Git would run, with the filters that its own config names.
"""


def run_git(
    folder: str, *args: str, timeout_s: float = GIT_LIMIT_S, content: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, whatever the environment says; raises UsageError after `timeout_s`.

    `content` is its standard input. ``diff`` and ``status`` compare files as they are on the disk, without
    the conversion of a filter; UsageError is also raised where a filter has a name that no option can have.
    """
    own = _without_filters(folder, timeout_s) if args[0] in _COMPARING else []
    return _run(folder, [*own, args[0], *_COMPARING.get(args[0], ()), *args[1:]], timeout_s, content)


def _run(
    folder: str, args: list[str], timeout_s: float, content: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or _KEPT.fullmatch(name)
    }
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if content is None else {"input": content}
    try:
        return subprocess.run(
            ["git", *_OPTIONS, "-C", folder, *args],
            **given,
            capture_output=True,
            env={**inherited, **_OWN},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"git took more than {timeout_s:g} s to read the repository of {folder}",
            hint="add folders with many files to .gitignore, or use --no-snapshot",
        ) from None


def _without_filters(folder: str, timeout_s: float) -> list[str]:
    """Options by which no filter that the config of a repository or a user defines is started."""
    listed = _run(folder, ["config", "--includes", "-z", "--name-only", "--list"], timeout_s)
    if listed.returncode:
        reason = os.fsdecode(listed.stderr).strip()
        raise UsageError(
            f"git cannot read its config for {folder}: {reason}", hint="`git config --list` must work"
        )
    keys = dict.fromkeys(os.fsdecode(listed.stdout).split("\0"))
    filters = dict.fromkeys(key.rpartition(".")[0] for key in keys if key.startswith("filter."))
    if unnamed := next((name for name in filters if "=" in name), None):
        raise UsageError(
            f"{folder} has the filter {unnamed.removeprefix('filter.')!r}, which git cannot leave out",
            hint="a filter needs a name without an equals sign",
        )
    values = ("clean=", "process=", "required=false")
    return [word for name in filters for value in values for word in ("-c", f"{name}.{value}")]
