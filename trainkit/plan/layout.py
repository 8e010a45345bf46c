"""Layout arithmetic: which degrees multiply to the number of processes."""

from __future__ import annotations

from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.launch import Layout


def make_layout(parallel: ParallelConfig, world_size: int) -> tuple[Layout, str]:
    """The layout of `world_size` processes and why; ``dp_shard: -1`` takes what the others leave.

    Raises ConfigError when the degrees do not multiply to the number of processes.
    """
    model = parallel.tp * parallel.pp * parallel.cp
    if parallel.dp_shard == -1:
        others = parallel.dp_replicate * model
        if world_size % others:
            message = f"is {parallel.dp_replicate}, which does not divide {_processes(world_size, model)}"
            hint = f"parallel.dp_replicate can be {_divisors(world_size // model)}"
            raise ConfigError([Problem("parallel.dp_replicate", message, hint=hint)])
        shard = world_size // others
        note = " (parallel.dp_shard: -1 takes all that are left)"
    else:
        shard = parallel.dp_shard
        product = parallel.dp_replicate * shard * model
        if product != world_size:
            message = (
                f"is {shard}: dp_replicate {parallel.dp_replicate} x dp_shard {shard} = {product}, "
                f"but there are {_processes(world_size, model)}"
            )
            hint = _shard_hint(parallel, world_size, model)
            raise ConfigError([Problem("parallel.dp_shard", message, hint=hint)])
        note = ""
    layout = Layout(parallel.dp_replicate, shard, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
    return layout, _words(layout) + note


def _words(layout: Layout) -> str:
    copies, shards = layout.dp_replicate, layout.dp_shard
    if layout.dp == 1:
        return "one process holds the whole model"
    if shards == 1:
        return f"{copies} copies of the model, one a process"
    if copies == 1:
        return f"one copy of the model, sharded over {shards} processes"
    return f"{copies} copies of the model, each sharded over {shards} processes"


def _processes(world_size: int, model: int) -> str:
    text = "1 process" if world_size == 1 else f"{world_size} processes"
    return text if model == 1 else f"{text} over {model} for tp x pp x cp"


def _divisors(number: int) -> str:
    return " or ".join(str(item) for item in range(1, number + 1) if number % item == 0)


def _shard_hint(parallel: ParallelConfig, world_size: int, model: int) -> str:
    others = parallel.dp_replicate * model
    if world_size % others == 0:
        return f"parallel.dp_shard = {world_size // others} fits, or -1 to derive it"
    return f"parallel.dp_replicate can be {_divisors(world_size // model)}, with parallel.dp_shard = -1"
