"""One rank's program of a job of any size, in one process, without its memory and without the other ranks.

``python -m trainkit.trainer.simulate CONFIG PLAN RANK`` prints JSON: what the rank holds at its peak, and how
often it talks in a step. Tensors have shapes and no values; collectives return at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action, _ComputationType
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.config import read_effective
from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import read_json
from trainkit.trainer.build import BuiltModel, assemble, build_parts
from trainkit.trainer.data.batches import Microbatch
from trainkit.trainer.distributed import World, build_mesh, context_group
from trainkit.trainer.models.model import Model
from trainkit.trainer.optimizer import ShardedAdamW
from trainkit.trainer.parallel.pipeline import PipelinePasses
from trainkit.trainer.passes import WholePasses
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.pulse import Pulse
from trainkit.trainer.tasks import Task, build_task

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
    """Counts what a rank says to others, by kind."""

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


class _PeakTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's tracker without its record of each module, which may be called only once a step for that."""

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...


@contextmanager
def simulated_world(plan: LaunchPlan, rank: int) -> Iterator[World]:
    """A rank among others that are not there."""
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        device = torch.device("cpu")
        mesh = build_mesh(device, plan.layout) if plan.world_size > 1 else None
        group = context_group(device, plan.layout)
        yield World(rank, plan.world_size, device, mesh, None, plan.layout, group, is_simulated=True)
    finally:
        dist.destroy_process_group()


def simulate(config: RunConfig, plan: LaunchPlan, rank: int) -> dict[str, Any]:
    """What a rank holds at its peak in the second step, in bytes, and how often it talks in it."""
    began_s = time.monotonic()
    task = build_task(config)
    with simulated_world(plan, rank) as world:
        parts = build_parts(task, config, plan, world)
        return _measure(task, config, plan, world, parts, began_s)


def _measure(
    task: Task,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    parts: list[Model],
    began_s: float,
) -> dict[str, Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in parts:
            part.to_empty(device=world.device)
            part.restore()
        built = assemble(task, config, plan, world, Pulse(), parts)
        optimizer = ShardedAdamW(built.weights, config.optimizer, plan.layout)
        step = _step(task, config, plan, world, built, optimizer)
        step()
        tracker, collectives = _PeakTracker(), _CountCollectives()
        tracker.track_external(*built.parts, *(tensor for _, tensor in optimizer.state_tensors()))
        with tracker, collectives:
            step()
        peak = tracker.get_tracker_snapshot("peak")[world.device]
    return {
        "rank": world.rank,
        "world_size": plan.world_size,
        "peak_bytes": {str(getattr(kind, "name", kind)).lower(): size for kind, size in peak.items()},
        "collectives": dict(sorted(collectives.counts.items())),
        "num_params": sum(_local_numel(weight.param) for weight in built.weights),
        "seconds": round(time.monotonic() - began_s, 2),
    }


def _local_numel(param: Tensor) -> int:
    from trainkit.trainer.dtensor import local

    return local(param).numel()


def _step(
    task: Task,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    built: BuiltModel,
    optimizer: ShardedAdamW,
) -> Callable[[], None]:
    """A function that does what the training loop does in a step, but for what needs values."""
    batch = plan.batch
    shape = (batch.device_batch_size, config.data.seq_len)
    micro = Microbatch(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape[0], dtype=torch.int32),
    )
    micros = [micro] * batch.accumulation_steps
    one, zero = torch.ones(()), torch.zeros(())

    def step() -> None:
        if isinstance(built.passes, PipelinePasses):
            _run_stages(task, world, built, micros, DTYPES[config.precision.dtype])
        else:
            cast(WholePasses, built.passes).add_gradient(micros, one, lambda nll_sum: None)
        optimizer.collect_gradients()
        total = optimizer.square_sum()
        dist.all_reduce(total)
        optimizer.step(1e-3, one, zero)
        optimizer.zero_grad()

    return step


def _run_stages(
    task: Task, world: World, built: BuiltModel, micros: list[Microbatch], dtype: torch.dtype
) -> None:
    """The forward and backward passes of this rank's stages in the order of their schedule.

    What would come from other stages is made up. A backward pass that a schedule cuts in two is done at the
    second of them: the memory is an upper bound.
    """
    passes = cast(PipelinePasses, built.passes)
    parts = dict(zip(passes.stages, built.parts, strict=True))
    whole = passes.join(micros)
    size = len(whole.tokens) // passes.num_microbatches
    tokens, labels, keys = whole.tokens[:size], whole.labels[:size], whole.sample_keys[:size]
    held: dict[tuple[int, int | None], Tensor] = {}
    for action in _actions(passes, world):
        stage, key = action.stage_index, (action.stage_index, action.microbatch_index)
        part = parts[stage]
        if action.computation_type is _ComputationType.FORWARD:
            x = tokens
            if stage:
                x = torch.zeros(size, *part.stream_shape, dtype=dtype, requires_grad=True)
            out = part(x, sample_keys=keys)
            held[key] = task.nll_sum(out, labels) if stage == passes.num_stages - 1 else out
        elif action.computation_type in (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT):
            _hold_gradients(part)
            out = held.pop(key)
            out.backward(torch.zeros_like(out))  # type: ignore[no-untyped-call]
    passes.reduce_gradients()


def _hold_gradients(part: nn.Module) -> None:
    """As torch's stages do: only after the last microbatch are gradients reduced."""
    if isinstance(part, FSDPModule):
        part.set_is_last_backward(False)
        part.set_reshard_after_backward(False)
        part.set_requires_gradient_sync(False)


def _actions(passes: PipelinePasses, world: World) -> Iterator[_Action]:
    """What this rank computes, in order."""
    order = passes.schedule.pipeline_order
    if order is not None:
        for action in order[world.place.pp]:
            if action is not None:
                yield from action.sub_actions or (action,)
        return
    [stage], count = passes.stages, passes.num_microbatches
    is_gpipe = passes.name == "gpipe"
    lead = count if is_gpipe else min(count, passes.num_stages - stage)
    for index in range(count + lead):
        # 1F1B: from the first backward pass on, one of each in turn.
        if index >= lead:
            yield _Action(stage, _ComputationType.FULL_BACKWARD, index - lead)
        if index < count:
            yield _Action(stage, _ComputationType.FORWARD, index)


def main() -> int:
    """Simulate the rank that the command line names, and print what was found."""
    config_file, plan_file, rank = sys.argv[1:4]
    config = read_effective(Path(config_file))
    plan = LaunchPlan.from_dict(read_json(Path(plan_file)))
    print(json.dumps(simulate(config, plan, int(rank))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
