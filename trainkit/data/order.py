"""The order of the data, as a pure function of integers.

A position counts samples over the whole training: position // num_samples is the epoch, the remainder the
offset within it. Within an epoch, offsets are permuted by a keyed bijection that is computed, never stored,
so any process can compute the sample at any position without state, memory or communication.

The bijection is a Feistel network over a grid of rows x columns slightly larger than the data
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): each round shifts one coordinate by a hash
of the other. Offsets outside the data are permuted again until they are inside (cycle walking).

Changing any constant here changes the data order of every resumed run: tests compare golden values.
"""

from __future__ import annotations

import math

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
    """The index of the sample at each global position, as int64 of the same shape.

    The positions of one epoch cover every sample exactly once; each epoch has its own order.
    Raises ValueError for a negative position or a dataset without samples.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}")
    flat = np.asarray(positions, dtype=np.int64)
    if flat.size and flat.min() < 0:
        raise ValueError(f"positions must not be negative, found {flat.min()}")
    epochs, offsets = np.divmod(flat, num_samples)
    if not shuffle:
        return offsets
    shuffled = _permute(
        offsets.ravel().astype(np.uint64), epochs.ravel().astype(np.uint64), num_samples, seed
    )
    return shuffled.astype(np.int64).reshape(flat.shape)


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
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    mixed: _Words = (words ^ (words >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
