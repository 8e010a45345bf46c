"""Every private API of torch that trainkit uses: what each is for, and what to do when torch removes it.

No other file of trainkit names one; a test reads the syntax trees. Modules that are slow to import, as those
of pipelines and of the memory tracker, are imported by the functions that need them.
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
except ImportError:  # torch 2.11 and 2.12
    from torch.distributed._functional_collectives import all_gather_tensor_autograd as _all_gather

Tensors = Sequence[Tensor]

# Attention

ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
)
"""What `F.scaled_dot_product_attention` and `flex_attention` call, which selective checkpointing saves.
When one is renamed: take the new name from a profile; without it attention is recomputed, which is slow."""

REDUCTION_OPS = frozenset(
    {
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
)
"""What DTensor calls to sum the partial products of tensor-parallel ranks, which selective checkpointing
saves. When one is renamed: the test of the collectives per step fails; without it they are repeated."""


def chooses_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether causal attention of queries to keys of fewer heads takes the kernel of cuDNN.

    When it goes: `torch.backends.cuda.can_use_cudnn_attention`, on Hopper and later only.
    """
    choice = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def flash_attention_to_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal flash attention whose last query is aligned with the last key, for context parallelism.

    The public function aligns the first ones. When it goes: `torch.nn.attention.bias.causal_lower_right`.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Attention by cuDNN [B, H, T, C], the logsumexp of its scores [B, H, T, 1] and the state of its dropout.

    When it goes: `flash_attention_to_last`, which also runs on GPUs with cuDNN, but takes longer.
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
    """The gradients of `cudnn_attention` by queries, keys and values, also as a part of merged attention.

    When it goes: `flash_attention_to_last`.
    """
    sizes = q.shape[2], k.shape[2]
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, logsumexp, *state, None, None, None, *sizes, 0.0, causal
    )
    return found


# Data


def data_workers(items: Iterator[Any]) -> list[BaseProcess]:
    """The worker processes of the iterator of a DataLoader; none if it has no workers.

    When it goes: take those that are new in `multiprocessing.active_children()`.
    """
    return [*getattr(items, "_workers", ())]


# Parameters, gradients and the optimizer


def shard_offset(param: DTensor) -> Sequence[int]:
    """Where this rank's shard of a parameter starts in each dimension, for its initial values.

    When it goes: compute it from the placements, the mesh and torch's rule for uneven shards.
    """
    offset: Sequence[int] = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )[1]
    return offset


