"""Reads samples of fixed length from token shards, through memory maps."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainkit.data.cache import ensure_prepared
from trainkit.data.dataset_file import (
    TokenizerIdentity,
    check_shard_size,
    check_shard_sizes,
    read_dataset_file,
)
from trainkit.data.sources import DataConfig
from trainkit.errors import UsageError

MAX_OPEN_SHARDS = 256
"""Memory maps that a dataset keeps open; each uses a file descriptor, often limited to 1,024 per process."""


class TokenShards:
    """One split of a prepared dataset, cut into samples of `seq_len` + 1 tokens.

    Sample i begins at token i x seq_len, so the last token of a sample is the first of the next one and every
    token but the first is predicted once. Samples cross documents and shards. Opening checks file sizes and
    reads no tokens. Safe to read from several threads, to fork and to pickle.
    """

    def __init__(self, folder: str | Path, split: str, seq_len: int, checks_sizes: bool = True) -> None:
        self.folder = Path(folder)
        self.split = split
        self.seq_len = seq_len
        self._file = read_dataset_file(self.folder)
        self._shards = self._file.splits.get(split, ())
        if checks_sizes:
            check_shard_sizes(self.folder, self._file, split)
        counts = [shard.num_tokens for shard in self._shards]
        self._ends = np.cumsum(np.array(counts, dtype=np.int64))
        self.num_tokens = int(sum(counts))
        if self.num_tokens < seq_len + 1:
            raise _too_short(self.folder, split, self.num_tokens, seq_len)
        dtype = np.dtype(self._file.dtype).newbyteorder("<")
        self._open_shard = lru_cache(maxsize=MAX_OPEN_SHARDS)(partial(_map_shard, self.folder, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.folder, self.split, self.seq_len, False)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_samples(self) -> int:
        """Number of complete samples in one epoch; up to seq_len tokens at the end are unused."""
        return (self.num_tokens - 1) // self.seq_len

    @property
    def fingerprint(self) -> str:
        return self._file.fingerprint

    @property
    def tokenizer(self) -> TokenizerIdentity:
        """The tokenizer that produced the tokens."""
        return self._file.tokenizer

    @property
    def vocab_size(self) -> int:
        return self._file.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        return self._file.tokenizer.eos_id

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The tokens of the samples at `indices`, int64 of shape [len(indices), seq_len + 1].

        Raises IndexError for an index outside 0 <= index < num_samples.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_samples):
            raise IndexError(f"sample {wanted.min()}..{wanted.max()} of {self.num_samples}")
        tokens = np.empty((wanted.size, self.seq_len + 1), dtype=np.int64)
        for row, start in zip(tokens, (wanted * self.seq_len).tolist(), strict=True):
            self._copy(start, row)
        return tokens

    def _copy(self, start: int, row: npt.NDArray[np.int64]) -> None:
        """Fill a row with consecutive tokens that begin at `start`, across shards."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(row):
            shard = self._shards[number]
            offset = start + filled - (int(self._ends[number]) - shard.num_tokens)
            piece = self._open_shard(shard.file, shard.num_tokens)[offset : offset + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1


def _map_shard(folder: Path, dtype: np.dtype[Any], file: str, num_tokens: int) -> npt.NDArray[Any]:
    """The tokens of a shard; raises UsageError if it was cut off, which would shift all that follow."""
    path = folder / file
    try:
        tokens: npt.NDArray[Any] = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError):
        check_shard_size(path, num_tokens * dtype.itemsize)
        raise
    if len(tokens) != num_tokens:
        check_shard_size(path, num_tokens * dtype.itemsize)
    return tokens


def open_dataset(config: DataConfig, seq_len: int, split: str, checks_sizes: bool = True) -> TokenShards:
    """The `train` or `val` split of the data of a config; prepares the data first if necessary.

    Raises UsageError for unusable data and for a split shorter than one sample.
    """
    return TokenShards(ensure_prepared(config, checks_sizes), split, seq_len, checks_sizes)


def _too_short(folder: Path, split: str, num_tokens: int, seq_len: int) -> UsageError:
    if num_tokens < 2:
        hint = "add more text"
        if split == "val":
            hint = "raise data.val_fraction or name a data.val_source"
        return UsageError(f"the {split} split of {folder} is empty ({num_tokens} tokens)", hint=hint)
    hint = f"set data.seq_len to at most {num_tokens - 1}, or add more text"
    if split == "val":
        hint += " (a larger data.val_fraction, or a data.val_source)"
    return UsageError(
        f"the {split} split of {folder} has {num_tokens:,} tokens, "
        f"fewer than one sample of data.seq_len {seq_len} + 1",
        hint=hint,
    )
