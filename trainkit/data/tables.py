"""Reads the text column of Parquet files, and of the Arrow files that Hugging Face datasets saves.

Needs pyarrow, which is imported when the first such file is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainkit.data.sources import PARQUET, Input
from trainkit.errors import UsageError

_BATCH_ROWS = 256
_PARQUET_OPTIONS = {"buffer_size": 1 << 20, "pre_buffer": False}
"""Reads 1 MiB of a column at a time; pyarrow's defaults read that of a whole row group."""
_MAX_NAMES = 8


class TableError(ValueError):
    """A file is not a table with the text column."""


def read_column(
    source: Input, key: str, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Each row's number, counted from 1, and its value in the column `key`, None if it is null.

    Covers the row groups (Parquet) or record batches (Arrow) that begin within the bytes `start` to `end` of
    the file, so that adjacent ranges together yield every row once, and keeps a few rows in memory. Raises
    TableError for a file that cannot be parsed or has no such column, UsageError if pyarrow is missing.
    """
    arrow = _pyarrow(source.path)
    read = _parquet if source.form == PARQUET else _arrow
    stop = source.size if end is None else end
    try:
        for row, values in read(arrow, source.path, key, start, stop):
            plain = values.dictionary_decode() if arrow.types.is_dictionary(values.type) else values
            yield from enumerate(plain.cast(arrow.large_binary()).to_pylist(), row + 1)
    except (arrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the file system; pyarrow's own have no number
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
            if group.num_rows and start <= _first_byte(group) < end:
                at = row
                for batch in file.iter_batches(_BATCH_ROWS, [number], [key], use_threads=False):
                    yield at, batch.column(batch.schema.get_field_index(key))
                    at += batch.num_rows
            row += group.num_rows


def _first_byte(group: Any) -> int:
    column = group.column(0)
    begin: int = min(at for at in (column.dictionary_page_offset, column.data_page_offset) if at)
    return begin


def _arrow(arrow: Any, path: str, key: str, start: int, end: int) -> Iterator[tuple[int, Any]]:
    # Mapped, the batches before the range cost a read of their headers only.
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
    """The index of the text column."""
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
        import pyarrow  # takes 0.4 s with its submodules
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"{path} can only be read with pyarrow, which cannot be imported ({error})",
            hint="pip install 'trainkit[hf]'",
        ) from None
    return pyarrow
