"""How many parameters a rank has, whole and split. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

from trainkit.config.running import PipelineSchedule
from trainkit.frozen import dataclass
from trainkit.plan.launch import Layout
from trainkit.plan.model_shape import ModelShape
from trainkit.plan.pipeline import num_stages, stage_layers, stages_of

MIN_UNIT_BYTES = 25 * 2**20
"""Blocks are gathered in groups of at least so many bytes of float32."""


@dataclass(frozen=True)
class Held:
    """What of the model one rank of a pipeline has."""

    layers: tuple[int, ...]
    """Layers of each of its stages, in the order in which a microbatch meets them."""
    has_embedding: bool
    has_head: bool

    @cached_property
    def num_layers(self) -> int:
        return sum(self.layers)


@lru_cache(maxsize=4096)
def held_by(pp_rank: int, pp: int, schedule: PipelineSchedule, num_layers: int) -> Held:
    """The part of a model that one rank of a pipeline has."""
    count = num_stages(pp, schedule)
    layers = stage_layers(num_layers, count)
    mine = stages_of(pp_rank, pp, schedule)
    return Held(tuple(len(layers[stage]) for stage in mine), 0 in mine, count - 1 in mine)


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of one rank, after tensor parallelism."""

    block: int
    """Of one block."""
    block_shard: int
    """Of one block, when it is sharded."""
    root: int
    """Of embedding, head and last norm: what is gathered as one, first of all and last of all."""
    root_shard: int
    head: int
    """Of the head, 0 where it is on another rank."""


@lru_cache(maxsize=4096)
def counts(shape: ModelShape, held: Held, tp: int, shards: int) -> Counts:
    """The parameters that a rank holds, works with, and gathers."""
    block = list(_block_matrices(shape, tp))
    root = list(_root_matrices(shape, held, tp))
    head = shape.vocab_size // tp * shape.dim if held.has_head else 0
    return Counts(
        block=sum(rows * columns for rows, columns in block),
        block_shard=sum(_shard(rows, shards) * columns for rows, columns in block),
        root=sum(rows * columns for rows, columns in root),
        root_shard=sum(_shard(rows, shards) * columns for rows, columns in root),
        head=head,
    )


@lru_cache(maxsize=4096)
def unit_blocks(shape: ModelShape, held: Held) -> int:
    """How many blocks are gathered together; what is left over belongs to the root."""
    block_bytes = 4 * sum(rows * columns for rows, columns in _block_matrices(shape, 1))
    return min(-(-MIN_UNIT_BYTES // block_bytes), max(held.layers))


def local_counts(shape: ModelShape, held: Held, layout: Layout) -> Counts:
    """`counts` of a rank of a layout."""
    return counts(shape, held, layout.tp, layout.dp_shard * layout.cp)


def _block_matrices(shape: ModelShape, tp: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of every weight of a block on one of `tp` ranks."""
    dim, kv_dim, ffn_dim = shape.dim, shape.num_kv_heads * shape.head_dim, shape.ffn_dim
    yield from ((dim // tp, dim), (kv_dim // tp, dim), (kv_dim // tp, dim), (dim, dim // tp))
    yield from ((ffn_dim // tp, dim), (ffn_dim // tp, dim), (dim, ffn_dim // tp))
    yield from ((dim, 1), (dim, 1))


def _root_matrices(shape: ModelShape, held: Held, tp: int) -> Iterator[tuple[int, int]]:
    rows = shape.vocab_size // tp
    is_tied = shape.tie_embeddings and held.has_embedding and held.has_head
    for is_there in (held.has_embedding, held.has_head and not is_tied):
        if is_there:
            yield rows, shape.dim
    if held.has_head:
        yield shape.dim, 1


def _shard(rows: int, shards: int) -> int:
    """The rows of the rank that has most."""
    return -(-rows // shards)