def shard_like(shard: Tensor, whole: DTensor) -> DTensor:
    """A shard as a DTensor that is split like `whole`, for the optimizer's state in a checkpoint.

    It has as many rows as `whole`, but may have other columns: [rows, columns], in shards of equal width.
    `DTensor.from_local` copies an offloaded tensor to the device of the mesh. When the constructor changes:
    use `from_local`, and save offloaded tensors under a mesh of the CPU.
    """
    spec = whole._spec
    if shard.shape[1:] != whole.to_local().shape[1:]:
        columns = shard.shape[1] * whole.shape[1:].numel() // whole.to_local().shape[1:].numel()
        meta = TensorMeta(torch.Size((whole.shape[0], columns)), (columns, 1), shard.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


with_params = _reparametrize_module
"""Run a module with other tensors as its parameters: the local shards, under tensor parallelism.
`torch.func.functional_call` would call the module's replaced forward again. When it goes: set the attributes
by hand, and restore them."""


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, to wait for the last reduced gradient.

    When it goes: DDP and FSDP do the same, so torch will have a successor; until it is known, wait before the
    optimizer step.
    """
    cast(Any, Variable)._execution_engine.queue_callback(callback)


norm_of_each = torch._foreach_norm
"""The norm of each tensor, in one kernel for many of them; of order inf, the largest absolute value.
When it goes: `torch.linalg.vector_norm` of each, with a kernel for each."""
copy_each = torch._foreach_copy_
"""Copies each source to its target, in one kernel for many of them.
When it goes: `Tensor.copy_` of each, with a kernel for each."""


def scale_next_step(optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
    """Make the fused kernel of the next step divide the gradients, and change nothing if `skip` is 1.

    GradScaler sets these attributes. When they go: divide the gradients in a pass of their own.
    """
    fused = cast(Any, optimizer)
    fused.grad_scale = divisor
    fused.found_inf = skip


def any_length(tensor: Tensor) -> Tensor:
    """The tensor, for which the compiler assumes nothing of its first size, and its second as it is.

    When these go: `torch.compile` compiles twice, for the first size and for others.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    if tensor.dim() > 1:
        torch._dynamo.mark_static(tensor, 1)
    return tensor


# Communication


def all_gather_dim(local: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, concatenated along `dim`; its gradient is reduced, and it compiles.

    When it goes: an autograd function around `dist.all_gather_into_tensor` and `reduce_scatter_tensor`.
    """
    whole: Tensor = _all_gather(local, gather_dim=dim, group=group)
    return whole


def set_gather(
    param: nn.Parameter, before: Callable[[int], Tensor], after: Callable[[Tensor], Tensor]
) -> None:
    """Make `fully_shard` gather `before(number of ranks)`, and compute with `after(gathered)`, made once.

    FSDP looks for these functions on the shard in its first pass, where tests of torch set them too: call
    before it, and after memory is allocated. All passes gather into the same memory. When they go: a subclass
    of Tensor that has them as methods, as in torchao.
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
    """Set the timeout of the collectives of a group that the device mesh has made with the default one.

    When it goes: `torch.distributed.set_timeout` of torch 2.15 takes its place.
    """
    public = getattr(dist, "set_timeout", None)
    if public is not None:
        public(timeout, group)
    else:
        _set_pg_timeout(timeout, group)


def authenticate_objects(seal: Callable[[bytes], bytes], unseal: Callable[[bytes], bytes]) -> None:
    """Have torch `seal` the pickles that ranks exchange, and `unseal` them before it executes them.

    They are plans of checkpoints and the shapes of pipeline stages; `unseal` raises for what no rank has
    sealed. When it goes: whoever reaches a port of torch can execute code in the ranks of this user.
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
    """Data parallelism over whole copies of a module, which composes with tensor parallelism.

    `DistributedDataParallel` does not: it computes a local norm in silence. When it goes: `fully_shard` over
    a mesh whose shard dimension has one rank.
    """
    _replicate(module, mesh=mesh, mp_policy=policy)


def connect_stage(stage: Any) -> None:
    """Let a pipeline stage on CPUs connect to its neighbours when it first sends to them.

    torch 2.11 has each stage send to them before the first step, which gloo cannot if a neighbour is on the
    same rank, as in V-shaped schedules. When 2.11 is no longer supported: remove it.
    """
    if torch.__version__ < "2.12" and stage.device.type == "cpu":  # compares releases, not strings
        stage._get_init_p2p_neighbors_ops = list


class ModuleStyle(ParallelStyle):
    """Base of trainkit's own ways to parallelize a module; `apply` is what `parallelize_module` calls.

    torch declares the method as `_apply`. When it is renamed: rename it here.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Parallelize a module in place and return it."""


def flight_record(device_type: str, count: int) -> JsonObject | None:
    """The newest `count` collectives of this rank for the report of a hang, and those that have not ended.

    Also the newest of each group, and the ranks of all groups, which gloo does not record. None where torch
    records nothing. When it goes: nothing else knows them. Return None; the stacks remain.
    """
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.distributed_c10d import _world

    # Those of gloo and NCCL are recorded separately, and a rank with a GPU has both.
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


# Checkpoints

PICKLED_IN_METADATA = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)
"""Private names in the metadata of a sharded checkpoint that are safe to unpickle. When a release adds one,
resuming from its checkpoints fails and names it: look at what it does, and add it. None may be removed, since
checkpoints of older releases contain them."""


def make_stager(options: StagingOptions) -> DefaultStager:
    """A stager that keeps its buffers from one save to the next, until it is closed.

    torch 2.11 and 2.12 release them after every save, and can then stage nothing more. When neither is
    supported any longer: use `DefaultStager`.
    """
    stager = DefaultStager(options)
    if torch.__version__ < "2.13":  # compares releases, not strings
        own: Any = stager
        buffers, close = own._state_dict_stager, stager.close
        release, buffers.close = buffers.close, lambda: None

        def close_for_good() -> None:
            close()
            release()

        own.close = close_for_good
    return stager


# Memory of a GPU


def fix_segments() -> None:
    """Let CUDA's allocator reserve segments of a fixed size from now on, whatever PYTORCH_ALLOC_CONF says.

    When it goes: set the variable without ``expandable_segments`` in `launch.env`.
    """
    found: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (found or cast(Any, torch.cuda.memory)._set_allocator_settings)("expandable_segments:False")


def compiled_anew() -> bool:
    """Whether this process has compiled a graph that no cache had.

    When it goes: leave ``compiled`` out of the event ``first_step``.
    """
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return not found["fxgraph_cache_hit"] or bool(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording every allocation of CUDA with its stack.

    When it goes: leave out `profiler.memory`; the peak is in the metrics.
    """
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_history(file: str) -> None:
    """Write the recorded allocations to a file for pytorch.org/memory_viz.

    When it goes: as for `record_memory_history`.
    """
    torch.cuda.memory._dump_snapshot(file)  # type: ignore[no-untyped-call]


# Simulation of one rank: tensors without values, collectives without other ranks

FakeTensors = FakeTensorMode
"""The mode in which tensors have shapes but no values. When it goes: the meta device, without the memory
tracker, so that `plan` alone estimates the memory."""

DispatchMode = TorchDispatchMode
"""Base of a mode that sees every operation, to count collectives. When it goes: count them in a profile."""

_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


def collective_kind(op: Any) -> str | None:
    """``all_gather``, ``reduce_scatter`` or ``all_reduce``; None for any other operation.

    When a release renames an operation, the test of the collectives per step fails: add its name.
    """
    namespace, _, name = str(op.name()).partition("::")
    if namespace not in ("c10d", "_c10d_functional"):
        return None
    return next((kind for part, kind in _COLLECTIVES.items() if part in name.replace("_", "")), None)


def join_fake_world(rank: int, world_size: int) -> None:
    """Make this process one rank of a world in which all collectives return at once.

    When it goes: `torch.distributed` documents no other backend for it; keep a copy of the store.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


class _NoModuleTracker(nullcontext[None]):
    """Replaces the module tracker of torch's memory tracker, which hooks into modules.

    Its hooks allow only one call per step, and no backward pass that a pipeline schedule splits in two.
    """

    parents: frozenset[str] = frozenset()

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...


def memory_tracker() -> Any:
    """The memory tracker of torch without per-module statistics, for the peak memory of a simulated rank.

    When it goes: a `DispatchMode` that adds up the storages that are alive.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker._mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    return tracker


@contextmanager
def shapes_untracked() -> Iterator[None]:
    """Hide DTensor's shape propagation from the memory tracker.

    It creates tensors of the global shape, which no rank ever allocates: for sharded logits, those of the
    whole vocabulary. The tracker ignores tensors of other fake modes, but here there is only one. When the
    method is renamed: find the one of `ShardingPropagator` that enters a fake mode.
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
"""The input of a pipeline stage that is not the first, on the meta device, given its module and the keyword
arguments of a microbatch."""


def set_stage_shapes(schedule: Any, stream_of: _StreamOf) -> None:
    """Set the input shapes of a schedule's stages, which would otherwise exchange them in the first step.

    When it goes: the stages take `input_args` and `output_args`.
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
    """`set_stage_shapes` for torch 2.11, in which schedules of one and of several stages differ."""

    def prepare(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        for stage in stages:
            if stage.inputs_meta is not None:
                return
            stream = (stream_of(stage.submod, kwargs),)
            stage.inputs_meta = tuple(arg.to("meta") for arg in args) if stage.is_first else stream
            stage._configure_outputs_meta(stream)
            # The last stage has an output of another shape, but sends it to nobody.
            stage._validate_fwd_outputs = lambda outputs: None
            stage._prepare_forward_infra(schedule._n_microbatches, ())
            stage._prepare_backward_infra(schedule._n_microbatches)

    if hasattr(schedule, "_stages"):
        stages = schedule._stages
        schedule._initialize_stages = prepare
    else:
        stages = [schedule._stage]
        schedule._initialize_stage = prepare
