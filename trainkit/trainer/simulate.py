"""Simulates one rank of a job of any size in one process, without its memory and without the other ranks.

``python -m trainkit.trainer.simulate CONFIG PLAN RANK`` prints JSON: the rank's peak memory, and the number
of collectives per step. Tensors have shapes but no values; collectives return immediately.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, extract_tensor_metas
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainkit.config import read_effective
from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import read_json
from trainkit.trainer.batches import Microbatch
from trainkit.trainer.build import BuiltModel, assemble, build_model_parts
from trainkit.trainer.distributed import World, build_mesh, context_group
from trainkit.trainer.models.model import Model, local_tensor
from trainkit.trainer.optimizer import ShardedAdamW
from trainkit.trainer.parallel.pipeline import PipelineForwardBackward
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.progress import Progress
from trainkit.trainer.task import Task, build_task

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
}


class _CountCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = COLLECTIVES.get(func._opname)
            if kind is not None:
                self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


class _NullModuleTracker:
    """Replaces the module tracker of torch's memory tracker, which hooks into modules.

    Its hooks allow only one call per step, and no backward pass that a pipeline schedule splits in two.
    """

    parents: frozenset[str] = frozenset()

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _PeakTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's memory tracker without per-module statistics."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NullModuleTracker()  # type: ignore[assignment]


@contextmanager
def simulated_world(plan: LaunchPlan, rank: int, *, mesh_of_one: bool = False) -> Iterator[World]:
    """The world of one rank, on the fake backend: the other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        device = torch.device("cpu")
        mesh = build_mesh(device, plan.layout) if plan.world_size > 1 or mesh_of_one else None
        group = context_group(device, plan.layout)
        yield World(rank, plan.world_size, device, mesh, None, plan.layout, group, is_simulated=True)
    finally:
        dist.destroy_process_group()


def simulate(config: RunConfig, plan: LaunchPlan, rank: int) -> dict[str, Any]:
    """Simulate two steps of a rank; returns the peak memory, in bytes, and the collectives of the second."""
    began_s = time.monotonic()
    task = build_task(config)
    with simulated_world(plan, rank, mesh_of_one=config.parallel.mesh_of_one) as world:
        model_parts = build_model_parts(task, config, plan, world)
        return _measure(task, config, plan, world, model_parts, began_s)


def _measure(
    task: Task,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    model_parts: list[Model],
    began_s: float,
) -> dict[str, Any]:
    with FakeTensorMode(allow_non_fake_inputs=True), _shapes_untracked():
        for model in model_parts:
            model.to_empty(device=world.device)
            model.rebuild_buffers()
        built = assemble(task, config, plan, world, Progress(), model_parts)
        optimizer = ShardedAdamW(built.weights, config.optimizer, plan.layout)
        step = _step(config, plan, built, optimizer)
        tracker, collectives = _PeakTracker(), _CountCollectives()
        masters = [weight.param for weight in built.weights if weight.cast is not None]
        state = [tensor for _, tensor in optimizer.state_tensors()]
        tracker.track_external(*built.model_parts, *masters, *state)
        with tracker:
            step()  # allocates tensors that later steps reuse, such as the buffers of a pipeline
        with tracker, collectives:
            step()
        peak = tracker.get_tracker_snapshot("peak")[world.device]
    return {
        "rank": world.rank,
        "world_size": plan.world_size,
        "peak_bytes": {str(getattr(kind, "name", kind)).lower(): size for kind, size in peak.items()},
        "collectives": dict(sorted(collectives.counts.items())),
        "num_params": sum(local_tensor(weight.param).numel() for weight in built.weights),
        "seconds": round(time.monotonic() - began_s, 2),
    }


@contextmanager
def _shapes_untracked() -> Iterator[None]:
    """Hide DTensor's shape propagation from the memory tracker.

    It creates tensors of the global shape, which no rank ever allocates: for sharded logits, those of the
    whole vocabulary. The tracker ignores tensors of other fake modes, but here there is only one.
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


def _step(
    config: RunConfig, plan: LaunchPlan, built: BuiltModel, optimizer: ShardedAdamW
) -> Callable[[], None]:
    """A function that runs one step of the training loop, without the parts that need values."""
    batch = plan.batch
    shape = (batch.device_batch_size, config.data.seq_len)
    micro = Microbatch(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape[0], dtype=torch.int32),
    )
    micros = [micro] * batch.accumulation_steps
    one, zero = torch.ones(()), torch.zeros(())
    if isinstance(built.forward_backward, PipelineForwardBackward):
        _set_stage_shapes(built.forward_backward.schedule, DTYPES[config.precision.dtype])

    def step() -> None:
        built.forward_backward.accumulate_gradient(micros, one, lambda nll_sum: None)
        if built.tied_weights is not None:
            built.tied_weights.sum_gradients()
        optimizer.collect_gradients()
        total = optimizer.square_sum()
        dist.all_reduce(total)
        optimizer.step(1e-3, one, zero)
        optimizer.zero_grad()

    return step


def _set_stage_shapes(schedule: Any, dtype: torch.dtype) -> None:
    """Set the input shapes of torch's stages, which would otherwise exchange them in the first step."""

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
                shape = (len(kwargs["sample_keys"]), *stage.submod.stream_shape)
                stream = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True),)
                inputs = extract_tensor_metas(args if stage.is_first else stream)
                stage._user_meta = _StageMeta(inputs, outputs=extract_tensor_metas(stream))
                stage._inference_mode = InferenceMode.STATIC
                stage._prepare_forward_infra(schedule._n_microbatches, None, has_backward=True)
                stage._prepare_backward_infra(schedule._n_microbatches)
        return True, True

    schedule._initialize_pp_stages = prepare


def main() -> int:
    """Simulate the rank given on the command line, and print the result."""
    config_file, plan_file, rank = sys.argv[1:4]
    config = read_effective(Path(config_file))
    plan = LaunchPlan.from_dict(read_json(Path(plan_file)))
    print(json.dumps(simulate(config, plan, int(rank))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
