"""Reads a source completely, and reports each line or row that `prepare` would reject."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict

from trainkit.capabilities.texts.inputs import TEXT, Input, TableError
from trainkit.capabilities.texts.tokenize import Tokenizer, in_batches
from trainkit.capabilities.texts.units import RowError, open_input, read_rows, row_text
from trainkit.data.dataset_file import SPLITS, check_shard_sizes, read_dataset_file
from trainkit.folders import shown_path
from trainkit.run.manifest import file_hash

LONG_ROW_BYTES = 1 << 20
"""Rows with at least this many bytes are reported as long, because each of them fills many samples."""
_MAX_LISTED = 5
_BLOCK = 1 << 20


@dataclass(frozen=True)
class LineProblem:
    """A problem found in a source."""

    file: str
    line: int | None
    """Number of the line or table row, counted from 1; None if the problem is not limited to one line."""
    message: str

    def render(self) -> str:
        place = shown_path(self.file) if self.line is None else f"{shown_path(self.file)}:{self.line}"
        return f"{place}: {self.message}"


class ValidatedTaskJson(TypedDict):
    """The problems in the samples of a task."""

    task: str
    problems: list[str]


OnProblem = Callable[[LineProblem], None]


@dataclass
class SourceSummary:
    """Counts of lines, empty rows, long rows and tokens in one source."""

    file: str
    lines: int = 0
    """Number of lines in a text, or of rows in a table."""
    documents: int = 0
    empty: int = 0
    """Number of rows or files that contain no text and are skipped."""
    first_empty: list[int] = field(default_factory=list)
    long: int = 0
    """Number of rows with at least `LONG_ROW_BYTES` of text, which are not skipped."""
    first_long: list[int] = field(default_factory=list)
    tokens: int = 0
    """Number of tokens, including end-of-document tokens."""
    problems: int = 0

    def notes(self) -> Iterator[str]:
        """Yield notes about empty rows, which are skipped, and about long rows, which are accepted."""
        for count, first, what in (
            (self.empty, self.first_empty, "without text, which are skipped"),
            (self.long, self.first_long, f"of at least {LONG_ROW_BYTES >> 20} MiB"),
        ):
            if first:
                more = ", …" if count > len(first) else ""
                yield f"{shown_path(self.file)}: {count:,} rows {what}: {', '.join(map(str, first))}{more}"

    def add_row(self, number: int, text: bytes) -> bool:
        """Count a row, and return whether it has text."""
        if not text:
            self.empty += 1
            self.first_empty += [number] if len(self.first_empty) < _MAX_LISTED else []
            return False
        if len(text) >= LONG_ROW_BYTES:
            self.long += 1
            self.first_long += [number] if len(self.first_long) < _MAX_LISTED else []
        self.documents += 1
        return True


class ValidatedTextsJson(TypedDict):
    """The counts of each source, and the problems in all sources."""

    files: list[SourceSummary]
    problems: list[LineProblem]


ValidatedJson = ValidatedTextsJson | ValidatedTaskJson
"""The output for texts and shards, or for the config of a task."""


def validate_texts(
    source: Input, text_key: str, tokenizer: Tokenizer, on_problem: OnProblem
) -> SourceSummary:
    """Check every line or row of a file in constant memory; raise UsageError if pyarrow is not installed."""
    summary = SourceSummary(source.path)

    def report(line: int | None, message: str) -> None:
        summary.problems += 1
        on_problem(LineProblem(source.path, line, message))

    try:
        read = _text if source.form == TEXT else partial(_rows, key=text_key)
        for texts in in_batches(read(source, summary, report), len):
            summary.tokens += sum(map(len, tokenizer.encode(texts)))
        summary.tokens += summary.documents
    except TableError as error:
        report(None, str(error))
    except (EOFError, zlib.error) as error:
        report(None, f"not a complete gzip file: {error}")
    except OSError as error:
        report(None, f"cannot be read: {error.strerror or error}")
    return summary


def validate_shards(folder: Path, on_problem: OnProblem) -> SourceSummary:
    """Compare every shard of a prepared dataset with its recorded hash.

    Raises UsageError if the folder is not a prepared dataset, or if a shard is missing or has the wrong size.
    """
    file = read_dataset_file(folder)
    summary = SourceSummary(str(folder))
    for split in SPLITS:
        check_shard_sizes(folder, file, split)
        summary.tokens += file.num_tokens(split)
        for shard in file.splits[split]:
            if file_hash(folder / shard.file) != shard.sha256:
                summary.problems += 1
                message = "the content has changed since the dataset was prepared: prepare it again"
                on_problem(LineProblem(str(folder / shard.file), None, message))
    return summary


_Report = Callable[[int | None, str], None]


def _rows(source: Input, summary: SourceSummary, report: _Report, key: str) -> Iterator[bytes]:
    """Yield the text of each line of a file, or of each row of a table."""
    for number, _, row in read_rows(source, key):
        summary.lines = number
        try:
            text = row_text(source, row, key)
        except RowError as error:
            report(number, str(error))
            continue
        if summary.add_row(number, text):
            yield text


def _text(source: Input, summary: SourceSummary, report: _Report) -> Iterator[bytes]:
    """Yield the pieces of a text file that are valid UTF-8; report at most one invalid byte per line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    inside_line = reported = False
    with open_input(source) as stream:
        while piece := stream.readline(_BLOCK):
            if not inside_line:
                summary.lines += 1
                reported = False
            inside_line = not piece.endswith(b"\n")
            try:
                text = decoder.decode(piece)
            except UnicodeDecodeError as error:
                decoder.reset()
                if not reported:
                    report(summary.lines, f"not UTF-8: byte {error.object[error.start]:#04x}")
                reported = True
            else:
                yield text.encode()
    if decoder.getstate()[0]:
        report(summary.lines, "not UTF-8: the text ends in the middle of a character")
    if summary.lines:
        summary.documents = 1
    else:
        summary.empty = 1
