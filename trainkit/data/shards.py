"""Read fixed-length samples from memory-mapped token shards."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import (
    VAL,
    Shard,
    check_shard_size,
    check_shard_sizes,
    read_dataset_file,
    refuse_several,
)
from trainkit.data.order import IntArray, Schedule, sample_index, source_seed
from trainkit.data.sources import components, ensure_prepared, integer_weights, is_mixture
from trainkit.errors import UsageError
from trainkit.folders import shown_path

MAX_OPEN_SHARDS = 256
"""Maximum number of memory maps kept open, because processes are often limited to 1,024 file descriptors."""


class TokenShards:
    """One split of a prepared dataset, divided into samples of `seq_len` + 1 tokens.

    Sample i begins at token i x seq_len. The last token of a sample is therefore also the first token of the
    next sample, and every token in the split except the first is predicted exactly once. Samples may span
    several documents and shards. Opening a split checks file sizes but reads no tokens. The object is
    thread-safe, can be used in forked processes, and can be pickled.
    """

    def __init__(self, folder: str | Path, split: str, seq_len: int, checks_sizes: bool = True) -> None:
        self.folder = Path(folder)
        self.split = split
        self.seq_len = seq_len
        file = read_dataset_file(self.folder)
        self.fingerprint, self.tokenizer = file.fingerprint, file.tokenizer
        self.vocab_size, self.eos_id = file.tokenizer.vocab_size, file.tokenizer.eos_id
        self._shards = file.splits.get(split, ())
        if checks_sizes:
            check_shard_sizes(self.folder, file, split)
        counts = [shard.num_tokens for shard in self._shards]
        self._ends = np.cumsum(np.array(counts, dtype=np.int64))
        self.num_tokens = int(sum(counts))
        if self.num_tokens < seq_len + 1:
            raise _too_short(self.folder, split, self.num_tokens, seq_len)
        self.num_samples = (self.num_tokens - 1) // seq_len
        """Number of complete samples in one epoch; up to seq_len tokens at the end of the split are
        unused."""
        dtype = np.dtype(file.dtype).newbyteorder("<")
        self._open_shard = lru_cache(maxsize=MAX_OPEN_SHARDS)(partial(_map_shard, self.folder, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.folder, self.split, self.seq_len, False)

    def sample_index(self, positions: IntArray, seed: int, shuffle: bool) -> IntArray:
        """Return the index of the sample at each training position, as int64 in the same shape."""
        return sample_index(positions, self.num_samples, seed, shuffle)

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the tokens of the samples at `indices`, int64 of shape [len(indices), seq_len + 1].

        Raises IndexError for an index outside 0 <= index < num_samples.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_samples):
            raise IndexError(
                f"sample indices {wanted.min()}..{wanted.max()} are out of range for a dataset of size "
                f"{self.num_samples}"
            )
        tokens = np.empty((wanted.size, self.seq_len + 1), dtype=np.int64)
        for row, start in zip(tokens, (wanted * self.seq_len).tolist(), strict=True):
            filled = 0
            for shard, first, stop in self._pieces(start):
                piece = self._open_shard(shard.file, shard.num_tokens)[first:stop]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
        return tokens

    def places(self, index: int) -> Iterator[tuple[Path, int, int]]:
        """Yield each shard that a sample spans, with the range of its tokens within that shard."""
        for shard, first, stop in self._pieces(index * self.seq_len):
            yield self.folder / shard.file, first, stop

    def tokens_of(self, shard: Path, first: int, stop: int) -> list[int]:
        """Return a shard's tokens from index `first` up to, but not including, index `stop`."""
        num_tokens = next(item.num_tokens for item in self._shards if item.file == shard.name)
        found: list[int] = self._open_shard(shard.name, num_tokens)[first:stop].tolist()
        return found

    def _pieces(self, start: int) -> Iterator[tuple[Shard, int, int]]:
        """Yield each shard of the sample that begins at token `start`, with its token range in the shard."""
        number, missing = int(np.searchsorted(self._ends, start, side="right")), self.seq_len + 1
        while missing:
            shard = self._shards[number]
            first = max(0, start - (int(self._ends[number]) - shard.num_tokens))
            stop = min(first + missing, shard.num_tokens)
            yield shard, first, stop
            missing -= stop - first
            number += 1


