"""Data parallelism: `replicate` if every rank has the whole model, `fully_shard` if the model is sharded.

Replicas on CPUs are not wrapped; `HostReduction` averages their gradients during the backward pass.
`replicate` uses device streams to overlap communication with the backward pass. CPUs have no streams, so with
`replicate` the backward pass would block on the network. `HostReduction` uses gloo's threads, which
communicate during the backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from trainkit.config.running import ParallelConfig
from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import World
from trainkit.trainer.forward_backward import GradientSwitch
from trainkit.trainer.metrics import LocalGradient
from trainkit.trainer.models.linear import Linear
from trainkit.trainer.models.model import Model
from trainkit.trainer.parallel.expert import shard_experts
from trainkit.trainer.torch_private import after_backward, replicate

# With tensor parallelism, a block's output is a view of a DTensor. torch's warning about such a view is
# harmless, because no code modifies the output in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
# Recent torch releases have renamed the collectives that FSDP calls, and warn on each rank about the old
# names.
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning
)

T = TypeVar("T")
MIN_UNIT_BYTES = 25 * 2**20
"""Minimum size of a sharding unit in bytes; for smaller units, the added latency outweighs the gain from
overlapping communication."""


def communication_units(blocks: list[nn.Module], min_bytes: int) -> list[list[nn.Module]]:
    """Group consecutive blocks into sharding units, each with at least `min_bytes` of parameters.

    Leftover blocks at the end of the list belong to no unit. Leftover blocks stay in the root module,
    together with the embedding and the head.
    """
    return [
        unit for unit in _groups(blocks, _num_bytes, min_bytes) if sum(map(_num_bytes, unit)) >= min_bytes
    ]


def _groups(items: Iterable[T], num_bytes: Callable[[T], int], min_bytes: int) -> list[list[T]]:
    """Split items into consecutive groups of at least `min_bytes`; the last group may be smaller."""
    groups: list[list[T]] = []
    size = min_bytes
    for item in items:
        if size >= min_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += num_bytes(item)
    return groups


def end_units(model: Model, min_bytes: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules in the model's `ends` to shard as separate units, excluding small and tied modules.

    If an embedding is a unit of its own, its parameters need not stay gathered while the blocks compute. If a
    head is a unit of its own, its gradient is reduced during the backward pass of the blocks.
    """
    params = [param for modules in model.ends for module in modules for param in module.parameters()]
    if len(params) != len(set(params)):
        return [], []
    first, last = (modules if sum(map(_num_bytes, modules)) >= min_bytes else [] for modules in model.ends)
    return first, last


