"""Which files a dataset is made of, in which order, and how each is split. Looks at names and sizes only."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
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
    from difflib import get_close_matches

    close = get_close_matches(path.name, names, n=1)
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
        form = form_of(path.name)
        if form is None:
            raise UsageError(
                f"data source {path} is not a kind that can be read: {KINDS}",
                hint="rename plain text to .txt, one JSON object a line to .jsonl",
            )
        yield _input(str(path), path.name, role, *form, path.stat)
        return
    if is_dataset(path):
        raise UsageError(
            f"{path} is a prepared dataset and cannot be mixed with other sources",
            hint="make it the only data.source, or prepare all texts together",
        )
    found = [(name, entry) for name, entry in _files_below(path, _is_shown) if _is_shown(entry.name)]
    inputs = [
        _input(f"{path}/{name}", name, role, *form, entry.stat)
        for name, entry in sorted(found, key=_by_name)
        if (form := form_of(name)) is not None
    ]
    if not inputs:
        raise UsageError(f"data source {path} holds no {KINDS} file", hint="point it at a folder of texts")
    yield from inputs


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _by_name(found: tuple[str, os.DirEntry[str]]) -> str:
    return found[0]


def _files_below(root: Path, enters: Callable[[str], bool]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file by its name below a folder, in no order; links to folders are not followed.

    Entries of a listing, which know what they are: `submit` would spend its time on a path object for each.
    """
    waiting = [("", str(root))]
    while waiting:
        below, folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                listing = list(entries)
        except OSError as error:
            raise UsageError(
                f"data source {folder} cannot be read: {error.strerror}",
                hint="make it readable for you (chmod u+rx), or leave it out",
            ) from None
        for entry in listing:
            if not _is_folder(entry):
                yield below + entry.name, entry
            elif enters(entry.name) and not entry.is_symlink():
                waiting.append((f"{below}{entry.name}/", entry.path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # links that go round in a circle: said when the file is looked at, if it ever is


def _input(
    path: str, name: str, role: str, form: str, compressed: bool, look: Callable[[], os.stat_result]
) -> Input:
    try:
        status = look()
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
    found = sorted(_stdlib_files(root), key=_by_name) if root.is_dir() else []
    if not found:
        raise UsageError(
            f"the standard library of this Python has no sources in {root}",
            hint="name a text with data.source, or use another Python",
        )
    validation = _validation_names([name for name, _ in found], val_fraction) if role == BOTH else set()
    for name, entry in found:
        file_role = role if role != BOTH else VAL if name in validation else TRAIN
        yield _input(f"{root}/{name}", name, file_role, TEXT, False, entry.stat)


def _stdlib_files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    for name, entry in _files_below(root, _is_of_stdlib):
        if name.endswith(".py") and entry.is_file():
            yield name, entry


def _is_of_stdlib(folder: str) -> bool:
    return folder not in _STDLIB_SKIPPED and not folder.startswith(("config-", "."))


def _validation_names(names: Sequence[str], val_fraction: float) -> set[str]:
    """The names whose hash falls into the fraction; at least the one that is nearest to it."""
    places = {name: _hash_fraction(name) for name in names}
    return {name for name in names if places[name] < val_fraction} or {min(names, key=places.__getitem__)}


def _hash_fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
