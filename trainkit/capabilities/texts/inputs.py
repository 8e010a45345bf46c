"""Finds a config's texts: the text files, and the options that determine their tokens.

This module is used by dry runs, so it reads only file names and sizes, and imports neither numpy nor
tokenizers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import BYTES, TRAIN, VAL, is_dataset
from trainkit.data.sources import STDLIB, listed
from trainkit.errors import UsageError
from trainkit.extras import install_line
from trainkit.folders import shown_path
from trainkit.formats import near


@dataclass(frozen=True)
class DatasetSpec:
    """The sources of a dataset and the options that determine how the sources are tokenized."""

    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    """Sources of validation data; if none are given, `val_fraction` of `sources` is held out for
    validation."""
    tokenizer: str = BYTES
    val_fraction: float = 0.0
    text_key: str = "text"

    @property
    def split_fraction(self) -> float:
        """Return the fraction of `sources` that is held out for validation."""
        return 0.0 if self.val_sources else self.val_fraction


def dataset_spec(config: DataConfig) -> DatasetSpec:
    """Return the `DatasetSpec` for the config section `data`."""
    return DatasetSpec(
        sources=listed(config.source),
        val_sources=listed(config.val_source),
        tokenizer=config.tokenizer,
        val_fraction=config.val_fraction,
        text_key=config.text_key,
    )


BOTH = "both"
"""Role of an input that is divided between the training and validation splits."""
TEXT = "text"
ROWS = "rows"
PARQUET = "parquet"
ARROW = "arrow"
TABLES = (PARQUET, ARROW)
FORMS = (TEXT, ROWS, *TABLES)
"""Kinds of input files; prepared data store indices into this tuple, so its order must not change."""
_FORMS = {".txt": TEXT, ".jsonl": ROWS, ".parquet": PARQUET}
KINDS = ".txt, .jsonl, .txt.gz, .jsonl.gz or .parquet"

SAVED_FILES = {"state.json", "dataset_info.json"}
"""Files in every folder written by `save_to_disk` for a Hugging Face dataset."""
SAVED_SPLITS = "dataset_dict.json"
"""File in a folder that contains one saved dataset per split."""

_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Input:
    """A source file on disk."""

    path: str
    name: str
    """Path relative to the source folder, so that the name is the same on every machine."""
    role: str
    form: str
    compressed: bool
    size: int
    """Size on disk, in bytes."""
    mtime_ns: int

    @property
    def shown(self) -> str:
        """Return the path in the form shown in messages."""
        return shown_path(self.path)


def find_inputs(spec: DatasetSpec) -> list[Input]:
    """Return all files of a dataset in the order they are tokenized.

    Raises UsageError for a file that is missing, unreadable or of an unsupported kind.
    """
    main_role = BOTH if spec.split_fraction else TRAIN
    inputs = [found for source in spec.sources for found in _expand(source, main_role, spec.val_fraction)]
    for source in spec.val_sources:
        inputs.extend(_expand(source, VAL, 0.0))
    return inputs


def unreadable(path: str | Path, error: OSError) -> UsageError:
    """Return a UsageError for a source that cannot be read."""
    return UsageError(
        f"data source {shown_path(path)} cannot be read: {error.strerror or error}",
        hint="check the path and the disk, and make the path readable (chmod u+r; for a folder, chmod u+rx)",
    )


def form_of(name: str) -> tuple[str, bool] | None:
    """Return a file's kind, and whether it is compressed, based on its name; None if not supported."""
    compressed = name.endswith(".gz")
    stem, dot, kind = name.removesuffix(".gz").rpartition(".")
    form = _FORMS.get(dot + kind) if stem else None
    return None if form is None or (compressed and form == PARQUET) else (form, compressed)