def _num_bytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return a policy that computes in `dtype` and reduces gradients in float32.

    The policy casts no inputs, because activations already have the compute dtype and RoPE tables must stay
    float32.
    """
    if dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def apply_data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    dtype: torch.dtype,
    *,
    layers: list[nn.Module] | None = None,
    float32: Sequence[nn.Module] = (),
    zero: int = 3,
    offload: bool = False,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Wrap the model in place, so that gradients are averaged across data-parallel ranks.

    The average includes context-parallel ranks, because each of these ranks has only the gradient for its
    slice of the sequence. Even a model on a single rank is wrapped, because the wrapper also casts the
    parameters. `layers` are grouped into sharding units; the default is the `layers` and `ends` of a `Model`.
    Modules in `float32` are not cast. With `expert_mesh`, the `Experts` of each layer are units of their own.
    """
    policy, whole = mixed_precision(dtype), mixed_precision(torch.float32)
    first: list[nn.Module] = []
    last: list[nn.Module] = []
    if layers is None:
        assert isinstance(model, Model)
        layers, (first, last) = model.layers, end_units(model, MIN_UNIT_BYTES)
    units = communication_units(layers, MIN_UNIT_BYTES)
    if layout.shards == 1 and layout.dp_replicate > 1 and not offload and expert_mesh is None:
        replicate_mesh = mesh["dp_replicate"]
        for module in float32:
            replicate(module, replicate_mesh, whole)
        for unit in units:
            for block in unit:
                replicate(block, replicate_mesh, policy)
        for module in (*first, *last):
            if _num_bytes(module) >= MIN_UNIT_BYTES:  # small modules such as norms stay in the root module
                replicate(module, replicate_mesh, policy)
        replicate(model, replicate_mesh, policy)
        return
    shard = partial(
        fully_shard,
        mesh=mesh["dp_shard"] if layout.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"],
        mp_policy=policy,
        # Do not reshard in a pipeline, because the parameters would be gathered again for every microbatch.
        reshard_after_forward=zero == 3 and layout.pp == 1,
    )
    if offload:
        shard = partial(shard, offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda"))
    for module in float32:
        shard(module, mp_policy=whole)
    if expert_mesh is not None:
        shard_experts(model, expert_mesh, layout, shard)
    for unit in [first, *units] if first else units:
        shard(unit)
    # Keep the parameters of the head and of the root module gathered, because the backward pass needs them
    # right after the forward pass.
    if last:
        shard(last, reshard_after_forward=False)
    shard(model, reshard_after_forward=False)


def sum_in_float32(model: nn.Module, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Make each `Linear` add the gradients of its weight to a float32 sum, without rounding the gradients.

    The sum is the ``grad`` of the weight's float32 master in `masters`. If FSDP casts the weight, the sum is
    the ``grad`` of the cast, until FSDP reduces the sum. If the master is split, the sum is the ``grad`` of
    its upper half.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for linear in linears:
        linear.sum_in_float32(masters.get(linear.get_parameter("weight")))
    if not linears:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            cast(nn.Module, module).register_forward_pre_hook(_accept_float32_gradients)
        elif masters and not isinstance(module, nn.Embedding):  # PyTorch rounds the gradient of an embedding
            _accept_float32_gradients(module, None)


def _accept_float32_gradients(module: nn.Module, args: object) -> None:
    """Make PyTorch accept float32 gradients for a module's 16-bit parameters, and cast others to float32.

    FSDP reduces several gradients together only if all have the same dtype. FSDP creates the 16-bit
    parameters right before the first forward pass.
    """
    for param in module.parameters(recurse=isinstance(module, FSDPModule)):
        if param.dtype != torch.float32:
            param.grad_dtype = torch.float32


def reduces_on_host(world: World) -> bool:
    """Return whether `HostReduction` averages the gradients, so that the model must not be wrapped."""
    layout = world.layout
    return (
        world.device.type == "cpu"
        and layout.world_size > 1
        and layout.dp_shard == 1
        and not layout.splits_model
        and not world.is_simulated
    )


def gradient_switch(
    model: nn.Module,
    world: World,
    parallel: ParallelConfig,
    masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    local_gradient: LocalGradient | None = None,
) -> GradientSwitch:
    """Return a callable that enables or disables gradient reduction; without FSDP, install `HostReduction`.

    `masters` maps every parameter to its float32 master weight if the model computes in another dtype.
    `local_gradient` receives this rank's gradients, except gradients that `replicate` reduces. With CPU
    offloading, a single process moves its gradients to the host after every microbatch.
    """
    if world.mesh is None:
        return lambda enabled: None
    if not isinstance(model, FSDPModule):
        group = world.mesh["dp_replicate"].get_group()
        return HostReduction(model, group, masters, local_gradient).set_enabled
    layout = world.layout
    is_sharded = max(layout.shards, layout.expert_shards) > 1
    reduce: GradientSwitch = model.set_requires_gradient_sync
    if is_sharded or (parallel.offload and world.size == 1):
        # Disable only the all-reduce: the reduce-scatter must run after every microbatch, because unsharded
        # gradients would fill each rank's memory.
        reduce = model.set_requires_all_reduce
        if local_gradient is not None and is_sharded:
            observe_reduce_scatter(model, local_gradient)
    if parallel.zero == 3 and (is_sharded or parallel.offload or layout.dp_replicate == 1):
        return reduce

    def reduce_and_reshard(enabled: bool) -> None:
        # Parameters that stay gathered for the backward pass can also stay gathered for the next microbatch.
        reduce(enabled)
        model.set_reshard_after_backward(enabled)

    return reduce_and_reshard


class ObservedReduceScatter:
    """Reduce-scatter for FSDP that first adds each gradient to a `LocalGradient`."""

    def __init__(self, local_gradient: LocalGradient) -> None:
        self._local_gradient = local_gradient

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._local_gradient.add([input_tensor])
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def observe_reduce_scatter(model: nn.Module, local_gradient: LocalGradient) -> None:
    """Add each gradient of a sharded model to `local_gradient` before reducing the gradient."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ObservedReduceScatter(local_gradient))  # type: ignore[arg-type]


MIN_BUCKET_BYTES = 4 * 2**20
"""Minimum size of a bucket in bytes: small enough to start reducing early, large enough to amortize
latency."""


class HostReduction:
    """Averages a model's gradients over a process group before `backward` returns.

    Each bucket is reduced as soon as all its gradients are ready. All ranks reduce the buckets in the same
    order, regardless of which gradients are ready first. If there are float32 master weights, the gradients
    of the master weights are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
        local_gradient: LocalGradient | None = None,
    ) -> None:
        self._enabled = True
        self._local_gradient = local_gradient
        self._masters = masters or {}
        self._group = group
        self._options = dist.AllreduceCoalescedOptions()
        self._options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.AVG)
        self._buckets = make_buckets([param for param in model.parameters() if param.requires_grad])
        self._bucket_of = {param: index for index, bucket in enumerate(self._buckets) for param in bucket}
        self._num_missing: list[int] = []
        self._works: list[dist.Work] = []
        for param in self._bucket_of:
            cast(Any, param).register_post_accumulate_grad_hook(self._on_gradient)

    def set_enabled(self, enabled: bool) -> None:
        """Set whether the next backward pass averages gradients or only accumulates them locally."""
        self._enabled = enabled

    def _on_gradient(self, param: Tensor) -> None:
        if not self._enabled:
            return
        if not self._num_missing:
            self._num_missing = [len(bucket) for bucket in self._buckets]
            after_backward(self._finish)
        self._num_missing[self._bucket_of[cast(nn.Parameter, param)]] -= 1
        while len(self._works) < len(self._buckets) and not self._num_missing[len(self._works)]:
            self._start_next()

    def _start_next(self) -> None:
        owners = [self._owner(param) for param in self._buckets[len(self._works)]]
        grads = [cast(Tensor, owner.grad) for owner in owners]
        if self._local_gradient is not None:
            self._local_gradient.add(grads)
        self._works.append(self._group.allreduce_coalesced(grads, self._options))

    def _owner(self, param: nn.Parameter) -> nn.Parameter:
        """Return the parameter whose ``grad`` is averaged: the float32 master of `param`, or else `param`."""
        return self._masters.get(param, param)

    def _finish(self) -> None:
        while len(self._works) < len(self._buckets):
            # This rank has no gradient for some parameters in this bucket, but other ranks may have one.
            for param in self._buckets[len(self._works)]:
                owner = self._owner(param)
                if owner.grad is None:
                    # The gradient of a split master weight is in float32, as that of a separate one.
                    owner.grad = torch.zeros_like(owner, dtype=owner.grad_dtype or torch.float32)
            self._start_next()
        for work in self._works:
            work.wait()
        self._works, self._num_missing = [], []


def make_buckets(params: list[nn.Parameter], min_bytes: int = MIN_BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Split parameters into buckets of at least `min_bytes`, ordered by when gradients become ready."""
    return _groups(reversed(params), lambda param: param.nbytes, min_bytes)
