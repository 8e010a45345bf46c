"""Reads a source completely and reports every line that `prepare` would refuse."""

from __future__ import annotations

import codecs
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainkit.data.dataset_file import SPLITS, check_shard_sizes, read_dataset_file
from trainkit.data.sources import ROWS, Input
from trainkit.data.tokenize import Tokenizer
from trainkit.data.units import RowError, open_input, row_text

_BLOCK = 1 << 20
_BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class LineProblem:
    """One problem of a source."""

    file: str
    line: int | None
    """Counted from 1; None if the problem is not in a single line."""
    message: str

    def render(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message}"


OnProblem = Callable[[LineProblem], None]


@dataclass
class SourceSummary:
    """The counts of a source."""

    file: str
    lines: int = 0
    documents: int = 0
    empty: int = 0
    """Rows without text, which are skipped, or files without text."""
    tokens: int = 0
    """Including end-of-document tokens."""
    problems: int = 0


def validate_texts(
    source: Input, text_key: str, tokenizer: Tokenizer, on_problem: OnProblem
) -> SourceSummary:
    """Check every line of one .txt or .jsonl file, in constant memory."""
    summary = SourceSummary(source.path)

    def report(line: int | None, message: str) -> None:
        summary.problems += 1
        on_problem(LineProblem(source.path, line, message))

    try:
        with open_input(source) as stream:
            if source.form == ROWS:
                texts = _rows(stream, text_key, summary, report)
            else:
                texts = _text(stream, summary, report)
            _count_tokens(texts, tokenizer, summary)
    except (EOFError, zlib.error) as error:
        report(None, f"not a complete gzip file: {error}")
    except OSError as error:
        report(None, f"cannot be read: {error.strerror or error}")
    return summary


def validate_shards(folder: Path, on_problem: OnProblem) -> SourceSummary:
    """Compare every shard of a prepared dataset with its published hash.

    Raises UsageError if the folder is not a dataset, or a shard is missing or has another size.
    """
    file = read_dataset_file(folder)
    summary = SourceSummary(str(folder))
    for split in SPLITS:
        check_shard_sizes(folder, file, split)
        summary.tokens += file.num_tokens(split)
        for shard in file.splits[split]:
            if _sha256(folder / shard.file) != shard.sha256:
                summary.problems += 1
                message = "the content has changed since it was prepared: prepare the dataset again"
                on_problem(LineProblem(str(folder / shard.file), None, message))
    return summary


_Report = Callable[[int | None, str], None]


def _rows(stream: IO[bytes], key: str, summary: SourceSummary, report: _Report) -> Iterator[bytes]:
    for number, line in enumerate(stream, 1):
        summary.lines = number
        try:
            text = row_text(line, key) if line.strip() else b""
        except RowError as error:
            report(number, str(error))
            continue
        if text:
            summary.documents += 1
            yield text
        else:
            summary.empty += 1


def _text(stream: IO[bytes], summary: SourceSummary, report: _Report) -> Iterator[bytes]:
    """The decodable text; reports only the first invalid byte of each line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    inside_line = reported = False
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
        report(summary.lines, "not UTF-8: the text ends within a character")
    if summary.lines:
        summary.documents = 1
    else:
        summary.empty = 1


def _count_tokens(texts: Iterator[bytes], tokenizer: Tokenizer, summary: SourceSummary) -> None:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            summary.tokens += sum(map(len, tokenizer.encode(batch)))
            batch, size = [], 0
    summary.tokens += sum(map(len, tokenizer.encode(batch))) + summary.documents


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
