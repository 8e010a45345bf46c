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
    """The cost of updating the matrices of one pipeline stage, on the rank where each number is highest."""

    flops: int
    """FLOPs of the matrices that a rank owns."""
    peak_bytes: int
    """Bytes of gathered matrices, shards in transit and intermediate results."""
    exchanged_bytes: int
    """Bytes that a rank sends to the other ranks of its replica: directions and updates."""
    shared_bytes: int
    """Bytes of updates that a rank sends to the other replicas."""
    num_rounds: int


def update_cost(
    shapes: Sequence[Shape], num_shards: int, num_replicas: int, precision: NewtonSchulzPrecision
) -> UpdateCost:
    """Return the cost of an update on `num_replicas` replicas of a stage, each split over `num_shards` ranks.

    The bytes sent are averages over the ranks.
    """
    num_ranks = num_shards * num_replicas
    rounds, total = update_rounds(shapes, num_ranks), num_elements(shapes)
    work = [0] * num_ranks
    peak = 0
    for members in rounds:
        for rank, batch in enumerate(members):
            work[rank] += sum(flops(shapes[index]) for index in batch)
            if batch:
                peak = max(peak, _peak_bytes(shapes[batch[0]], len(batch), num_shards, precision))
    shard = FLOAT32 * total // num_shards
    return UpdateCost(
        flops=max(work),
        peak_bytes=peak,
        exchanged_bytes=2 * shard * (num_shards - 1) // num_ranks,
        shared_bytes=shard * (num_replicas - 1) // num_replicas,
        num_rounds=len(rounds),
    )


def _peak_bytes(shape: Shape, batch: int, num_shards: int, precision: NewtonSchulzPrecision) -> int:
    """Return the peak bytes of a round, which is in the iterations, or in the update of a shard.

    In an iteration, these are a matrix [m, n], the next one, and two matrices [m, m]. In the update of a
    shard, these are all shards in transit, and two intermediate results.
    """
    m, n = wide(shape)
    iteration, moved = batch * (2 * m * n + 2 * m * m), batch * m * n + 2 * m * n // num_shards
    if precision == "bf16":
        return max(FLOAT32 * batch * m * n + 2 * iteration, FLOAT32 * moved)
    if precision == "tf32x3":
        # A product of float32 matrices needs both halves of each matrix, and the result.
        iteration += batch * (3 * m * n + 2 * m * m)
    return FLOAT32 * max(iteration, moved)
