"""The files of a project that git does not know: what looks like sources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.submit.source_names import looks_like_source, looks_secret
from trainkit.submit.source_tree import LeftOut, SourceTree, below, is_run

MAX_LOOKED_AT = 200_000
"""Files after which the search gives up: this is no project."""
MAX_FILE_BYTES = 50_000_000
"""Larger files are taken for data."""
NOT_SOURCES = frozenset(
    {"__pycache__", "node_modules", "runs", "checkpoints", "wandb", "mlruns", "lightning_logs"}
)
"""Folders that no search by pattern goes into; hidden ones and environments neither."""


def pattern_tree(cwd: str, run_dir: str) -> SourceTree:
    """The code below a folder: files whose names are those of sources, and all symlinks.

    Hidden folders, environments, and folders of runs and caches are passed over; files that look like keys
    or passwords, and very large ones, are left out. Both paths are real ones.
    Raises UsageError when the folder is far too large to be a project.
    """
    tree = SourceTree(cwd, "pattern")
    for num_before, entry in enumerate(_entries(tree, run_dir)):
        if num_before >= MAX_LOOKED_AT:
            raise UsageError(
                f"{cwd} holds more than {MAX_LOOKED_AT:,} files: that is no project to copy",
                hint="submit from the folder of your project, or use --no-snapshot",
            )
        path = below(cwd, entry.path)
        if looks_secret(entry.name):
            tree.left_out.append(LeftOut(path, "looks like a secret"))
            continue
        if entry.name.startswith(".") or not (entry.is_symlink() or looks_like_source(entry.name)):
            continue
        found = entry.stat(follow_symlinks=False)
        if found.st_size > MAX_FILE_BYTES:
            tree.left_out.append(LeftOut(path, f"is larger than {MAX_FILE_BYTES / 1e6:.0f} MB"))
        else:
            tree.add(path, found)
    return tree


def _entries(tree: SourceTree, run_dir: str) -> Iterator[os.DirEntry[str]]:
    """Everything below the root that is no folder, without what lies in folders that hold no sources."""
    waiting = [tree.root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # deleted a moment ago
        except PermissionError:
            tree.left_out.append(LeftOut(below(tree.root, folder), "cannot be read"))
            continue
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.path != run_dir and not _holds_no_sources(entry):
                waiting.append(entry.path)


def _holds_no_sources(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith(".") or entry.name in NOT_SOURCES:
        return True
    folder = Path(entry.path)
    try:
        is_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()
        return is_environment or is_run(entry.path)
    except PermissionError:
        return False  # and is said to be left out when it is opened
