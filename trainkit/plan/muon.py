"""Divides the matrices that Muon updates among ranks, and computes what the update costs.

A rank that owns a matrix gathers it and orthogonalizes it. The trainer and the estimates use the same
division. The functions have no side effects.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from trainkit.config.training import NewtonSchulzPrecision
from trainkit.plan.feed_forward import Matrices
from trainkit.plan.launch import Layout
from trainkit.plan.model_shape import ModelShape

ITERATIONS = 5
"""Number of Newton-Schulz iterations; the published coefficients (arXiv 2502.16982) are for 5 iterations."""
ROUND_ELEMENTS = 1 << 24
"""Maximum number of elements that a rank orthogonalizes at a time, unless a single matrix has more.

Small matrices of the same shape are multiplied together, because each would leave most of a GPU idle.
"""
UNITS_PER_RANK = 4
"""Minimum number of units of experts per rank, if there are enough matrices; more units divide the work more
evenly, but each takes some time on the host."""
STATE_BYTES = 4
"""Bytes of optimizer state for each element of a matrix: the momentum, in float32."""
FLOAT32 = 4
Shape = tuple[int, int]
"""The numbers of rows and columns of a matrix."""


class Unit(NamedTuple):
    """A matrix, or the matrices of some experts in one weight, which have the same owner."""

    weight: int
    """The index of the weight among the weights of a pipeline stage."""
    first: int
    """The index of the first matrix in the weight."""
    num_matrices: int
    shape: Shape
    part: int
    num_parts: int
    """The owner is one of the ranks whose `number_of` is `part` modulo `num_parts`."""
    num_elements: int
    flops: int


@cache
def wide(shape: Shape) -> Shape:
    """Return the shape of a matrix, or of its transpose if the matrix has more rows than columns."""
    return (min(shape), max(shape))


@cache
def flops(shape: Shape) -> int:
    """Return the FLOPs of orthogonalizing a matrix: 4 m² n + 2 m³ per iteration, where m <= n."""
    m, n = wide(shape)
    return ITERATIONS * (4 * m * m * n + 2 * m**3)


def num_ranks(layout: Layout) -> int:
    """Return the number of ranks of a pipeline stage, which divide its matrices."""
    return layout.dp_replicate * layout.shards * layout.tp


def num_parts(weight: Matrices, layout: Layout) -> int:
    """Return the number of groups of ranks that have different experts of a weight, as whole or in shards.

    A group orthogonalizes its own experts, so that no other rank needs them. Without expert parallelism,
    sharding divides the experts. If some ranks then have more experts than others, all ranks are one group.
    """
    parts = layout.shards if layout.ep == 1 else layout.ep
    return parts if weight.num_experts and weight.num_experts % parts == 0 else 1


def number_of(rank: int, layout: Layout) -> int:
    """Return the number of a rank of a pipeline stage that determines its experts.

    Tensor-parallel ranks have the same experts, unless experts are divided over ranks.
    """
    return rank if layout.ep > 1 else rank // layout.tp


def num_holders(weight: Matrices, layout: Layout) -> int:
    """Return the number of ranks of a replica that hold the same shard of a weight."""
    return layout.tp if weight.num_experts and layout.ep == 1 else 1


def units_of(weights: Sequence[Matrices], layout: Layout) -> list[Unit]:
    """Return the units into which the matrices of a pipeline stage are divided, ordered by weight."""
    per_rank = sum(weight.num_experts for weight in weights) // num_ranks(layout)
    units: list[Unit] = []
    for index, weight in enumerate(weights):
        shape, parts = (weight.rows, weight.columns), num_parts(weight, layout)
        in_part = weight.num_matrices // parts
        size = max(1, min(in_part, ROUND_ELEMENTS // (shape[0] * shape[1]), per_rank // UNITS_PER_RANK))
        for part in range(parts):
            for first in range(0, in_part, size):
                count = min(size, in_part - first)
                elements, work = count * weight.rows * weight.columns, count * flops(shape)
                units.append(Unit(index, part * in_part + first, count, shape, part, parts, elements, work))
    return units


def assign_owners(units: Sequence[Unit], layout: Layout) -> list[list[int]]:
    """Return the indices of the units that each rank of a pipeline stage owns.

    Units with the fewest possible owners come first, and among these the most expensive ones. Each unit goes
    to the possible owner that has the least work so far.
    """
    order = sorted(
        range(len(units)), key=lambda index: (-units[index].flops, wide(units[index].shape), index)
    )
    loads = [0] * num_ranks(layout)
    owned: list[list[int]] = [[] for _ in loads]
    for parts in sorted({unit.num_parts for unit in units}, reverse=True):
        heaps: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
        for rank, load in enumerate(loads):
            heapq.heappush(heaps[number_of(rank, layout) % parts], (load, rank))
        for index in order:
            if (unit := units[index]).num_parts != parts:
                continue
            heap = heaps[unit.part]
            rank = heap[0][1]
            owned[rank].append(index)
            loads[rank] += unit.flops
            heapq.heapreplace(heap, (loads[rank], rank))
    return owned


def update_rounds(units: Sequence[Unit], layout: Layout) -> list[list[list[int]]]:
    """Return the rounds of an update: for each round and rank, the indices of the units to orthogonalize.

    The ranks are those of a pipeline stage. All matrices of a rank in one round have the same shape, apart
    from transposition.
    """
    batches = [_batches(units, owned) for owned in assign_owners(units, layout)]
    num_rounds = max(map(len, batches))
    return [[rank[number] if number < len(rank) else [] for rank in batches] for number in range(num_rounds)]


def exchanges(units: Sequence[Unit], members: Sequence[Sequence[int]], layout: Layout) -> bool:
    """Return whether the ranks of a replica exchange shards in a round of `update_rounds`.

    They do not if each owner has whole matrices.
    """
    num_shards = layout.shards * layout.tp
    return any(units[index].num_parts < num_shards for owned in members for index in owned)


def _batches(units: Sequence[Unit], owned: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    size = 0
    for index in owned:
        unit = units[index]
        size += unit.num_elements
        if batches and wide(units[batches[-1][0]].shape) == wide(unit.shape) and size <= ROUND_ELEMENTS:
            batches[-1].append(index)
        else:
            batches.append([index])
            size = unit.num_elements
    return batches


def block_matrices(shape: ModelShape, layer: int) -> list[Matrices]:
    """Return the matrices of a decoder block that Muon updates, in the order of the model's parameters."""
    key, query = Matrices(shape.kv_dim, shape.dim), Matrices(shape.query_dim, shape.dim)
    attention = [query, key, key, Matrices(shape.dim, shape.query_dim)]
    return attention + shape.feed_forward(layer).matrices(shape.dim)


