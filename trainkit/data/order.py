"""Compute the order of training samples as a pure function of integers.

A position counts samples over the whole training run: position // num_samples is the epoch, and position %
num_samples is the offset within the epoch. Within an epoch, a keyed bijection permutes the offsets. The
bijection is computed, never stored, so any process can compute the sample at any position without state,
memory or communication.

The bijection is a Feistel network over a grid of rows x columns that is slightly larger than the number of
samples (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Each round shifts one coordinate
by a hash of the other coordinate. Results outside the range of samples are permuted again until they fall
within the range (cycle walking).

A mixture assigns each position to one of its sources according to a periodic schedule. Each source in a
mixture has its own order over the positions assigned to it.

Changing any constant in this module would change the data order of every resumed run, so the tests compare
the order with recorded values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_NUM_ROUNDS = 10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD_MASK = (1 << 64) - 1


def sample_index(positions: npt.ArrayLike, num_samples: int, seed: int, shuffle: bool) -> IntArray:
    """Return the index of the sample at each global position, as int64 in the same shape.

    The positions in one epoch cover every sample exactly once, and each epoch has its own order. Raises
    ValueError for a negative position or an empty dataset.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}")
    flat = np.asarray(positions, dtype=np.int64)
    if flat.size and flat.min() < 0:
        raise ValueError(f"positions must not be negative, not {flat.min()}")
    epochs, offsets = np.divmod(flat, num_samples)
    if not shuffle:
        return offsets
    shuffled = _permute(
        offsets.ravel().astype(np.uint64), epochs.ravel().astype(np.uint64), num_samples, seed
    )
    return shuffled.astype(np.int64).reshape(flat.shape)


def positions_of(numbers: npt.ArrayLike, skipped: Iterable[tuple[int, int]]) -> IntArray:
    """Return the position of each trained sample, as int64 in the same shape.

    `numbers` counts the trained samples from 0. `skipped` contains the ranges of positions that the run
    leaves out, in ascending order and without overlap: the first position, and the position after the last.
    """
    positions = np.array(numbers, dtype=np.int64)
    for first, stop in skipped:
        positions[positions >= first] += stop - first
    return positions


class Schedule:
    """Assigns positions to sources in proportion to integer weights, with the sum of the weights as period.

    The first n positions include n x weight / sum samples of each source, rounded up or down, for every n. In
    any window of n positions, the number of samples of a source differs from n x weight / sum by less than
    two. The schedule solves the chairman assignment problem (Tijdeman, 1980) with earliest-deadline-first
    scheduling. Sample j of a source (counted from 1) can be placed from the first n at which n x weight / sum
    exceeds j - 1, and must be placed by the first n at which n x weight / sum reaches j.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.array(weights, dtype=np.int64)
        self._period = int(self._weights.sum())
        source = np.repeat(np.arange(len(weights)), self._weights)
        item = np.concatenate([np.arange(weight, dtype=np.int64) for weight in weights])
        first = item * self._period // self._weights[source]
        deadline = -(-(item + 1) * self._period // self._weights[source])
        columns = (column.tolist() for column in (first, deadline, source, item))
        waiting = sorted(zip(*columns, strict=True), reverse=True)
        ready: list[tuple[int, int, int]] = []
        self._sources = np.empty(self._period, dtype=np.int64)
        self._items = np.empty(self._period, dtype=np.int64)
        for position in range(self._period):
            while waiting and waiting[-1][0] <= position:
                heappush(ready, waiting.pop()[1:])
            _, self._sources[position], self._items[position] = heappop(ready)

    def at(self, positions: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return the source of each position, and the number of earlier positions with the same source."""
        periods, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self._period)
        sources = self._sources[offsets]
        return sources, periods * self._weights[sources] + self._items[offsets]


def source_seed(seed: int, source: int) -> int:
    """Return the seed for the order of a mixture's source; the first source uses the run's seed."""
    return seed + source * int(_GOLDEN)


def _permute(offsets: _Words, epochs: _Words, num_samples: int, seed: int) -> _Words:
    num_rows = math.isqrt(num_samples - 1) + 1
    num_columns = -(-num_samples // num_rows)
    keys = _mix(_mix(np.uint64(seed & _WORD_MASK) + _GOLDEN * np.ones_like(epochs)) + epochs)
    result = _feistel(offsets, keys, num_rows, num_columns)
    outside = np.flatnonzero(result >= num_samples)
    while outside.size:
        result[outside] = _feistel(result[outside], keys[outside], num_rows, num_columns)
        outside = outside[result[outside] >= num_samples]
    return result


def _feistel(values: _Words, keys: _Words, num_rows: int, num_columns: int) -> _Words:
    rows, columns = np.divmod(values, np.uint64(num_columns))
    for number in range(_NUM_ROUNDS):
        round_keys = keys + _GOLDEN * np.full_like(keys, number + 1)
        if number % 2 == 0:
            rows = (rows + _mix(columns ^ _mix(round_keys)) % np.uint64(num_rows)) % np.uint64(num_rows)
        else:
            columns = (columns + _mix(rows ^ _mix(round_keys)) % np.uint64(num_columns)) % np.uint64(
                num_columns
            )
    rows *= np.uint64(num_columns)
    return rows + columns


def _mix(words: _Words) -> _Words:
    """Mix words so that every input bit reaches every output bit.

    The function is the finalizer of splitmix64 (Steele, Lea and Flood, 2014).
    """
    mixed: _Words = (words ^ (words >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
