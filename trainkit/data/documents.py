"""Finds the source files and positions of samples, which `prepare` records next to each shard."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.dataset_file import PLACES, places_file
from trainkit.data.mixture import components
from trainkit.data.prepare import INPUTS_FILE
from trainkit.data.shards import TokenMixture, TokenShards
from trainkit.data.sources import FORMS, ROWS, TEXT, DataConfig, dataset_spec, find_inputs, prepared_folder
from trainkit.data.tokenize import Tokenizer
from trainkit.data.tokenizer_identity import BYTES
from trainkit.run.files import read_json

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Document:
    """A part of a sample that comes from one document, or from one text file."""

    file: str
    """The source file; the shard of a dataset of an older version, which does not know it."""
    unit: str
    """What `position` counts: ``byte`` of a text from 0, ``line`` or ``row`` from 1, ``token`` of a shard."""
    position: int
    skipped_tokens: int
    """Tokens of the document before the sample; 0 for a text file, whose `position` counts them."""
    num_tokens: int
    text: str
    """Of these tokens."""

    @property
    def where(self) -> str:
        """The position in words: ``corpus.jsonl line 7``."""
        return f"{self.file} {self.unit} {self.position:,}"


class SampleSources:
    """Where the samples of a dataset come from."""

    def __init__(self, config: DataConfig, data: TokenShards | TokenMixture) -> None:
        parts = data.parts if isinstance(data, TokenMixture) else (data,)
        self._sources = [_Source(*item) for item in zip(components(config), parts, strict=True)]
        self._ends = np.cumsum([part.num_samples for part in parts], dtype=np.int64)

    def documents(self, index: int) -> list[Document]:
        """The documents of a sample, in its order."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return list(self._sources[number].documents(index - before))


class _Source:
    """Where the samples of one prepared folder come from."""

    def __init__(self, config: DataConfig, data: TokenShards) -> None:
        self._config, self._data = config, data
        self._places = lru_cache(maxsize=64)(_read_places)

    @cached_property
    def _files(self) -> Sequence[str]:
        """Inputs by number: their paths, or in a prepared folder, which may be a copy, their names."""
        if prepared_folder(self._config) is None:
            return [source.path for source in find_inputs(dataset_spec(self._config))]
        return [str(record["name"]) for record in read_json(self._data.folder / INPUTS_FILE)]

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """None if it is not known: a prepared folder has only its name."""
        name = self._config.tokenizer
        if self._data.tokenizer.kind == BYTES:
            return Tokenizer(BYTES)
        return None if name == BYTES else Tokenizer(name)

    def documents(self, index: int) -> Iterator[Document]:
        for shard, first, stop in self._data.places(index):
            places = self._places(places_file(shard))
            if places is None:
                yield Document(str(shard), "token", first, 0, stop - first, self._text(shard, first, stop))
                continue
            at = int(np.searchsorted(places["token"], first, side="right")) - 1
            while first < stop:
                place = places[at]
                # The pieces of a text file follow each other.
                while at + 1 < len(places) and _continues(place, places[at + 1]):
                    at += 1
                end = int(places[at + 1]["token"]) if at + 1 < len(places) else stop
                yield self._document(shard, place, first, min(end, stop))
                first, at = min(end, stop), at + 1

    def _document(self, shard: Path, place: Any, first: int, stop: int) -> Document:
        form, position, skipped = FORMS[int(place["form"])], int(place["place"]), first - int(place["token"])
        file, unit = self._files[int(place["input"])], "row"
        if form == TEXT:
            unit, position = "byte", position + self._num_bytes(shard, int(place["token"]), first)
            skipped = 0
        elif form == ROWS and Path(file).is_file():
            unit, position = "line", _line_counter(file).count(position) + 1
        elif form == ROWS:
            unit = "byte"
        return Document(file, unit, position, skipped, stop - first, self._text(shard, first, stop))

    def _num_bytes(self, shard: Path, first: int, stop: int) -> int:
        """The length of the text of some tokens, as far as the tokenizer restores it."""
        if self._data.tokenizer.kind == BYTES:
            return stop - first
        return len(self._text(shard, first, stop).encode())

    def _text(self, shard: Path, first: int, stop: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._data.tokens_of(shard, first, stop))


def _read_places(file: Path) -> Any:
    """The places of a shard's texts; None for a dataset of an older version."""
    return np.fromfile(file, dtype=PLACES) if file.is_file() else None


def _continues(place: Any, following: Any) -> bool:
    return bool(
        FORMS[int(place["form"])] == TEXT
        and following["input"] == place["input"]
        and following["form"] == place["form"]
    )


class _LineCounter:
    """Counts the lines of one file before some bytes; reads a file that is not compressed about once."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._is_compressed = file.endswith(".gz")
        self._counts = [0]
        """Line ends before each block that was counted, and after the last one."""

    def count(self, end: int) -> int:
        """The number of line ends in the first `end` bytes, decompressed."""
        with gzip.open(self._file, "rb") if self._is_compressed else open(self._file, "rb") as stream:
            block = min(end // _BLOCK, len(self._counts) - 1)
            stream.seek(block * _BLOCK)
            while (block + 1) * _BLOCK <= end:
                self._counts.append(self._counts[block] + stream.read(_BLOCK).count(b"\n"))
                block += 1
            return self._counts[block] + stream.read(end - block * _BLOCK).count(b"\n")


_line_counter = lru_cache(maxsize=64)(_LineCounter)
