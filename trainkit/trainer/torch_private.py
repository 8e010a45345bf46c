"""Wrap every private torch API that trainkit uses.

The docstring of each wrapper states the purpose of the API and what to do if torch removes it. A test checks
that no other file of trainkit refers to a private API. Slow imports, such as those for pipelines and the
memory tracker, are inside the functions that need them.
"""

from __future__ import annotations

import json
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate as _replicate
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention import SDPBackend
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainkit.formats import JsonObject

try:
    from torch.distributed._functional_collectives import all_gather_single_autograd as _all_gather
except ImportError:  # torch 2.11 and 2.12 use a different name for this class
    from torch.distributed._functional_collectives import all_gather_tensor_autograd as _all_gather

Tensors = Sequence[Tensor]

# Private APIs for attention

ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
)
"""Attention operations; checkpointing by operation saves their results instead of recomputing them.

If torch renames an operation, look up its new name in a profile. If this set lacks the operation's current
name, attention is recomputed in the backward pass, which is slow.
"""


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [R, N] with weights [E, N, M]: group e of the rows, up to row ends[e], with weights[e].

    `ends` is int32 [E]. Returns [R, M]. Rows and weights need strides of a multiple of 16 bytes.
    `torch.nn.functional.grouped_mm` multiplies float32 and float16, too, but its meta kernel accepts only
    bfloat16, so that neither torch.compile nor fake tensors can call it with other dtypes. Call torch's
    function for all dtypes once its meta kernel accepts them.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights, offs=ends)
    product: Tensor = _grouped_mm(rows, weights, ends)
    return product


@torch.library.custom_op("trainkit::grouped_mm", mutates_args=())
def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(left, right, offs=ends)


@_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    groups = [len(ends)] if right.dim() == 2 else []
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    left, right, ends = ctx.saved_tensors
    grad, (for_left, for_right, _) = grad.contiguous(), ctx.needs_input_grad
    return (
        _grouped_mm(grad, right.transpose(1, 2), ends) if for_left else None,
        # As in torch's own gradient, the result has the layout of a transposed weight.
        _grouped_mm(grad.t(), left, ends).transpose(1, 2) if for_right else None,
        None,
    )


_grouped_mm.register_autograd(_grouped_mm_gradients, setup_context=_keep_factors)

GROUPED_OPS = frozenset({torch.ops.aten._grouped_mm.default, torch.ops.trainkit.grouped_mm.default})
"""Matrix products whose rows are multiplied with the matrices of different experts.

If torch renames its operation, `selective` checkpointing recomputes the products of all experts.
"""

PRODUCT_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        *GROUPED_OPS,
    }
)
"""Matrix products; `pointwise` checkpointing saves their results instead of recomputing them.

If torch renames an operation, its results are recomputed in the backward pass, which is slow.
"""

