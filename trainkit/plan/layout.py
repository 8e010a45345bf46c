"""Layout arithmetic: which degrees multiply to the number of processes."""

from __future__ import annotations

from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import divisors


def make_layout(parallel: ParallelConfig, world_size: int) -> tuple[Layout, str]:
    """The layout of `world_size` processes and why; a degree of -1 takes what the others leave.

    Raises ConfigError when the degrees do not multiply to the number of processes.
    """
    degrees = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    model = parallel.tp * parallel.pp * parallel.cp
    derived = [name for name, degree in degrees.items() if degree == -1]
    if len(derived) == 2:
        hint = "dp_shard: 1 gives every process a whole copy, dp_replicate: 1 shards one copy over all"
        raise _problem("dp_replicate", "is -1 and so is parallel.dp_shard: only one can be derived", hint)
    if world_size % model:
        names = [name for name in ("tp", "pp", "cp") if getattr(parallel, name) > 1]
        product = " x ".join(f"parallel.{name} {getattr(parallel, name)}" for name in names)
        message = f"is {getattr(parallel, names[0])}: {product} does not divide {_processes(world_size, 1)}"
        raise _problem(names[0], message, f"together they can be {divisors(world_size)}")
    note = ""
    if derived:
        given = next(name for name in degrees if name not in derived)
        if world_size % (degrees[given] * model):
            message = f"is {degrees[given]}, which does not divide {_processes(world_size, model)}"
            raise _problem(given, message, f"it can be {divisors(world_size // model)}")
        degrees[derived[0]] = world_size // (degrees[given] * model)
        note = f" (parallel.{derived[0]}: -1 takes what is left)"
    replicate, shard = degrees["dp_replicate"], degrees["dp_shard"]
    if replicate * shard * model != world_size:
        message = (
            f"is {shard}: parallel.dp_replicate {replicate} x {shard} = {replicate * shard}, "
            f"but there {'is' if world_size == 1 else 'are'} {_processes(world_size, model)}"
        )
        raise _problem("dp_shard", message, "-1 derives it from the number of processes")
    layout = Layout(replicate, shard, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
    return layout, _words(layout) + note


def _problem(name: str, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(f"parallel.{name}", message, hint=hint)])


def _words(layout: Layout) -> str:
    """What a layout is, in a sentence without its verb."""
    model_ranks = layout.tp * layout.pp * layout.cp
    holder = "process" if model_ranks == 1 else f"group of {model_ranks} processes"
    holders = "processes" if model_ranks == 1 else f"groups of {model_ranks} processes"
    copies, shards = layout.dp_replicate, layout.dp_shard
    if layout.dp == 1:
        words = f"one {holder} holds the whole model"
    elif shards == 1:
        words = f"{copies} copies of the model, one a {holder}"
    elif copies == 1:
        words = f"one copy of the model, sharded over {shards} {holders}"
    else:
        words = f"{copies} copies of the model, each sharded over {shards} {holders}"
    inside = [
        f"{degree} {what}"
        for degree, what in ((layout.pp, "pipeline ranks"), (layout.tp, "tensor"), (layout.cp, "context"))
        if degree > 1
    ]
    return words + (f" ({' x '.join(inside)})" if inside else "")


def _processes(world_size: int, model: int) -> str:
    text = "1 process" if world_size == 1 else f"{world_size} processes"
    return text if model == 1 else f"{text} over {model} for tp x pp x cp"
