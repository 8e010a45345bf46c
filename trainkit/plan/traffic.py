"""What a GPU sends in a step, by kind of parallelism, and how far it has to go. Pure.

Collectives are counted as rings do them: of n ranks each sends (n - 1) / n of what is gathered or scattered,
and twice that for an all-reduce (arXiv 1909.08053, 1910.02054, 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from trainkit.frozen import dataclass
from trainkit.plan.activations import stream_bytes
from trainkit.plan.weights import held_by, local_counts, unit_blocks
from trainkit.plan.workload import Workload

Kind = Literal["gather", "scatter", "reduce", "tp", "cp", "pp"]
DATA_PARALLEL: tuple[Kind, ...] = ("gather", "scatter", "reduce")
FLOAT32 = 4


@dataclass(frozen=True)
class Flow:
    """What one GPU sends for one purpose in one optimizer step."""

    kind: Kind
    """``gather``: parameters; ``scatter``: gradients, over shards; ``reduce``: over copies; tp, cp, pp:
    activations and their gradients."""
    num_bytes: int
    calls: int
    """In so many collectives."""
    ranks: int
    """Between so many ranks."""
    stride: int
    """Of which one is so many ranks away from the next."""

    def crosses_nodes(self, node_size: int) -> bool:
        """Whether some of it goes over the network."""
        return self.ranks * self.stride > node_size

    def ranks_of_a_node(self, node_size: int) -> int:
        """How many of the ranks are neighbours, and so share the way to other nodes."""
        return min(self.ranks, max(1, node_size // self.stride))


def traffic(work: Workload) -> list[Flow]:
    """Everything that a GPU in the middle of things sends in one step."""
    flows = [*_parameters(work), *_gradients(work), *_activations(work)]
    return [flow for flow in flows if flow.ranks > 1 and flow.num_bytes]


def sent_by_kind(flows: list[Flow]) -> dict[str, int]:
    """Bytes by parallelism: dp, tp, cp, pp."""
    sums = dict.fromkeys(("dp", "tp", "cp", "pp"), 0)
    for flow in flows:
        sums["dp" if flow.kind in DATA_PARALLEL else flow.kind] += flow.num_bytes
    return sums


def _parameters(work: Workload) -> Iterator[Flow]:
    """ZeRO-3 gathers parameters for the forward and for the backward pass, ZeRO-2 once."""
    blocks, root, units = _weights(work)
    layout, shards = work.layout, work.shards
    passes = 1 if layout.pp > 1 else work.passes_per_step
    times = passes * (1 if work.keeps_gathered else 2)
    sent = work.itemsize * (blocks * times + root * passes) * (shards - 1) // shards
    yield Flow("gather", sent, units * times + passes, shards, layout.tp)


def _gradients(work: Workload) -> Iterator[Flow]:
    """Scattered over shards with every pass, by a pipeline once; summed over copies once a step."""
    blocks, root, units = _weights(work)
    layout, shards, copies = work.layout, work.shards, work.layout.dp_replicate
    whole = FLOAT32 * (blocks + root)
    passes = 1 if layout.pp > 1 else work.passes_per_step
    yield Flow("scatter", passes * whole * (shards - 1) // shards, passes * (units + 1), shards, layout.tp)
    sent = 2 * (whole // shards) * (copies - 1) // copies
    yield Flow("reduce", sent, units + 1, copies, layout.tp * layout.cp * layout.dp_shard)


def _activations(work: Workload) -> Iterator[Flow]:
    layout, shape = work.layout, work.shape
    held = held_by(0, layout.pp, work.parallel.pp_schedule, shape.num_layers)
    block_passes = held.num_layers * work.passes_per_step
    again = work.parallel.activation_checkpointing != "none"
    stream = work.tokens_at_once * work.itemsize * shape.dim
    # Attention and feed-forward network are gathered before and reduced after, forward and backward.
    reductions = 6 if again else 4
    sent = 2 * reductions * block_passes * stream * (layout.tp - 1) // layout.tp
    yield Flow("tp", sent, 2 * reductions * block_passes, layout.tp, 1)
    keys = work.tokens_at_once * work.itemsize * 2 * shape.num_kv_heads * shape.head_dim // layout.tp
    exchanges = 3 if again else 2
    sent = exchanges * block_passes * keys * (layout.cp - 1)
    yield Flow("cp", sent, exchanges * block_passes, layout.cp, layout.tp)
    stages = len(held.layers)
    sent = 2 * stages * work.passes_per_step * work.tokens_at_once * stream_bytes(work)
    calls = 2 * stages * work.passes_per_step
    yield Flow("pp", sent, calls, layout.pp, layout.world_size // layout.pp)


def _weights(work: Workload) -> tuple[int, int, int]:
    """Parameters of the first rank's blocks and of its root before sharding, and its number of units."""
    layout = work.layout
    held = held_by(0, layout.pp, work.parallel.pp_schedule, work.shape.num_layers)
    found = local_counts(work.shape, held, layout)
    units = -(-held.num_layers // unit_blocks(work.shape, held))
    return found.block * held.num_layers, found.root, units
