"""Divides the matrices that Muon updates among ranks, and computes what the update costs.

A rank that owns a matrix gathers it and orthogonalizes it. The trainer and the estimates use the same
division. The functions have no side effects.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from trainkit.config.training import NewtonSchulzPrecision
from trainkit.plan.model_shape import ModelShape

ITERATIONS = 5
"""Number of Newton-Schulz iterations; the published coefficients (arXiv 2502.16982) are for 5 iterations."""
ROUND_ELEMENTS = 1 << 24
"""Maximum number of elements that a rank orthogonalizes at a time, unless a single matrix has more.

Small matrices of the same shape are multiplied together, because each would leave most of a GPU idle.
"""
STATE_BYTES = 4
"""Bytes of optimizer state for each element of a matrix: the momentum, in float32."""
FLOAT32 = 4
Shape = tuple[int, int]
"""The numbers of rows and columns of a matrix."""


def wide(shape: Shape) -> Shape:
    """Return the shape of a matrix, or of its transpose if the matrix has more rows than columns."""
    return (min(shape), max(shape))


def flops(shape: Shape) -> int:
    """Return the FLOPs of orthogonalizing a matrix: 4 m² n + 2 m³ per iteration, where m <= n."""
    m, n = wide(shape)
    return ITERATIONS * (4 * m * m * n + 2 * m**3)


def assign_owners(shapes: Sequence[Shape], num_ranks: int) -> list[list[int]]:
    """Return the indices of the matrices that each rank owns, with the most expensive matrices first.

    Each matrix goes to the rank that has the least work so far.
    """
    order = sorted(range(len(shapes)), key=lambda index: (-flops(shapes[index]), wide(shapes[index]), index))
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in order:
        load, rank = loads[0]
        owned[rank].append(index)
        heapq.heapreplace(loads, (load + flops(shapes[index]), rank))
    return owned


def update_rounds(shapes: Sequence[Shape], num_ranks: int) -> list[list[list[int]]]:
    """Return the rounds of an update: for each round and rank, the indices of the matrices to orthogonalize.

    All matrices of a rank in one round have the same shape, apart from transposition.
    """
    batches = [_batches(shapes, owned) for owned in assign_owners(shapes, num_ranks)]
    num_rounds = max(map(len, batches))
    return [[rank[number] if number < len(rank) else [] for rank in batches] for number in range(num_rounds)]


def _batches(shapes: Sequence[Shape], owned: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in owned:
        m, n = wide(shapes[index])
        last = batches[-1] if batches else []
        if last and wide(shapes[last[0]]) == (m, n) and (len(last) + 1) * m * n <= ROUND_ELEMENTS:
            last.append(index)
        else:
            batches.append([index])
    return batches


def block_matrices(shape: ModelShape) -> list[Shape]:
    """Return the shapes of the matrices of a decoder block that Muon updates, in the order of the model."""
    attention = [(shape.query_dim, shape.dim), *[(shape.kv_dim, shape.dim)] * 2, (shape.dim, shape.query_dim)]
    return [*attention, *[(shape.ffn_dim, shape.dim)] * 2, (shape.dim, shape.ffn_dim)]


def num_elements(shapes: Sequence[Shape]) -> int:
    """Return the total number of elements of matrices."""
    return sum(rows * columns for rows, columns in shapes)


class UpdateCost(NamedTuple):
    """The cost of updating the matrices of one pipeline stage, for the rank for which it is highest."""

    flops: int
    """FLOPs of the matrices that a rank owns."""
    peak_bytes: int
    """Bytes of gathered matrices and of the intermediate results of the iterations."""
    exchanged_bytes: int
    """Bytes that a rank sends to the ranks that hold the other shards: directions, then updates."""
    shared_bytes: int
    """Bytes of updates that a rank sends to other replicas."""
    num_rounds: int


def update_cost(
    shapes: Sequence[Shape], num_shards: int, num_replicas: int, precision: NewtonSchulzPrecision
) -> UpdateCost:
    """Return the cost of an update on `num_replicas` replicas of a stage, each split over `num_shards` ranks.

    Bytes sent are the mean over the ranks.
    """
    num_ranks = num_shards * num_replicas
    rounds, total = update_rounds(shapes, num_ranks), num_elements(shapes)
    work = [0] * num_ranks
    peak = 0
    for members in rounds:
        for rank, batch in enumerate(members):
            work[rank] += sum(flops(shapes[index]) for index in batch)
            if batch:
                peak = max(peak, len(batch) * _peak_bytes(wide(shapes[batch[0]]), precision))
    shard = FLOAT32 * total // num_shards
    return UpdateCost(
        flops=max(work),
        peak_bytes=peak,
        exchanged_bytes=2 * shard * (num_shards - 1) // num_ranks,
        shared_bytes=shard * (num_replicas - 1) // num_replicas,
        num_rounds=len(rounds),
    )


def _peak_bytes(shape: Shape, precision: NewtonSchulzPrecision) -> int:
    """Return the peak bytes of one iteration: a matrix [m, n], the next one, and two matrices [m, m]."""
    m, n = shape
    iterate = 2 * m * n + 2 * m * m
    if precision == "bf16":
        return FLOAT32 * m * n + 2 * iterate
    if precision == "tf32x3":
        # Each operand of a product is split in two, and the products are added to the result.
        iterate += 3 * m * n + 2 * m * m
    return FLOAT32 * iterate
