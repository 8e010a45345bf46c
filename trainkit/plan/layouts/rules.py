"""Layout arithmetic: which degrees multiply to the number of processes."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.launch import Layout
from trainkit.plan.layouts.schedules import TWO_BACKWARDS, num_stages
from trainkit.plan.model_shape import ModelShape


def layout_problems(
    layout: Layout,
    parallel: ParallelConfig,
    shape: ModelShape,
    device_batch_size: int,
    seq_len: int,
    accumulation_steps: int = 1,
) -> Iterator[Problem]:
    """All problems that rule out a layout for a model."""
    yield from _tensor_problems(layout, parallel, shape, seq_len)
    stages = num_stages(layout.pp, parallel.pp_schedule)
    if layout.pp > 1 and stages > shape.num_layers:
        message = f"is {layout.pp}, which makes {stages} stages of {shape.num_layers} layers"
        hint = f"with {parallel.pp_schedule} it can be at most {shape.num_layers * layout.pp // stages}"
        yield Problem("parallel.pp", message, hint=hint)
    yield from batch_problems(layout, parallel, device_batch_size, seq_len, accumulation_steps)


def batch_problems(
    layout: Layout,
    parallel: ParallelConfig,
    device_batch_size: int,
    seq_len: int,
    accumulation_steps: int = 1,
) -> Iterator[Problem]:
    """All problems that rule out a layout for the batch, whatever the model."""
    if parallel.offload and layout.world_size == 1:
        hint = "it works where parameters are sharded or a sample is split: with two processes or more"
        yield Problem("parallel.offload", "is true, and there is one process", hint=hint)
    yield from _context_problems(layout, seq_len)
    yield from _pipeline_problems(layout, parallel, device_batch_size, accumulation_steps)


def _tensor_problems(
    layout: Layout, parallel: ParallelConfig, shape: ModelShape, seq_len: int
) -> Iterator[Problem]:
    if layout.tp == 1:
        return
    sizes = {
        "model.num_heads": shape.num_heads,
        "model.num_kv_heads": shape.num_kv_heads,
        "model.ffn_dim": shape.ffn_dim,
        "model.vocab_size": shape.vocab_size,
        "model.dim": shape.dim,
    }
    for key, size in sizes.items():
        if size % layout.tp:
            message = f"is {layout.tp}, which does not divide {key} {size}"
            yield Problem("parallel.tp", message, hint=f"it can be {divisors(size, most=layout.tp)}")
    share = seq_len // layout.cp
    if parallel.sequence_parallel and share % layout.tp:
        of = f"data.seq_len {seq_len}" + (f" / parallel.cp {layout.cp}" if layout.cp > 1 else "")
        message = f"is true, and parallel.tp {layout.tp} does not divide {of}"
        yield Problem("parallel.sequence_parallel", message, hint="false keeps the whole sequence everywhere")


def _context_problems(layout: Layout, seq_len: int) -> Iterator[Problem]:
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        message = f"is {layout.cp}: data.seq_len {seq_len} is not a multiple of 2 x {layout.cp} parts"
        hint = "each rank has a part from the front and one from the back, so that all have the same work"
        yield Problem("parallel.cp", message, hint=hint)


def _pipeline_problems(
    layout: Layout, parallel: ParallelConfig, device_batch_size: int, accumulation_steps: int
) -> Iterator[Problem]:
    if layout.pp == 1:
        return
    schedule = parallel.pp_schedule
    if schedule in TWO_BACKWARDS and parallel.activation_checkpointing == "selective":
        message = f"is selective, and {schedule} goes back through a layer twice, which that cannot"
        hint = "full and none can; gpipe, 1f1b and interleaved_1f1b go back once"
        yield Problem("parallel.activation_checkpointing", message, hint=hint)
    if schedule in TWO_BACKWARDS and parallel.compile:
        message = f"is true, and {schedule} goes back through a layer twice, which compiled layers cannot"
        yield Problem("parallel.compile", message, hint="gpipe, 1f1b and interleaved_1f1b go back once")
    yield from microbatch_problems(layout, parallel, device_batch_size, accumulation_steps)


def microbatch_problems(
    layout: Layout, parallel: ParallelConfig, device_batch_size: int, accumulation_steps: int
) -> Iterator[Problem]:
    """The problems that rule out a number of microbatches in a pipeline."""
    if layout.pp == 1:
        return
    pp, schedule, microbatches = layout.pp, parallel.pp_schedule, parallel.pp_microbatches
    stages = num_stages(pp, schedule)
    if device_batch_size % microbatches:
        message = f"is {microbatches}, which does not divide train.device_batch_size {device_batch_size}"
        hint = f"it can be {divisors(device_batch_size)}"
        yield Problem("parallel.pp_microbatches", message, hint=hint)
    # A step is one run through the schedule, with all that is accumulated.
    count = microbatches * accumulation_steps
    made = f"is {microbatches}" + (f" x {accumulation_steps} accumulated" if accumulation_steps > 1 else "")
    least = {"1f1b": pp, "dualpipe_v": stages}.get(schedule, 1)
    if count < least:
        message = f"{made}, fewer than the {least} that {schedule} needs with parallel.pp {pp}"
        yield Problem("parallel.pp_microbatches", message, hint="gpipe works with any number")
    rounds = max(1, count // pp)
    if schedule.startswith("interleaved") and count % rounds:
        message = f"{made}, which {schedule} cannot share evenly between {rounds} rounds"
        hint = f"a multiple of parallel.pp {pp} can be"
        yield Problem("parallel.pp_microbatches", message, hint=hint)


def divisors_of(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [item for item in range(1, number + 1) if number % item == 0]


def divisors(number: int, most: int | None = None) -> str:
    """The divisors of a number up to `most`, as words."""
    return " or ".join(str(item) for item in divisors_of(number) if item <= (most or number))


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
