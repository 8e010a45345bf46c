"""Which files a dataset is made of, in which order, and how each is split. Looks at names and sizes only."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.data.dataset_file import TRAIN, VAL, is_dataset
from trainkit.data.recipe import STDLIB, Recipe
from trainkit.errors import UsageError

BOTH = "both"
"""The role of an input that is cut into the two splits."""
TEXT = "text"
ROWS = "rows"
_FORMS = {".txt": TEXT, ".jsonl": ROWS}
KINDS = ".txt, .jsonl, .txt.gz or .jsonl.gz"

_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Input:
    """One source file as it stands on disk."""

    path: str
    name: str
    """The path below the source that it was found in: the same on every machine."""
    role: str
    form: str
    compressed: bool
    size: int
    """Bytes on disk."""
    mtime_ns: int


def find_inputs(recipe: Recipe) -> list[Input]:
    """Every file of a recipe in the order in which it is tokenised.

    Raises UsageError for what is missing, unreadable or of a kind that cannot be read.
    """
    main_role = BOTH if recipe.split_fraction else TRAIN
    inputs = [found for source in recipe.sources for found in _expand(source, main_role, recipe.val_fraction)]
    for source in recipe.val_sources:
        inputs.extend(_expand(source, VAL, 0.0))
    return inputs


def form_of(name: str) -> tuple[str, bool] | None:
    """(`text` or `rows`, compressed) by the name of a file; None for a kind that is not read."""
    stem, dot, kind = name.removesuffix(".gz").rpartition(".")
    form = _FORMS.get(dot + kind) if stem else None
    return None if form is None else (form, name.endswith(".gz"))


def missing_hint(path: Path) -> str:
    """What the reader may have meant by a path that does not exist."""
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    try:
        names = [entry.name for entry in os.scandir(parent)]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return f"did you mean {parent / close[0]}?"
    return f"{parent} has no {path.name}: check the path"


def stdlib_folder() -> Path:
    """Where this interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _expand(source: str, role: str, val_fraction: float) -> Iterator[Input]:
    if source == STDLIB:
        yield from _stdlib_inputs(role, val_fraction)
        return
    path = Path(source)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise UsageError(f"data source {path} does not exist", hint=missing_hint(path)) from None
    except OSError as error:
        raise UsageError(f"data source {path} cannot be read: {error.strerror}") from None
    if not is_folder:
        yield _input(str(path), path.name, role)
        return
    if is_dataset(path):
        raise UsageError(
            f"{path} is a prepared dataset and cannot be mixed with other sources",
            hint="make it the only data.source, or prepare all texts together",
        )
    names = sorted(_walk(path))
    if not names:
        raise UsageError(f"data source {path} holds no {KINDS} file", hint="point it at a folder of texts")
    for name in names:
        yield _input(f"{path}/{name}", name, role)


def _walk(folder: Path) -> Iterator[str]:
    """Names below a folder of the kinds that can be read, without hidden ones."""
    for place, folders, files in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = _below(place, folder)
        yield from (below + name for name in files if not name.startswith(".") and form_of(name))


def _below(place: str, root: Path) -> str:
    """What stands before the names of the files in a folder of a walk through `root`.

    A string, found once a folder: `submit` would spend its time on a path object for each of many files.
    """
    below = os.path.relpath(place, root)
    return "" if below == os.curdir else f"{below}/"


def _raise_unreadable(error: OSError) -> None:
    raise UsageError(
        f"data source {error.filename} cannot be read: {error.strerror}",
        hint="make it readable for you (chmod u+rx), or leave it out",
    )


def _input(path: str, name: str, role: str) -> Input:
    form = form_of(name)
    if form is None:
        raise UsageError(
            f"data source {path} is not a kind that can be read: {KINDS}",
            hint="rename plain text to .txt, one JSON object a line to .jsonl",
        )
    return _stat_input(path, name, role, *form)


def _stat_input(path: str, name: str, role: str, form: str, compressed: bool) -> Input:
    try:
        status = Path(path).stat()
    except OSError as error:
        raise UsageError(f"data source {path} cannot be read: {error.strerror}") from None
    if not os.access(path, os.R_OK):
        raise UsageError(
            f"data source {path} cannot be read: permission denied",
            hint="make it readable for you (chmod u+r)",
        )
    return Input(path, name, role, form, compressed, status.st_size, status.st_mtime_ns)


def _stdlib_inputs(role: str, val_fraction: float) -> Iterator[Input]:
    """The interpreter's own sources, split by file: a hash of its name decides where a file goes."""
    root = stdlib_folder()
    names = sorted(_stdlib_names(root))
    if not names:
        raise UsageError(
            f"the standard library of this Python has no sources in {root}",
            hint="name a text with data.source, or use another Python",
        )
    validation = _validation_names(names, val_fraction) if role == BOTH else set()
    for name in names:
        file_role = role if role != BOTH else VAL if name in validation else TRAIN
        yield _stat_input(f"{root}/{name}", name, file_role, TEXT, False)


def _stdlib_names(root: Path) -> Iterator[str]:
    for place, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _STDLIB_SKIPPED and not name.startswith(("config-", "."))
        ]
        below = _below(place, root)
        for name in files:
            if name.endswith(".py") and Path(place, name).is_file():
                yield below + name


def _validation_names(names: Sequence[str], val_fraction: float) -> set[str]:
    """The names whose hash falls into the fraction; at least the one that is nearest to it."""
    places = {name: _hash_fraction(name) for name in names}
    return {name for name in names if places[name] < val_fraction} or {min(names, key=places.__getitem__)}


def _hash_fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