EXCHANGE_OPS = frozenset(
    {
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)
"""Collectives that DTensor uses to sum the partial results of tensor-parallel ranks, and `exchange_rows`.

Checkpointing by operation saves the results of these collectives instead of repeating the collectives. If
torch renames a collective, the backward pass repeats it, and the test that counts the collectives per step
fails.
"""


def chooses_cudnn(q: Tensor, k: Tensor) -> bool:
    """Return whether torch would choose cuDNN for causal grouped-query attention.

    If torch removes the private function, use `torch.backends.cuda.can_use_cudnn_attention` on Hopper and
    newer GPUs.
    """
    choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def flash_attention_to_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal flash attention, with the last query aligned to the last key.

    Context parallelism needs the last query aligned to the last key, but `F.scaled_dot_product_attention`
    aligns the first query to the first key. If torch removes the operation, use
    `torch.nn.attention.bias.causal_lower_right`.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Compute attention with the cuDNN kernel.

    Returns the output [B, H, T, C], the logsumexp of the scores [B, H, T, 1], and the dropout state (2
    tensors). If torch removes the operation, use `flash_attention_to_last`, which is slower than cuDNN.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return found[0], found[1], found[6], found[7]


def cudnn_attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    state: Tensors,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `cudnn_attention` with respect to queries, keys and values.

    `out` and `logsumexp` may be merged from several calls of `cudnn_attention`. If torch removes the
    operation, use `flash_attention_to_last`.
    """
    sizes = q.shape[2], k.shape[2]
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, logsumexp, *state, None, None, None, *sizes, 0.0, causal
    )
    return found


# Private APIs for data loading


def data_workers(items: Iterator[Any]) -> list[BaseProcess]:
    """Return the worker processes of a DataLoader's iterator, or an empty list if the iterator has none.

    If torch removes the attribute, look for new processes in `multiprocessing.active_children()`.
    """
    return [*getattr(items, "_workers", ())]


# Private APIs for parameters, gradients and the optimizer


def shard_offset(param: DTensor) -> Sequence[int]:
    """Return the index in each dimension at which this rank's shard of a parameter starts.

    The indices determine the initial values of the shard. If torch removes the function, compute the indices
    from the placements, the mesh and torch's rule for uneven shards.
    """
    offset: Sequence[int] = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )[1]
    return offset


def shard_like(shard: Tensor, whole: DTensor) -> DTensor:
    """Return an optimizer state's local shard as a DTensor sharded like `whole`, to save in a checkpoint.

    The DTensor has as many rows as `whole`. The DTensor and `whole` may have different numbers of columns,
    but both numbers must be evenly divisible among the ranks. `DTensor.from_local` is not used, because it
    would copy an offloaded tensor to the mesh's device. If torch changes the constructor, use `from_local`,
    and a CPU mesh for offloaded tensors.
    """
    spec = whole._spec
    if shard.shape[1:] != whole.to_local().shape[1:]:
        columns = shard.shape[1] * whole.shape[1:].numel() // whole.to_local().shape[1:].numel()
        meta = TensorMeta(torch.Size((whole.shape[0], columns)), (columns, 1), shard.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


with_params = _reparametrize_module
"""Context manager that replaces a module's parameters with other tensors, such as local shards.

`torch.func.functional_call` would call the module's replaced `forward` again, which would recurse. If torch
removes the context manager, set the attributes directly and restore them afterwards.
"""


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, for example to wait for gradient reductions.

    If torch removes the method, look for the replacement in DDP and FSDP, which use the same method. Until a
    replacement is found, wait for the reductions right before the optimizer step.
    """
    cast(Any, Variable)._execution_engine.queue_callback(callback)


norm_of_each = torch._foreach_norm
"""Computes the norm of each tensor, using one kernel for many tensors; the inf-norm is the largest absolute
value.

If torch removes the function, use `torch.linalg.vector_norm`, which launches one kernel per tensor.
"""
copy_each = torch._foreach_copy_
"""Copies each source tensor to its target, using one kernel for many tensors.

If torch removes the function, use `Tensor.copy_`, which launches one kernel per tensor.
"""
lerp_each = torch._foreach_lerp_
"""Moves each tensor by a fraction of its distance to a second tensor, using one kernel for many tensors.

If torch removes the function, use `Tensor.lerp_`, which launches one kernel per tensor.
"""


def any_length(tensor: Tensor) -> Tensor:
    """Mark a tensor's first dimension as dynamic and its second as static for torch.compile.

    Returns the tensor. If torch removes the marking functions, `torch.compile` compiles twice: for the first
    size, and again for all other sizes.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    if tensor.dim() > 1:
        torch._dynamo.mark_static(tensor, 1)
    return tensor


# Private APIs for communication


def all_gather_dim(local: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along `dim`; supports torch.compile and autograd.

    If torch removes the function, write an autograd function around `dist.all_gather_into_tensor` and
    `dist.reduce_scatter_tensor`.
    """
    whole: Tensor = _all_gather(local, gather_dim=dim, group=group)
    return whole


def exchange_rows(
    rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `sent[i]` rows to rank i of a group, and return `received[i]` rows from each rank, in rank order.

    The operation has no gradient. Checkpointing by operation can save the result, because the operation
    returns a new tensor, unlike `dist.all_to_all_single`. If torch removes the operation, define an operation
    around `dist.all_to_all_single` with `torch.library`.
    """
    ops = torch.ops._c10d_functional
    found: Tensor = ops.wait_tensor(ops.all_to_all_single(rows, [*received], [*sent], group.group_name))
    return found


def set_gather(
    param: nn.Parameter, before: Callable[[int], Tensor], after: Callable[[Tensor], Tensor]
) -> None:
    """Make `fully_shard` gather `before(number of ranks)`, and use `after(gathered)` as the parameter.

    In its first pass, FSDP looks up these two hooks on the shard, where torch's own tests also set them. Call
    `set_gather` after memory has been allocated and before the first pass. All passes gather into the same
    memory, so FSDP calls `after` only once. If torch removes the hooks, write a Tensor subclass that defines
    them, as torchao does.
    """

    def fsdp_pre_all_gather(
        mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        return (before(mesh.size()),), None

    def fsdp_post_all_gather(
        outputs: tuple[Tensor], metadata: None, param_dtype: Any, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        return (after(outputs[0]), ()) if out is None else None

    shard: Any = cast(Any, param)._local_tensor
    shard.fsdp_pre_all_gather = fsdp_pre_all_gather
    shard.fsdp_post_all_gather = fsdp_post_all_gather


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of collectives in a group that the device mesh created with the default timeout.

    From torch 2.15, the public function `torch.distributed.set_timeout` can be used instead.
    """
    public = getattr(dist, "set_timeout", None)
    if public is not None:
        public(timeout, group)
    else:
        _set_pg_timeout(timeout, group)


def authenticate_objects(seal: Callable[[bytes], bytes], unseal: Callable[[bytes], bytes]) -> None:
    """Make torch `seal` the pickles that ranks exchange, and `unseal` them before unpickling.

    Unpickling can execute code. The pickles contain checkpoint plans and the shapes of pipeline stages.
    `unseal` raises an error if no rank of this run has sealed the pickle. If torch removes the wrapped
    functions, find another way to authenticate the pickles: otherwise, anyone who can reach one of torch's
    ports can execute code as the user of the run.
    """

    class Pickler:
        def __init__(self, stream: BinaryIO) -> None:
            self._stream = stream

        def dump(self, value: object) -> None:
            self._stream.write(seal(pickle.dumps(value)))

    class Unpickler:
        def __init__(self, stream: BinaryIO) -> None:
            self._stream = stream

        def load(self) -> object:
            return pickle.loads(unseal(self._stream.read()))

    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]


def replicate(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Replicate a module for data parallelism; unlike DDP, this can be combined with tensor parallelism.

    With `DistributedDataParallel`, the gradient norm would silently cover only the local shards. If torch
    removes the function, use `fully_shard` with a mesh whose shard dimension has one rank.
    """
    _replicate(module, mesh=mesh, mp_policy=policy)


def connect_stage(stage: Any) -> None:
    """Make a CPU pipeline stage connect to its neighbours lazily, when it first sends to them.

    In torch 2.11, each stage sends to its neighbours before the first step. With gloo, such a send fails if a
    neighbouring stage is on the same rank, as in V-shaped schedules. Remove this function once torch 2.11 is
    no longer supported.
    """
    if torch.__version__ < "2.12" and stage.device.type == "cpu":  # compares versions, not strings
        stage._get_init_p2p_neighbors_ops = list


class ModuleStyle(ParallelStyle):
    """Base class for trainkit's parallel styles; `parallelize_module` calls the method `apply`.

    torch names the abstract method `_apply`. If torch renames `_apply`, rename it here too.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Parallelize a module in place, and return it."""


def flight_record(device_type: str, count: int) -> JsonObject | None:
    """Return this rank's newest `count` collectives and all unfinished ones, for a hang report.

    The result also contains each group's newest collective and each group's member ranks, because gloo does
    not record the members. Returns None if torch does not record collectives. If torch removes the functions,
    return None: there is no other source, and hang reports then contain only stacks.
    """
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.distributed_c10d import _world

    # gloo and NCCL keep separate records, and a rank with a GPU uses both libraries.
    names = ("_dump_fr_trace_json", *(["_dump_nccl_trace_json"] if device_type == "cuda" else []))
    dumps = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    if not dumps or not dist.is_initialized():
        return None
    record: JsonObject = {}
    kept: list[JsonObject] = []
    for found in (json.loads(dump()) for dump in dumps):
        record |= {key: found[key] for key in ("version", "pg_status") if key in found}
        entries = found.get("entries", [])
        newest = {tuple(entry["process_group"]): entry["record_id"] for entry in entries}.values()
        kept += [
            entry
            for index, entry in enumerate(entries)
            if index >= len(entries) - count or entry["record_id"] in newest or not entry["retired"]
        ]
    record["pg_config"] = {
        str(group.group_name): {"desc": group.group_desc, "ranks": dist.get_process_group_ranks(group)}
        for group in _world.pg_map
    }
    return {**record, "entries": sorted(kept, key=lambda entry: int(entry["time_created_ns"]))}


# Private APIs for checkpoints

PICKLED_IN_METADATA = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)
"""Private names that occur in the metadata of sharded checkpoints and are safe to unpickle.

If a release of torch adds a name to the metadata, resuming from its checkpoints fails with an error that
shows the name. Check what a class or function does before adding its name. Never remove a name, because
checkpoints saved with older torch releases contain it.
"""


def make_stager(options: StagingOptions) -> DefaultStager:
    """Return a stager that keeps and reuses its buffers across saves until it is closed.

    In torch 2.11 and 2.12, `DefaultStager` releases its buffers after every save and cannot stage again. Use
    `DefaultStager` directly once torch 2.11 and 2.12 are no longer supported.
    """
    stager = DefaultStager(options)
    if torch.__version__ < "2.13":  # compares versions, not strings
        own: Any = stager
        buffers, close = own._state_dict_stager, stager.close
        release, buffers.close = buffers.close, lambda: None

        def close_for_good() -> None:
            close()
            release()

        own.close = close_for_good
    return stager


# Private APIs for GPU memory


def fix_segments() -> None:
    """Make the CUDA allocator use segments of fixed size, regardless of PYTORCH_ALLOC_CONF.

    If torch removes both functions, set PYTORCH_ALLOC_CONF in `launch.env`, without ``expandable_segments``.
    """
    found: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (found or cast(Any, torch.cuda.memory)._set_allocator_settings)("expandable_segments:False")


def compiled_anew() -> bool:
    """Return whether this process has compiled a graph that was not in the compile cache.

    If torch removes the counters, omit ``compiled`` from the ``first_step`` event.
    """
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return not found["fxgraph_cache_hit"] or bool(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording the stack of every CUDA allocation.

    If torch removes the function, remove the config key `profiler.memory`; the metrics still contain the peak
    memory.
    """
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_history(file: str) -> None:
    """Write the recorded allocations to a file for pytorch.org/memory_viz.

    If torch removes the function, remove the config key `profiler.memory`.
    """
    torch.cuda.memory._dump_snapshot(file)  # type: ignore[no-untyped-call]


# Private APIs for simulating one rank: tensors have no values, and collectives return immediately

FakeTensors = FakeTensorMode
"""Mode for tensors that have shapes but no values.

If torch removes the mode, use the meta device without the memory tracker; then only `plan` can estimate the
memory.
"""

DispatchMode = TorchDispatchMode
"""Base class for modes that intercept every operation, used to count collectives.

If torch removes the class, count the collectives in a profile.
"""

_COLLECTIVES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


def collective_kind(op: Any) -> str | None:
    """Return the kind of a collective, such as ``all_gather``, or None for any other operation.

    If torch renames a collective, the test of the collectives per step fails until the new name is added
    here.
    """
    namespace, _, name = str(op.name()).partition("::")
    if namespace not in ("c10d", "_c10d_functional"):
        return None
    return next((kind for part, kind in _COLLECTIVES.items() if part in name.replace("_", "")), None)


def join_fake_world(rank: int, world_size: int) -> None:
    """Make this process one rank of a simulated world, where all collectives return immediately.

    If torch removes the fake store, keep a copy of its code in trainkit: no public backend can replace it.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


class _NoModuleTracker(nullcontext[None]):
    """Replaces the module tracker, which installs hooks on modules, inside torch's memory tracker.

    The hooks allow only one forward pass per step, and fail if a pipeline schedule splits a backward pass in
    two.
    """

    parents: frozenset[str] = frozenset()

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...


def memory_tracker() -> Any:
    """Return torch's memory tracker, without per-module statistics, for measuring a rank's peak memory.

    If torch removes `MemTracker`, replace it with a `TorchDispatchMode` that sums the sizes of live storages.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker._mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    return tracker


@contextmanager
def shapes_untracked() -> Iterator[None]:
    """Hide DTensor's shape propagation from the memory tracker.

    Shape propagation creates fake tensors with the global shape, such as logits over the whole vocabulary,
    which no rank ever allocates. The tracker would ignore tensors of a different fake mode, but a simulated
    rank has only one fake mode. If torch renames the method, look in `ShardingPropagator` for the method that
    enters a fake mode.
    """
    kind: Any = ShardingPropagator
    propagate = kind._propagate_tensor_meta_non_cached

    def propagate_untracked(propagator: ShardingPropagator, op_schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(propagator, op_schema)

    kind._propagate_tensor_meta_non_cached = propagate_untracked
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = propagate


_StreamOf = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""Returns a meta tensor with the shape of a pipeline stage's input; not called for the first stage.

The arguments are the stage's module and the keyword arguments of one microbatch.
"""


def set_stage_shapes(schedule: Any, stream_of: _StreamOf) -> None:
    """Set the input shapes of a schedule's stages, so that ranks need not exchange shapes in the first step.

    If torch removes the method, pass `input_args` and `output_args` when creating the stages.
    """
    if not hasattr(schedule, "_initialize_pp_stages"):
        _set_stage_shapes_2_11(schedule, stream_of)
        return
    from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, extract_tensor_metas

    def prepare(
        stages: Sequence[Any],
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        target: Tensor | None,
        knows_forward: bool,
        knows_backward: bool,
        **rest: Any,
    ) -> tuple[bool, bool]:
        if not knows_forward:
            for stage in stages:
                stream = (stream_of(stage.submod, kwargs),)
                inputs = extract_tensor_metas(args if stage.is_first else stream)
                stage._user_meta = _StageMeta(inputs, outputs=extract_tensor_metas(stream))
                stage._inference_mode = InferenceMode.STATIC
                stage._prepare_forward_infra(schedule._n_microbatches, None, has_backward=True)
                stage._prepare_backward_infra(schedule._n_microbatches)
        return True, True

    schedule._initialize_pp_stages = prepare


def _set_stage_shapes_2_11(schedule: Any, stream_of: _StreamOf) -> None:
    """Set the stage shapes in torch 2.11, which initializes single- and multi-stage schedules differently."""

    def prepare(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        for stage in stages:
            if stage.inputs_meta is not None:
                return
            stream = (stream_of(stage.submod, kwargs),)
            stage.inputs_meta = tuple(arg.to("meta") for arg in args) if stage.is_first else stream
            stage._configure_outputs_meta(stream)
            # The last stage's output has a different shape, but no stage receives that output.
            stage._validate_fwd_outputs = lambda outputs: None
            stage._prepare_forward_infra(schedule._n_microbatches, ())
            stage._prepare_backward_infra(schedule._n_microbatches)

    if hasattr(schedule, "_stages"):
        stages = schedule._stages
        schedule._initialize_stages = prepare
    else:
        stages = [schedule._stage]
        schedule._initialize_stage = prepare