def stdlib_folder() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _expand(source: str, role: str, val_fraction: float) -> Iterator[Input]:
    if source == STDLIB:
        yield from _stdlib_inputs(role, val_fraction)
        return
    path = Path(source)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        close = near(path.name, siblings)
        hint = "check the path" if close is None else f"did you mean {shown_path(path.with_name(close))}?"
        if "," in source:
            hint = f"write a list of sources in brackets: [{shown_path(path)}]"
        raise UsageError(f"data source {shown_path(path)} does not exist", hint=hint) from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not is_folder:
        form = form_of(path.name)
        if form is None:
            raise UsageError(
                f"data source {shown_path(path)} has an unsupported file type; supported types: {KINDS}",
                hint="rename plain text files to .txt, and files with one JSON object per line to .jsonl",
            )
        yield _input(str(path), path.name, role, *form)
        return
    if is_dataset(path):
        raise UsageError(
            f"{shown_path(path)} is a prepared dataset and cannot be mixed with other sources",
            hint="use this dataset as the only data.source, or give each source a weight: "
            "{" + f"{path.name}: 0.5, …" + "}",
        )
    names = [name for name in _names_below(path, _is_shown) if _is_shown(name.rpartition("/")[2])]
    inputs = [
        _input(f"{path}/{name}", name, role, *form) for name in names if (form := form_of(name)) is not None
    ]
    for name in names:
        folder, slash, last = name.rpartition("/")
        if last == SAVED_SPLITS:
            raise UsageError(
                f"{path / folder} contains several splits of a Hugging Face DatasetDict",
                hint="specify the folder of one split",
            )
        if last == "state.json" and all(f"{folder}{slash}{other}" in names for other in SAVED_FILES):
            inputs += _saved_inputs(path, folder + slash, role)
    if not inputs:
        raise UsageError(
            f"data source {shown_path(path)} contains no {KINDS} file and no saved Hugging Face dataset",
            hint="specify a folder that contains texts",
        )
    yield from inputs


def _saved_inputs(root: Path, folder: str, role: str) -> Iterator[Input]:
    """Yield the Arrow files written by `save_to_disk` for a dataset, in order; other files are skipped."""
    state = root / folder / "state.json"
    try:
        names = [str(entry["filename"]) for entry in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{state} does not list the files of a Hugging Face dataset: {error!r}",
            hint="save the dataset again with `save_to_disk`",
        ) from None
    for name in names:
        file = root / folder / name
        yield _input(str(file), folder + name, role, ARROW, False)


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _names_below(root: Path, enters: Callable[[str], bool]) -> list[str]:
    """Return the sorted relative paths of all files below a folder; symlinks to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = filter(enters, folders)
        below = folder.removeprefix(str(root)).lstrip("/")
        found += [f"{below}/{name}" if below else name for name in names]
    return sorted(found)


def _input(
    path: str, name: str, role: str, form: str, compressed: bool, status: os.stat_result | None = None
) -> Input:
    try:
        # For a source with many files, creating a path object for each would take three times as long.
        status = status or os.stat(path)  # noqa: PTH116
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise unreadable(path, error) from None
    return Input(path, name, role, form, compressed, status.st_size, status.st_mtime_ns)


def _stdlib_inputs(role: str, val_fraction: float) -> Iterator[Input]:
    """Yield the source files of Python's standard library; a hash of each file name determines its split."""
    root = stdlib_folder()
    names = _names_below(root, _is_stdlib_folder) if root.is_dir() else []
    found: dict[str, os.stat_result] = {}
    for name in names:
        if name.endswith(".py"):
            with suppress(OSError):  # Skip broken symlinks.
                status = os.stat(f"{root}/{name}")  # noqa: PTH116
                if stat.S_ISREG(status.st_mode):
                    found[name] = status
    if not found:
        raise UsageError(
            f"the standard library of this Python has no source files in {root}",
            hint="set data.source to other texts, or use another Python",
        )
    # A file is used for validation if its hash is below the fraction; the file with the lowest hash is always
    # used for validation.
    hashes = {name: hashlib.sha256(name.encode()).digest()[:8] for name in found}
    below = {name for name in hashes if int.from_bytes(hashes[name], "big") / 2**64 < val_fraction}
    validation = below or {min(hashes, key=hashes.__getitem__)} if role == BOTH else set()
    for name, status in found.items():
        file_role = role if role != BOTH else VAL if name in validation else TRAIN
        yield _input(f"{root}/{name}", name, file_role, TEXT, False, status)


