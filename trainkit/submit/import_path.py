"""From which folders of a copy of the code Python has to import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from trainkit.submit.source_tree import below

_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


def find_import_path(
    source: str, code: str, subfolder: str, inherited: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(folders of the copy for PYTHONPATH, sentences about those that cannot be on it).

    A project that is installed with ``pip install -e`` would be imported from the source, which can change
    after the submission; folders on PYTHONPATH come before it. They are the working directory, what the
    project files around it install, and the copies of what `inherited` (PYTHONPATH) has of the source.
    """
    taken: list[str] = []
    notes: list[str] = []
    for folder in dict.fromkeys(_candidates(source, code, subfolder, inherited or "")):
        if not Path(folder).is_dir():
            continue
        shadowing = _shadowing(folder)
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


def _candidates(source: str, code: str, subfolder: str, inherited: str) -> Iterator[str]:
    copy = Path(code, subfolder)
    yield str(copy)
    for folder in (copy, *copy.parents):
        if any((folder / name).is_file() for name in _PROJECT_FILES):
            yield str(folder / "src") if (folder / "src").is_dir() else str(folder)
        if str(folder) == code:
            break
    for entry in inherited.split(os.pathsep):
        inside = below(source, os.path.realpath(entry)) if entry.startswith("/") else ""
        if inside:
            yield f"{code}/{inside}"


def _shadowing(folder: str) -> str | None:
    """A module here that has the name of one of Python's own; None when there is none."""
    for entry in sorted(Path(folder).iterdir()):
        is_module = entry.suffix == ".py" or (entry / "__init__.py").is_file()
        if is_module and entry.stem in sys.stdlib_module_names:
            return entry.name
    return None
