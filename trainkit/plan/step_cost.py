"""Estimates the step time of a layout, and how much data its GPUs exchange.

The times are accurate enough to rank layouts, but not to predict the actual step time. The functions have no
side effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainkit.plan.gpus import Gpu
from trainkit.plan.memory import FLOAT32, RankParams, muon_cost, rank_params, stream_bytes
from trainkit.plan.muon import UpdateCost
from trainkit.plan.step_work import DEFERRED_WEIGHT_GRADS, IMBALANCE, StepWork, bubble_fraction, compiles

Kind = Literal["gather", "scatter", "reduce", "exchange", "share", "tp", "cp", "ep", "pp"]
OF_UPDATE: tuple[Kind, ...] = ("exchange", "share")
DATA_PARALLEL: tuple[Kind, ...] = ("gather", "scatter", "reduce", *OF_UPDATE)
INSIDE: tuple[Kind, ...] = ("tp", "cp", "ep", "pp")
"""Kinds of communication on which the computation of a pass waits."""


@dataclass(frozen=True)
class Flow:
    """The data that one GPU sends in one optimizer step for one kind of communication."""

    kind: Kind
    """``gather`` is the all-gather of parameters, ``scatter`` the reduce-scatter of gradients across shards,
    and ``reduce`` the all-reduce of gradients across replicas. In an update with Muon, ``exchange`` gathers
    the matrices and returns their updates, and ``share`` sends the updates to other replicas. For all other
    kinds, the GPU sends activations and their gradients."""
    num_bytes: int
    calls: int
    """Number of collective calls per step."""
    ranks: int
    """Number of ranks in the process group."""
    stride: int
    """Difference between consecutive rank numbers in the process group."""

    def crosses_nodes(self, node_size: int) -> bool:
        """Return whether the process group spans several nodes."""
        return self.ranks * self.stride > node_size

    def ranks_of_a_node(self, node_size: int) -> int:
        """Return how many of the process group's ranks are on one node and share its external links."""
        return min(self.ranks, max(1, node_size // self.stride))


def traffic(work: StepWork) -> list[Flow]:
    """Return all communication of one GPU in one optimizer step."""
    flows = [*_weights(work), *_activations(work), *_update(work)]
    return [flow for flow in flows if flow.ranks > 1 and flow.num_bytes]


def _weights(work: StepWork) -> Iterator[Flow]:
    """Yield the all-gathers of parameters, and the gradient reductions across shards and across replicas.

    Parameters are gathered, and gradients reduced, once per pass or, in a pipeline, once per step. ZeRO-3
    gathers parameters for the forward pass and again for the backward pass, but the head only once. ZeRO-2
    gathers parameters once per step.
    """
    params, layout, shards, copies = _params(work, 0), work.layout, work.shards, work.layout.dp_replicate
    passes = 1 if layout.pp > 1 else work.passes_per_step
    again = work.block_itemsize * (params.blocks - params.experts) + work.itemsize * params.embedding
    head, heads = work.itemsize * params.head, int(params.head > 0)
    units = params.num_layers + (params.embedding > 0)
    times, gathers = (1, 1) if work.keeps_gathered else (2, passes)
    sent = gathers * (again * times + head) * (shards - 1)
    yield Flow("gather", sent // shards, gathers * (units * times + heads), shards, layout.tp)
    same, calls = FLOAT32 * (params.gathered - params.experts), units + heads
    yield Flow("scatter", passes * same * (shards - 1) // shards, passes * calls, shards, layout.tp)
    if layout.ep > 1:
        # The experts of each layer are units of their own, sharded over fewer ranks.
        group = layout.expert_shards, layout.ep
        share, units = (group[0] - 1) / group[0], params.num_layers - params.num_dense
        sent = gathers * times * work.block_itemsize * params.experts
        yield Flow("gather", round(sent * share), gathers * times * units, *group)
        yield Flow("scatter", round(passes * FLOAT32 * params.experts * share), passes * units, *group)
        calls += units
    whole = FLOAT32 * params.whole
    sent = 2 * (whole // shards) * (copies - 1) // copies
    yield Flow("reduce", sent, calls, copies, layout.tp * layout.cp * layout.dp_shard)


def _activations(work: StepWork) -> Iterator[Flow]:
    layout, shape, params = work.layout, work.shape, _params(work, 0)
    mode, block_passes = work.parallel.activation_checkpointing, params.num_layers * work.passes_per_step
    stream = work.tokens_per_pass * work.itemsize * shape.dim
    # Attention and feed-forward each gather their input and reduce their output, in both the forward and the
    # backward pass. Recomputation gathers the inputs of attention and feed-forward again. Reduced outputs are
    # saved, so recomputation does not reduce them again, except for the attention output with `full`.
    calls = {"none": 8, "pointwise": 10, "selective": 10, "full": 11}[mode] * block_passes
    yield Flow("tp", calls * stream * (layout.tp - 1) // layout.tp, calls, layout.tp, 1)
    keys = work.tokens_per_pass * work.itemsize * 2 * shape.kv_dim // layout.tp
    calls = (2 if mode == "none" else 3) * block_passes
    yield Flow("cp", calls * keys * (layout.cp - 1), calls, layout.cp, layout.tp)
    if layout.ep > 1 and shape.moe is not None:
        # Rows and outputs are exchanged in the forward pass, their gradients in the backward pass, and rows
        # and outputs again if the whole block is recomputed. An exchange of numbers of rows precedes both.
        passes = (params.num_layers - params.num_dense) * work.passes_per_step
        times, numbers = (6, 2) if mode == "full" else (4, 1)
        rows = work.tokens_per_pass // layout.tp * shape.moe.top_k * work.itemsize * shape.dim
        sent = passes * times * rows * (layout.ep - 1) // layout.ep
        yield Flow("ep", sent, passes * (times + numbers), layout.ep, 1)
    calls = 2 * len(params.layers) * work.passes_per_step
    sent = calls * work.tokens_per_pass * stream_bytes(work)
    yield Flow("pp", sent, calls, layout.pp, layout.world_size // layout.pp)


def _update(work: StepWork) -> Iterator[Flow]:
    """Yield the communication of an update with Muon, which needs whole matrices."""
    cost, layout = _muon_cost(work), work.layout
    if cost is not None:
        num_shards, copies = work.shards * layout.tp, layout.dp_replicate
        yield Flow("exchange", cost.exchanged_bytes, 2 * cost.num_exchanges, num_shards, 1)
        yield Flow("share", cost.shared_bytes, cost.num_rounds * copies, copies, num_shards)


def _muon_cost(work: StepWork) -> UpdateCost | None:
    """Return the cost of Muon's update in the pipeline stage with the most layers."""
    pp = work.layout.pp
    costs = (muon_cost(work, rank) for rank in sorted({0, pp // 2, pp - 1}))
    return max((cost for cost in costs if cost is not None), key=lambda cost: cost.flops, default=None)


def _params(work: StepWork, pp_rank: int) -> RankParams:
    return rank_params(work.shape, work.layout, work.parallel.pp_schedule, pp_rank)


EFFICIENCY = 0.6
"""Fraction of a GPU's peak FLOP/s that large matrix products reach. Llama 3 (arXiv 2407.21783) reports 38 to
43 % for training as a whole; single GPUs reach 58 %, including overhead."""
FILL = 128
"""Matrix size at which efficiency is halved, which is about a kernel's tile size."""
FLOAT32_SHARE = 1 / 16
"""Peak float32 FLOP/s as a fraction of the 16-bit peak, on data-center GPUs."""
NEWTON_SCHULZ_SHARES = {"fp32": FLOAT32_SHARE, "tf32x3": 1 / 6, "bf16": 1.0}
"""Peak FLOP/s of Muon's iterations as a fraction of the 16-bit peak; TF32 has half of the 16-bit peak, and
``tf32x3`` computes three products for one."""
UNKNOWN_PEAK = 300e12
"""FLOP/s assumed for a GPU whose peak is unknown; the assumption is harmless because only relative times are
shown."""
INTERFERENCE = 0.1
"""Minimum fraction of communication that cannot be hidden, because communication takes SMs and memory
bandwidth away from computation."""
MATRICES = 7
"""Number of matrices in a block."""
HOP_S = {"node": 2e-6, "network": 6e-6}
"""Latency in seconds per message between two ranks; in a ring, n ranks send n - 1 messages in sequence."""


@dataclass(frozen=True)
class Cost:
    """The estimated time of an optimizer step, split into computation and communication."""

    compute_s: float
    """Compute time in seconds of the rank with the most work, excluding recomputation."""
    recompute_s: float
    exposed_s: dict[str, float]
    """Maps each kind of parallelism to its seconds of communication that do not overlap with computation."""
    bubble: float
    """Fraction of the step during which a pipeline rank is idle."""
    flows: tuple[Flow, ...]
    update_s: float = 0.0
    """Seconds that Muon's iterations take on the rank that owns the most matrices."""

    @cached_property
    def step_s(self) -> float:
        """Return the seconds per optimizer step."""
        inside = self.compute_s + self.recompute_s
        inside += sum(self.exposed_s[kind] for kind in INSIDE)
        return inside / (1 - self.bubble) + self.exposed_s["dp"] + self.update_s

    @property
    def sent(self) -> dict[str, int]:
        """Return the bytes that a GPU sends per step, keyed by kind of parallelism."""
        sums: dict[str, int] = dict.fromkeys(("dp", *INSIDE), 0)
        for flow in self.flows:
            sums["dp" if flow.kind in DATA_PARALLEL else flow.kind] += flow.num_bytes
        return sums

    def crossing(self, node_size: int) -> tuple[str, ...]:
        """Return the kinds of parallelism that communicate across nodes."""
        kinds = {flow.kind for flow in self.flows if flow.crosses_nodes(node_size)}
        found = {"dp" if kind in DATA_PARALLEL else kind for kind in kinds}
        return tuple(kind for kind in ("dp", *INSIDE) if kind in found)


def cost_of(work: StepWork, gpu: Gpu, node_size: int) -> Cost:
    """Estimate the cost of a step on nodes that have `node_size` GPUs each."""
    compute_s = _compute_s(work, gpu)
    recompute_s = compute_s * recompute_share(work)
    flows = traffic(work)
    seconds: dict[str, float] = dict.fromkeys((*DATA_PARALLEL, *INSIDE), 0.0)
    for flow in flows:
        seconds[flow.kind] += _seconds(flow, gpu, node_size)
    exposed: dict[str, float] = {kind: seconds[kind] for kind in INSIDE}
    if work.layout.pp > 1:
        # In a pipeline, parameters are gathered before the schedule starts, and gradients are reduced after
        # the schedule finishes.
        exposed["dp"] = sum(seconds[kind] for kind in DATA_PARALLEL)
    else:
        # All-gathers overlap with a whole pass, reduce-scatters with the backward pass, and the all-reduce
        # across replicas only with the last backward pass.
        passes, passes_s = work.passes_per_step, compute_s + recompute_s
        backward_s, scatter_s = passes_s * 2 / 3 / passes, seconds["scatter"] / passes
        exposed["dp"] = _exposed(seconds["gather"], passes_s)
        exposed["dp"] += (passes - 1) * _exposed(scatter_s, backward_s)
        exposed["dp"] += _exposed(scatter_s + seconds["reduce"], backward_s)
        exposed["dp"] += sum(seconds[kind] for kind in OF_UPDATE)
    bubble = bubble_fraction(work.parallel.pp_schedule, work.layout.pp, work.passes_per_step)
    return Cost(compute_s, recompute_s, exposed, bubble, tuple(flows), _update_s(work, gpu))


def _update_s(work: StepWork, gpu: Gpu) -> float:
    """Return the seconds of Muon's iterations; the forward and backward passes hide none of this time."""
    cost = _muon_cost(work)
    if work.muon is None or cost is None:
        return 0.0
    return cost.flops / ((gpu.peak_flops or UNKNOWN_PEAK) * NEWTON_SCHULZ_SHARES[work.muon] * EFFICIENCY)


def _exposed(seconds: float, hidden_by_s: float) -> float:
    return max(seconds - hidden_by_s, INTERFERENCE * seconds)


def recompute_share(work: StepWork) -> float:
    """Return the time spent on recomputing matrix products as a fraction of a step's compute time.

    A forward pass takes a third of the compute time. ``selective`` recomputes every second matrix product,
    namely wk, wo and up. ``pointwise`` recomputes only the wo of tensor-parallel ranks, which keep the
    reduced result; compiled blocks do not need the product again. If weight gradients are deferred, torch
    recomputes a block for the input gradients and again for each weight gradient.
    """
    mode, shape = work.parallel.activation_checkpointing, work.shape
    if mode == "none":
        return 0.0
    if mode == "full":
        is_apart = work.recomputes_for_weights and work.parallel.pp_schedule in DEFERRED_WEIGHT_GRADS
        num_weights = MATRICES + shape.norms_per_block + (2 if shape.qk_norm else 0)
        return (1 + num_weights) / 3 if is_apart else 1 / 3
    attention = shape.kv_dim + shape.query_dim
    kind = shape.feed_forward(shape.num_layers - 1)
    if mode == "selective":
        again = attention + kind.recomputed()
    else:
        is_repeated = work.layout.tp > 1 and not compiles(work.parallel, work.layout, work.device)
        again = shape.query_dim if is_repeated else 0
    return again / (2 * attention + 3 * kind.hidden) / 3


def rank_flops(work: StepWork, pp_rank: int) -> float:
    """Return the FLOPs of one rank per step, from ``6 N + 12 L h T`` per token (arXiv 2204.02311).

    N excludes the experts that do not process a token. Tensor-parallel ranks are assumed to divide the work
    of experts, as they do with sequence parallelism. With sliding windows, T is `ModelShape.attended`, except
    that context-parallel ranks also compute the scores outside of the windows.
    """
    shape, layout = work.shape, work.layout
    attended = shape.attended(work.seq_len) if layout.cp == 1 else work.seq_len
    params, dim = _params(work, pp_rank), shape.dim
    kinds = (
        (shape.feed_forward(0), params.num_dense),
        (
            shape.feed_forward(shape.num_layers - 1),
            params.num_layers - params.num_dense,
        ),
    )
    # The ranks wait for the rank that has the most rows.
    blocks = 6 * sum(
        kind.active_params(dim) * number * (IMBALANCE if work.divides(kind) else 1) for kind, number in kinds
    )
    attention = 12 * dim * (shape.query_dim + shape.kv_dim) + 12 * shape.query_dim * attended
    head = 6 * dim * shape.vocab_size if params.head else 0
    tokens = work.tokens_per_pass * work.passes_per_step
    return tokens * (blocks + attention * params.num_layers + head) / layout.tp


def _compute_s(work: StepWork, gpu: Gpu) -> float:
    peak = gpu.peak_flops or UNKNOWN_PEAK
    if work.dtype == "fp32":
        peak *= FLOAT32_SHARE
    rows, columns = work.tokens_per_pass, work.shape.dim / work.layout.tp
    filled = rows / (rows + FILL) * columns / (columns + FILL)
    pp = work.layout.pp
    most = max(rank_flops(work, rank) for rank in sorted({0, pp // 2, pp - 1}))
    return most / (peak * EFFICIENCY * filled)


def _seconds(flow: Flow, gpu: Gpu, node_size: int) -> float:
    """Return the seconds that one kind of communication takes on the slowest link it uses."""
    if flow.kind == "pp":
        # Pipeline sends are point-to-point, so the ranks on a node cannot share a transfer as they do in a
        # collective.
        far = flow.crosses_nodes(node_size)
        return flow.num_bytes / (gpu.network_bandwidth if far else gpu.node_bandwidth)
    if flow.kind == "ep":
        # All ranks exchange rows at once, and each rank sends its rows for other nodes over its own link.
        share = (flow.ranks - flow.ranks_of_a_node(node_size)) / (flow.ranks - 1)
        latency_s = flow.calls * HOP_S["network" if share else "node"]
        inside_s = flow.num_bytes * (1 - share) / gpu.node_bandwidth
        return IMBALANCE * max(inside_s, flow.num_bytes * share / gpu.network_bandwidth) + latency_s
    if not flow.crosses_nodes(node_size):
        return flow.num_bytes / gpu.node_bandwidth + flow.calls * (flow.ranks - 1) * HOP_S["node"]
    together = flow.ranks_of_a_node(node_size)
    bandwidth = min(gpu.node_bandwidth, gpu.network_bandwidth * together)
    hops = -(-flow.ranks // together) - 1
    return flow.num_bytes / bandwidth + flow.calls * hops * HOP_S["network"]