def _map_shard(folder: Path, dtype: np.dtype[Any], file: str, num_tokens: int) -> npt.NDArray[Any]:
    """Map a shard's tokens; raise UsageError for a truncated shard, which would shift all later tokens."""
    check_shard_size(folder / file, num_tokens * dtype.itemsize)
    return np.memmap(folder / file, dtype=dtype, mode="r")


class TokenMixture:
    """Presents one split of several prepared datasets as a single sequence of samples.

    With `weights`, positions are divided among the datasets in proportion to the weights, and epochs are
    counted separately for each dataset. Without `weights`, samples are ordered as if all datasets were a
    single dataset. Raises UsageError if the datasets use different tokenizers.
    """

    def __init__(self, parts: Sequence[TokenShards], weights: Sequence[int] | None) -> None:
        refuse_several([(str(part.folder), part.tokenizer) for part in parts])
        self.parts = tuple(parts)
        self.weights = weights
        self.seq_len = parts[0].seq_len
        self.tokenizer = parts[0].tokenizer
        self.vocab_size, self.eos_id = parts[0].vocab_size, parts[0].eos_id
        self.num_tokens = sum(part.num_tokens for part in parts)
        self._ends = np.cumsum([part.num_samples for part in parts], dtype=np.int64)
        self.num_samples = int(self._ends[-1])
        self._schedule = None if weights is None else Schedule(weights)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the datasets' fingerprints and the weights."""
        content = {"parts": [part.fingerprint for part in self.parts], "weights": self.weights}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def describe(self, names: Iterable[str]) -> Iterator[str]:
        """Yield one line per source with its weight and size; `names` are the source names in order."""
        assert self.weights is not None
        for name, part, weight in zip(names, self.parts, self.weights, strict=True):
            share = weight / sum(self.weights)
            epoch = math.ceil(part.num_samples / share)
            yield f"{100 * share:.4g}% {name}: {part.num_samples:,} samples, an epoch every {epoch:,}"

    def sample_index(self, positions: IntArray, seed: int, shuffle: bool) -> IntArray:
        """Return the index of the sample at each training position, as int64 in the same shape."""
        if self._schedule is None:
            return sample_index(positions, self.num_samples, seed, shuffle)
        sources, own_positions = self._schedule.at(positions)
        index = np.empty_like(own_positions)
        for number, part in enumerate(self.parts):
            of_part = sources == number
            own = part.sample_index(own_positions[of_part], source_seed(seed, number), shuffle)
            index[of_part] = self._ends[number] - part.num_samples + own
        return index

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the tokens of the samples at `indices`; see `TokenShards.read`."""
        wanted = np.asarray(indices, dtype=np.int64)
        tokens = np.empty((wanted.size, self.seq_len + 1), dtype=np.int64)
        sources = np.searchsorted(self._ends, wanted, side="right")
        for number in np.unique(sources).tolist():
            part = self.parts[number]
            of_part = sources == number
            tokens[of_part] = part.read(wanted[of_part] - (self._ends[number] - part.num_samples))
        return tokens


def open_dataset(
    config: DataConfig, seq_len: int, split: str, checks_sizes: bool = True
) -> TokenShards | TokenMixture:
    """Open the `train` or `val` split of a config's data, preparing the data first if necessary.

    A mixture's validation split consists of its sources' validation splits. Raises UsageError if
    the data is unusable or the split is shorter than one sample.
    """
    folders = [ensure_prepared(part, checks_sizes) for part in components(config)]
    if not is_mixture(config):
        return TokenShards(folders[0], split, seq_len, checks_sizes)
    if split == VAL:
        folders = [folder for folder in folders if read_dataset_file(folder).num_tokens(VAL)] or folders
    parts = [TokenShards(folder, split, seq_len, checks_sizes) for folder in folders]
    return TokenMixture(parts, None if split == VAL else integer_weights(config))


def _too_short(folder: Path, split: str, num_tokens: int, seq_len: int) -> UsageError:
    hint = (
        f"set data.seq_len to at most {num_tokens - 1}, or add more text"
        if num_tokens > 1
        else "add more text"
    )
    if split == VAL:
        hint += "; increase data.val_fraction, or set data.val_source"
    return UsageError(
        f"the {split} split of {shown_path(folder)} has {num_tokens:,} tokens, "
        f"fewer than one sample of data.seq_len {seq_len} + 1",
        hint=hint,
    )