def stage_matrices(shape: ModelShape, num_layers: int, num_dense: int) -> list[Matrices]:
    """Return the matrices of a pipeline stage that Muon updates.

    The feed-forward networks of `num_dense` of the `num_layers` blocks are as in the first block of the
    model, and the others are as in the last block.
    """
    first, last = block_matrices(shape, 0), block_matrices(shape, shape.num_layers - 1)
    return first * num_dense + last * (num_layers - num_dense)


def num_elements(weights: Sequence[Matrices], layout: Layout | None = None) -> int:
    """Return the number of elements in the shards of all ranks with the same tensor-parallel rank.

    Without a layout, the result is for one process.
    """
    layout = layout or Layout()
    return sum(weight.num_elements * num_holders(weight, layout) // layout.tp for weight in weights)


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
    num_exchanges: int
    """Number of rounds in which the ranks of a replica exchange shards."""


def update_cost(weights: Sequence[Matrices], layout: Layout, precision: NewtonSchulzPrecision) -> UpdateCost:
    """Return the cost of updating the matrices of one pipeline stage.

    The bytes sent are averages over the ranks.
    """
    units, ranks, copies = units_of(weights, layout), num_ranks(layout), layout.dp_replicate
    rounds = update_rounds(units, layout)
    work = [0] * ranks
    peak = 0
    for members in rounds:
        for rank, indices in enumerate(members):
            batch = [units[index] for index in indices]
            work[rank] += sum(unit.flops for unit in batch)
            if batch:
                count = sum(unit.num_matrices for unit in batch)
                largest = max(batch, key=lambda unit: unit.num_elements)
                receivers = num_holders(weights[largest.weight], layout)
                shard = largest.num_elements * receivers * largest.num_parts // (layout.shards * layout.tp)
                peak = max(peak, _peak_bytes(largest.shape, count, receivers, shard, precision))
    exchanged = shared = 0
    for weight in weights:
        # One rank sends a shard to the owner, but the owner sends the update to each rank that has the shard.
        receivers = num_holders(weight, layout)
        owners = layout.shards * layout.tp // num_parts(weight, layout)
        exchanged += (1 + receivers) * weight.num_elements * (owners - 1) // owners
        shared += weight.num_elements * receivers
    return UpdateCost(
        flops=max(work),
        peak_bytes=peak,
        exchanged_bytes=FLOAT32 * exchanged // ranks,
        shared_bytes=FLOAT32 * shared // ranks * (copies - 1),
        num_rounds=len(rounds),
        num_exchanges=sum(exchanges(units, members, layout) for members in rounds),
    )


@cache
def _peak_bytes(
    shape: Shape, count: int, receivers: int, shard: int, precision: NewtonSchulzPrecision
) -> int:
    """Return the peak bytes of a round, which is in the iterations, or in the update of a shard.

    In an iteration, these are a matrix [m, n], the next one, and two matrices [m, m]. In the update of a
    shard with `shard` elements, these are all shards in transit, and two intermediate results. `receivers` is
    the number of ranks that receive each element of an update.
    """
    m, n = wide(shape)
    iteration, moved = count * (2 * m * n + 2 * m * m), count * m * n * receivers + 2 * shard
    if precision == "bf16":
        return max(FLOAT32 * count * m * n + 2 * iteration, FLOAT32 * moved)
    if precision == "tf32x3":
        # A product of float32 matrices needs both halves of each matrix, and the result.
        iteration += count * (3 * m * n + 2 * m * m)
    return FLOAT32 * max(iteration, moved)
