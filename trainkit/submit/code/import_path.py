"""From which folders of a copy of the code Python has to import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainkit.submit.code.source_tree import below

_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


def find_import_path(
    source: str, files: Iterable[str], code: str, subfolder: str, inherited: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(folders of the copy for PYTHONPATH, sentences about those that cannot be on it).

    `files` are the paths below `source` that the copy `code` has, or is going to have.

    A project that is installed with ``pip install -e`` would be imported from the source, which can change
    after the submission; folders on PYTHONPATH come before it. They are the working directory, what the
    project files around it install, and the copies of what `inherited` (PYTHONPATH) has of the source.
    """
    taken: list[str] = []
    notes: list[str] = []
    tree = _Listing(files, subfolder)
    for inside in dict.fromkeys(_candidates(source, tree, subfolder, inherited or "")):
        if inside not in tree.folders:
            continue
        folder = str(Path(code, inside))
        shadowing = tree.shadowing(inside)
        if shadowing is not None:
            notes.append(
                f"nothing is imported from {folder} but by a script in it: its {shadowing} would take the"
                " place of Python's own module; rename it"
            )
        elif os.pathsep in folder:
            notes.append(
                f"modules are not imported from {folder}: PYTHONPATH cannot hold a folder with a colon"
            )
        else:
            taken.append(folder)
    return tuple(taken), tuple(notes)


class _Listing:
    """Files and folders by their paths below a root, whose own path is empty."""

    def __init__(self, files: Iterable[str], subfolder: str) -> None:
        self.files = set(files)
        self.folders = {"", subfolder}
        for path in self.files:
            while (path := path.rpartition("/")[0]) and path not in self.folders:
                self.folders.add(path)

    def shadowing(self, folder: str) -> str | None:
        """A module here that has the name of one of Python's own; None when there is none."""
        prefix = f"{folder}/" if folder else ""
        for path in sorted(path for path in self.files if path.startswith(prefix)):
            name, _, rest = path.removeprefix(prefix).partition("/")
            is_module = rest == "__init__.py" or (not rest and name.endswith(".py"))
            if is_module and name.removesuffix(".py") in sys.stdlib_module_names:
                return name
        return None


def _candidates(source: str, tree: _Listing, subfolder: str, inherited: str) -> Iterator[str]:
    yield subfolder
    folder = subfolder
    while True:
        prefix = f"{folder}/" if folder else ""
        if any(f"{prefix}{name}" in tree.files for name in _PROJECT_FILES):
            yield f"{prefix}src" if f"{prefix}src" in tree.folders else folder
        if not folder:
            break
        folder = folder.rpartition("/")[0]
    for entry in inherited.split(os.pathsep):
        inside = below(source, os.path.realpath(entry)) if entry.startswith("/") else ""
        if inside:
            yield inside
