"""Parameter counts of a rank, sharded and unsharded, and checks of host memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trainkit.cluster.machine import Machine
from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import PipelineSchedule
from trainkit.errors import Problem
from trainkit.formats import gib, memory_mib
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.plan.model_shape import ModelShape, num_params
from trainkit.plan.schedules import num_stages, stage_layers, stages_of
from trainkit.plan.step_work import optimizer_bytes

FLOAT32 = 4
MIN_UNIT_BYTES = 25 * 2**20
"""What is gathered at once has at least this many bytes in float32."""


@dataclass(frozen=True)
class StageParams:
    """The part of the model on one rank of a pipeline."""

    layers: tuple[int, ...]
    """Number of layers of each of its stages, in forward order."""
    has_embedding: bool
    has_head: bool

    @cached_property
    def num_layers(self) -> int:
        return sum(self.layers)


@lru_cache(maxsize=4096)
def stage_params(pp_rank: int, pp: int, schedule: PipelineSchedule, num_layers: int) -> StageParams:
    """The part of the model on one rank of a pipeline."""
    count = num_stages(pp, schedule)
    layers = stage_layers(num_layers, count)
    mine = stages_of(pp_rank, pp, schedule)
    return StageParams(tuple(len(layers[stage]) for stage in mine), 0 in mine, count - 1 in mine)


@dataclass(frozen=True)
class ParamCounts:
    """Parameter counts of one rank, after tensor parallelism."""

    block: int
    """Parameters of one block, unsharded."""
    block_shard: int
    """Parameters of one block on this rank, sharded."""
    ends: int
    """Parameters outside the blocks, unsharded: the embedding, the final norm and the head."""
    ends_shard: int
    """Parameters outside the blocks on this rank, sharded."""
    head: int
    """Parameters of the head, unsharded; 0 if it is on another rank."""
    embedding_unit: int
    """Parameters of the embedding if it is gathered by itself, unsharded; else 0."""
    head_unit: int
    """Parameters of the final norm and the head if they are gathered by themselves, unsharded; else 0."""
    head_unit_shard: int
    """Parameters of that unit on this rank, sharded."""

    @property
    def root(self) -> int:
        """Parameters outside the blocks that are gathered and reduced together, unsharded."""
        return self.ends - self.embedding_unit - self.head_unit

    @property
    def end_units(self) -> int:
        """Number of units outside the blocks."""
        return sum(size > 0 for size in (self.embedding_unit, self.head_unit, self.root))


@lru_cache(maxsize=4096)
def param_counts(shape: ModelShape, params: StageParams, tp: int, shards: int) -> ParamCounts:
    """Count the parameters of one rank; `shards` is the number of ranks that shard them, apart from tp."""
    block = list(_block_matrices(shape, tp))
    ends = list(_end_matrices(shape, params, tp))
    rows = shape.vocab_size // tp
    # Parallel ranks decide by the size of the whole matrix. Tied weights belong to both ends.
    is_large = FLOAT32 * shape.vocab_size * shape.dim >= MIN_UNIT_BYTES
    is_apart = is_large and not (shape.tie_embeddings and params.has_embedding and params.has_head)
    has_head_unit = is_apart and params.has_head
    return ParamCounts(
        block=sum(rows * columns for rows, columns in block),
        block_shard=sum(_shard(rows, shards) * columns for rows, columns in block),
        ends=sum(rows * columns for rows, columns in ends),
        ends_shard=sum(_shard(rows, shards) * columns for rows, columns in ends),
        head=rows * shape.dim if params.has_head else 0,
        embedding_unit=rows * shape.dim if is_apart and params.has_embedding else 0,
        head_unit=(rows + 1) * shape.dim if has_head_unit else 0,
        head_unit_shard=_shard(rows, shards) * shape.dim + _shard(shape.dim, shards) if has_head_unit else 0,
    )


@lru_cache(maxsize=4096)
def unit_blocks(shape: ModelShape, params: StageParams) -> int:
    """The number of blocks per FSDP unit."""
    block_bytes = 4 * sum(rows * columns for rows, columns in _block_matrices(shape, 1))
    return min(-(-MIN_UNIT_BYTES // block_bytes), max(params.layers))


def rank_param_counts(shape: ModelShape, params: StageParams, layout: Layout) -> ParamCounts:
    """The `param_counts` of a rank of a layout."""
    return param_counts(shape, params, layout.tp, layout.dp_shard * layout.cp)


def _block_matrices(shape: ModelShape, tp: int) -> Iterator[tuple[int, int]]:
    """(rows, columns) of every weight of a block on one of `tp` ranks."""
    dim, kv_dim, ffn_dim = shape.dim, shape.num_kv_heads * shape.head_dim, shape.ffn_dim
    yield from ((dim // tp, dim), (kv_dim // tp, dim), (kv_dim // tp, dim), (dim, dim // tp))
    yield from ((ffn_dim // tp, dim), (ffn_dim // tp, dim), (dim, ffn_dim // tp))
    yield from ((dim, 1), (dim, 1))


def _end_matrices(shape: ModelShape, params: StageParams, tp: int) -> Iterator[tuple[int, int]]:
    rows = shape.vocab_size // tp
    is_tied = shape.tie_embeddings and params.has_embedding and params.has_head
    for is_there in (params.has_embedding, params.has_head and not is_tied):
        if is_there:
            yield rows, shape.dim
    if params.has_head:
        yield shape.dim, 1


def _shard(rows: int, shards: int) -> int:
    """The number of rows on the rank with the most."""
    return -(-rows // shards)


def state_bytes(shape: ModelShape, optimizer_bytes: float) -> int:
    """The unsharded bytes of a model's weights and gradients, both float32, and optimizer state.

    `optimizer_bytes` are those of the optimizer per parameter.
    """
    return round(num_params(shape) * (2 * FLOAT32 + optimizer_bytes))


def staged_bytes(shape: ModelShape, optimizer_bytes: float, plan: LaunchPlan) -> float:
    """The bytes of host memory per node for the copies of asynchronous saves."""
    layout = plan.layout
    ranks_of_a_model = layout.dp_shard * layout.cp * layout.tp * layout.pp
    whole = num_params(shape) * (FLOAT32 + optimizer_bytes)
    return whole * plan.workers_per_node / ranks_of_a_model


def staging_problem(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, machine: Machine
) -> Problem | None:
    """The problem if a node has too little memory for asynchronous saves."""
    config = loaded.config
    need = staged_bytes(shape, optimizer_bytes(config.optimizer, shape), plan)
    if not config.checkpoint.async_save:
        return None
    if plan.slurm is None:
        key, have = "checkpoint.async", machine.memory
        value = f"is true, and this machine has {gib(have or 0)}"
    else:
        # Without resources.mem a job gets the partition's default, which is not known here.
        mib = memory_mib(config.resources.mem or "0")
        key, have = "resources.mem", None if mib is None else int(mib * 2**20)
        value = f"is {config.resources.mem}"
    if have is None or need <= have:
        return None
    message = f"{value}, but saving in the background needs {gib(need)} of memory per node"
    return loaded.problem(key, message, "checkpoint.async: false saves without copies in memory")


def host_problem(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, machine: Machine
) -> Problem | None:
    """The problem if the processes of a run on this machine need more memory than it has.

    Only the weights, gradients and optimizer state count, which the run certainly needs: running out of
    memory would also take down other processes.
    """
    state = state_bytes(shape, optimizer_bytes(loaded.config.optimizer, shape)) * plan.layout.dp_replicate
    if not plan.is_here:
        state //= plan.num_nodes  # the others are other machines
    if plan.slurm is not None or machine.memory is None or state <= machine.memory:
        return None
    what = f"is {loaded.config.model.preset}: weights, gradients and optimizer state take {gib(state)}"
    message = f"{what}, but this machine has {gib(machine.memory)}"
    return loaded.problem(
        "model.preset", message, "`trainkit plan --gpus N --gpu-type T` shows what would fit"
    )
