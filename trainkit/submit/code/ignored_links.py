"""Links in a copy of the code to what was not copied, for commands that count on files beside the code.

``python train.py --data data/train.jsonl`` runs in the copy, and data/ is what people keep out of git.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.rundir import RUNS_FOLDER
from trainkit.submit.code.source_tree import (
    SourceTree,
    below,
    ignored_names,
    is_run,
    looks_secret,
    printable,
)

MAX_LINKS = 10_000
_NEVER = frozenset({"__pycache__", ".git"})


def find_links(tree: SourceTree, cwd: str, run_dir: str) -> tuple[str, ...]:
    """What lies beside the copied files and can be linked to, by its path below the root, sorted.

    Nothing that looks like a key or password, no folders of runs and no caches of Python.
    Raises UsageError when there are very many: a part of them would be worse than none.
    """
    beside = ignored_names(tree.root) if tree.kind == "git" else _beside(tree)
    places = (run_dir, f"{cwd}/{RUNS_FOLDER}", cwd)
    reserved = [place for place in (below(tree.root, place) for place in places) if place]
    left_out = {item.path for item in tree.left_out}
    found = sorted(
        path
        for path in beside
        if path not in left_out
        and _is_wanted(tree.root, path)
        and not any(f"{place}/".startswith(f"{path}/") for place in reserved)
    )
    if len(found) > MAX_LINKS:
        raise UsageError(
            f"{len(found):,} files lie between the code in {tree.root} and are no code",
            hint="keep them in a folder of their own, or run the command there with --no-snapshot",
        )
    return tuple(found)


def make_links(tree: SourceTree, paths: Iterable[str], target: str) -> None:
    """Make the links in a copy, each with the whole path of the source."""
    for path in paths:
        link = Path(target, path)
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        link.symlink_to(Path(tree.root, path))


def links_notes(paths: Sequence[str]) -> Iterator[str]:
    """One sentence about them; none when there are none."""
    if paths:
        named = ", ".join(printable(path) for path in paths[:3])
        more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
        yield f"linked into the copy of the code, not copied: {named}{more}"


def _is_wanted(root: str, path: str) -> bool:
    name = path.rpartition("/")[2]
    if name in _NEVER or name.endswith(".pyc") or looks_secret(name):
        return False
    return not is_run(f"{root}/{path}")


def _beside(tree: SourceTree) -> Iterator[str]:
    """Without git: what is in the folders of copied files and was not copied."""
    folders = {""} | {parent for path in tree.files for parent in _parents(path)}
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        for entry in os.scandir(f"{tree.root}/{folder}"):
            path = f"{prefix}{entry.name}"
            if path not in tree.files and path not in folders:
                yield path


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