def _is_stdlib_folder(folder: str) -> bool:
    return folder not in _STDLIB_SKIPPED and not folder.startswith(("config-", "."))


_BATCH_ROWS = 256
_PARQUET_OPTIONS = {"buffer_size": 1 << 20, "pre_buffer": False}
"""Options that make pyarrow read 1 MiB of a column at a time, instead of a row group's entire column."""
_MAX_NAMES = 8


class TableError(ValueError):
    """Raised if a file is not a table with the text column."""


def read_column(
    source: Input, key: str, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield each row's number, counted from 1, and its value in the column `key`, which is None for null.

    Yields the rows of Parquet row groups or Arrow record batches that begin between the bytes `start` and
    `end` of the file, so that adjacent ranges together yield every row exactly once. Only a few rows are kept
    in memory. Raises TableError if the file cannot be parsed or lacks the column, and UsageError if pyarrow
    is not installed.
    """
    arrow = _pyarrow(source.path)
    read = _parquet if source.form == PARQUET else _arrow
    stop = source.size if end is None else end
    try:
        for row, values in read(arrow, source.path, key, start, stop):
            plain = values.dictionary_decode() if arrow.types.is_dictionary(values.type) else values
            yield from enumerate(plain.cast(arrow.large_binary()).to_pylist(), row + 1)
    except (arrow.ArrowException, OSError) as error:
        # File system errors have an errno; pyarrow's own errors do not.
        if getattr(error, "errno", None) is not None:
            raise
        kind = "Parquet" if source.form == PARQUET else "Arrow"
        reason = str(error).partition("\n")[0]
        raise TableError(f"not a complete {kind} file: {reason}") from None


def _parquet(arrow: Any, path: str, key: str, start: int, end: int) -> Iterator[tuple[int, Any]]:
    with arrow.parquet.ParquetFile(path, **_PARQUET_OPTIONS) as file:
        _column(arrow, file.schema_arrow, key)
        row = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if not group.num_rows:
                continue
            first = group.column(0)
            begin = min(at for at in (first.dictionary_page_offset, first.data_page_offset) if at)
            if start <= begin < end:
                at = row
                for batch in file.iter_batches(_BATCH_ROWS, [number], [key], use_threads=False):
                    yield at, batch.column(batch.schema.get_field_index(key))
                    at += batch.num_rows
            row += group.num_rows


def _arrow(arrow: Any, path: str, key: str, start: int, end: int) -> Iterator[tuple[int, Any]]:
    # In a memory-mapped file, only the headers of batches before `start` need to be read.
    with arrow.memory_map(path) as file, arrow.ipc.open_stream(file) as stream:
        index = _column(arrow, stream.schema, key)
        row = 0
        while (position := file.tell()) < end:
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return
            if position >= start:
                for at in range(0, batch.num_rows, _BATCH_ROWS):
                    yield row + at, batch.column(index).slice(at, _BATCH_ROWS)
            row += batch.num_rows


def _column(arrow: Any, schema: Any, key: str) -> int:
    """Return the index of the text column in a table."""
    index: int = schema.get_field_index(key)
    if index < 0:
        names = ", ".join(sorted(schema.names)[:_MAX_NAMES]) or "none"
        raise TableError(f'no column "{key}" (data.text_key); the columns are: {names}')
    kind = schema.field(index).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise TableError(f'column "{key}" (data.text_key) contains {kind}, not strings')
    return index


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow  # Import pyarrow here, because importing it and its submodules takes 0.4 s.
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"{path} cannot be read without pyarrow, which cannot be imported ({error})",
            hint=f"`{install_line('hf')}`",
        ) from None
    return pyarrow
