"""Checks parallelism degrees against the number of processes, the model and the batch, and names layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trainkit.config.running import ParallelConfig
from trainkit.config.yamlfile import parse_value
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.plan.launch import Layout
from trainkit.plan.step_work import SPLIT_BACKWARD, StepWork, num_stages


def layout_problems(work: StepWork) -> Iterator[Problem]:
    """Yield every problem that makes a layout invalid for a model and a batch."""
    yield from _tensor_problems(work)
    yield from _expert_problems(work)
    pp, schedule, num_layers = work.layout.pp, work.parallel.pp_schedule, work.shape.num_layers
    stages = num_stages(pp, schedule)
    if pp > 1 and stages > num_layers:
        message = f"is {pp}, which needs {stages} stages, but the model has {num_layers} layers"
        hint = f"with {schedule}, set parallel.pp to at most {num_layers * pp // stages}"
        yield Problem("parallel.pp", message, hint=hint)
    yield from batch_problems(work)


def batch_problems(work: StepWork) -> Iterator[Problem]:
    """Yield every problem that makes a layout invalid for a batch, regardless of the model."""
    layout, parallel, schedule = work.layout, work.parallel, work.parallel.pp_schedule
    if layout.cp > 1 and work.seq_len % (2 * layout.cp):
        message = f"is {layout.cp}, but data.seq_len {work.seq_len} is not a multiple of 2 x {layout.cp}"
        hint = (
            "set data.seq_len to a multiple: to balance the work, each rank gets a chunk from the start and "
            "one from the end"
        )
        yield Problem("parallel.cp", message, hint=hint)
    if layout.pp > 1 and schedule in SPLIT_BACKWARD:
        why = f"which {schedule} does not support, because this schedule splits the backward pass"
        if parallel.activation_checkpointing in ("pointwise", "selective"):
            hint = "use full or none, or set parallel.pp_schedule to gpipe, 1f1b or interleaved_1f1b"
            message = f"is {parallel.activation_checkpointing}, {why}"
            yield Problem("parallel.activation_checkpointing", message, hint=hint)
        if parallel.compile:
            hint = "set parallel.pp_schedule to gpipe, 1f1b or interleaved_1f1b"
            yield Problem("parallel.compile", f"is true, {why}", hint=hint)
    yield from microbatch_problems(layout, parallel, work.device_batch_size, work.accumulation_steps)


def _tensor_problems(work: StepWork) -> Iterator[Problem]:
    layout, shape, seq_len = work.layout, work.shape, work.seq_len
    if layout.tp == 1:
        return
    sizes = {
        "model.num_heads": shape.num_heads,
        "model.num_kv_heads": shape.num_kv_heads,
        **({"model.ffn_dim": shape.ffn_dim} if shape.dense_layers else {}),
        **({"model.moe num_shared x expert_ffn_dim": shape.moe.shared_dim} if shape.moe else {}),
        "model.vocab_size": shape.vocab_size,
        "model.dim": shape.dim,
    }
    for key, size in sizes.items():
        if size % layout.tp:
            message = f"is {layout.tp}, which does not divide {key} {size}"
            yield Problem("parallel.tp", message, hint=f"set parallel.tp to {divisors(size, most=layout.tp)}")
    share = seq_len // layout.cp
    if work.parallel.sequence_parallel and share % layout.tp:
        of = f"data.seq_len {seq_len}" + (f" / parallel.cp {layout.cp}" if layout.cp > 1 else "")
        message = f"is true, but parallel.tp {layout.tp} does not divide {of}"
        yield Problem(
            "parallel.sequence_parallel", message, hint="use false to disable the sharding of the sequence"
        )


def _expert_problems(work: StepWork) -> Iterator[Problem]:
    layout, moe = work.layout, work.shape.moe
    if layout.ep == 1:
        return
    if moe is None:
        message = f"is {layout.ep}, but the model has no experts"
        yield Problem("parallel.ep", message, hint="set model.moe, or set parallel.ep to 1")
        return
    if layout.tp > 1 and not work.parallel.sequence_parallel:
        message = f"is {layout.ep} and parallel.tp is {layout.tp}, but parallel.sequence_parallel is false"
        hint = (
            "set parallel.sequence_parallel to true: otherwise, tensor-parallel ranks route the same tokens"
        )
        yield Problem("parallel.ep", message, hint=hint)
    if moe.num_experts % layout.ep:
        message = f"is {layout.ep}, which does not divide the {moe.num_experts} experts of model.moe"
        hint = f"set parallel.ep to {divisors(math.gcd(moe.num_experts, layout.expert_ranks))}"
        yield Problem("parallel.ep", message, hint=hint)
    # Each expert's matrices are sharded in their rows, which `fully_shard` can only divide evenly.
    for name, size in (("expert_ffn_dim", moe.ffn_dim), ("model.dim", work.shape.dim)):
        if size % layout.expert_shards:
            message = (
                f"is {layout.ep}, so each expert is sharded over {layout.expert_shards} ranks, a number that "
                f"does not divide {name} {size}"
            )
            hint = "increase parallel.ep or parallel.dp_replicate, so that each expert is on fewer ranks"
            yield Problem("parallel.ep", message, hint=hint)


def microbatch_problems(
    layout: Layout, parallel: ParallelConfig, device_batch_size: int, accumulation_steps: int
) -> Iterator[Problem]:
    """Yield every problem with the number of microbatches of a pipeline."""
    if layout.pp == 1:
        return
    pp, schedule, microbatches = layout.pp, parallel.pp_schedule, parallel.pp_microbatches
    stages = num_stages(pp, schedule)
    if device_batch_size % microbatches:
        message = f"is {microbatches}, which does not divide train.device_batch_size {device_batch_size}"
        hint = f"set parallel.pp_microbatches to {divisors(device_batch_size)}"
        yield Problem("parallel.pp_microbatches", message, hint=hint)
    # Each step runs the pipeline schedule once, over the microbatches of all accumulation steps.
    count = microbatches * accumulation_steps
    made = f"is {microbatches}" + (f" x {accumulation_steps} accumulated" if accumulation_steps > 1 else "")
    least = {"1f1b": pp, "dualpipe_v": stages}.get(schedule, 1)
    if count < least:
        message = f"{made}, fewer than the {least} that {schedule} needs with parallel.pp {pp}"
        yield Problem(
            "parallel.pp_microbatches", message, hint="use gpipe, which supports any number of microbatches"
        )
    rounds = max(1, count // pp)
    if schedule.startswith("interleaved") and count % rounds:
        message = f"{made}, which {schedule} cannot divide into {rounds} equal rounds"
        hint = f"use a multiple of parallel.pp {pp}"
        yield Problem("parallel.pp_microbatches", message, hint=hint)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [item for item in range(1, number + 1) if number % item == 0]


def divisors(number: int, most: int | None = None) -> str:
    """Return the divisors of a number up to `most` as text, such as ``1 or 2 or 4``."""
    return " or ".join(str(item) for item in divisors_of(number) if item <= (most or number))


def make_layout(parallel: ParallelConfig, world_size: int) -> tuple[Layout, str]:
    """Return the layout of `world_size` processes and its description; a degree of -1 is derived.

    Raises ConfigError if the product of the degrees does not equal the number of processes.
    """
    degrees = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    model = parallel.tp * parallel.pp * parallel.cp
    derived = [name for name, degree in degrees.items() if degree == -1]
    if len(derived) == 2:
        hint = "set dp_shard: 1 to only replicate the model, or dp_replicate: 1 to only shard the model"
        raise _problem("dp_replicate", "is -1, and so is parallel.dp_shard: only one can be derived", hint)
    if world_size % model:
        names = [name for name in ("tp", "pp", "cp") if getattr(parallel, name) > 1]
        product = " x ".join(f"parallel.{name} {getattr(parallel, name)}" for name in names)
        subject = f": {product} does" if len(names) > 1 else ", which does"
        message = f"is {getattr(parallel, names[0])}{subject} not divide {_processes(world_size, 1)}"
        can = f"{'the product' if len(names) > 1 else 'the degree'} can be {divisors(world_size)}"
        raise _problem(names[0], message, f"{can}, or use a multiple of {model} processes: --gpus-per-node")
    note = ""
    if derived:
        given = next(name for name in degrees if name not in derived)
        if world_size % (degrees[given] * model):
            message = f"is {degrees[given]}, which does not divide {_processes(world_size, model)}"
            raise _problem(given, message, f"the degree can be {divisors(world_size // model)}")
        degrees[derived[0]] = world_size // (degrees[given] * model)
        note = f" (derived from parallel.{derived[0]}: -1)"
    replicate, shard = degrees["dp_replicate"], degrees["dp_shard"]
    if replicate * shard * model != world_size:
        message = (
            f"is {shard}: parallel.dp_replicate {replicate} x {shard} = {replicate * shard}, "
            f"but there {'is' if world_size == 1 else 'are'} {_processes(world_size, model)}"
        )
        raise _problem("dp_shard", message, "use -1 to derive the degree from the number of processes")
    layout = Layout(replicate, shard, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep)
    if layout.expert_ranks % layout.ep:
        others = {name: degree for name, degree in (("cp", layout.cp), ("tp", layout.tp)) if degree > 1}
        of = " x ".join(f"parallel.{name} {degree}" for name, degree in {"dp_shard": shard, **others}.items())
        message = f"is {layout.ep}, which does not divide {of}"
        raise _problem("ep", message, f"set parallel.ep to {divisors(layout.expert_ranks)}")
    return layout, describe_layout(layout) + note


def _problem(name: str, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(f"parallel.{name}", message, hint=hint)])


def describe_layout(layout: Layout) -> str:
    """Describe the replicas and shards of a layout in words."""
    model_ranks = layout.tp * layout.pp * layout.cp
    holder = "process" if model_ranks == 1 else f"group of {model_ranks} processes"
    holders = "processes" if model_ranks == 1 else f"groups of {model_ranks} processes"
    copies, shards = layout.dp_replicate, layout.dp_shard
    if layout.dp == 1:
        text = f"one replica on one {holder}"
    elif shards == 1:
        text = f"{copies} replicas, one per {holder}"
    elif copies == 1:
        text = f"one replica, sharded over {shards} {holders}"
    else:
        text = f"{copies} replicas, each sharded over {shards} {holders}"
    inside = [
        f"{degree} {kind}-parallel"
        for degree, kind in ((layout.pp, "pipeline"), (layout.tp, "tensor"), (layout.cp, "context"))
        if degree > 1
    ]
    text += f" ({' x '.join(inside)})" if inside else ""
    return text + (f", with experts divided over {layout.ep} ranks" if layout.ep > 1 else "")


def _processes(world_size: int, model: int) -> str:
    text = "1 process" if world_size == 1 else f"{world_size} processes"
    return text if model == 1 else f"{text} / {model} (tp x pp x cp)"


DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def parse_layout(text: str) -> dict[str, object]:
    """Parse ``--layout tp=2,dp_shard=2`` into keys of the config section `parallel`.

    Degrees that are not given are 1, except for `dp_shard`, which is derived unless `dp_replicate` is -1.
    Raises UsageError for an invalid layout.
    """
    origin = f"--layout {text}"
    values: dict[str, object] = {}
    for part in text.split(","):
        key, _, raw = (piece.strip() for piece in part.partition("="))
        if not raw:
            hint = "for example --layout tp=2,dp_shard=2"
            raise UsageError(f"{origin}: {part.strip()!r} is not KEY=VALUE", hint=hint)
        if key not in ParallelConfig.model_fields:
            hint = f"the keys of this section are {', '.join(ParallelConfig.model_fields)}"
            raise UsageError(f"{origin}: the section parallel has no key {key}", hint=hint)
        if key in values:
            raise UsageError(f"{origin}: {key} appears twice", hint="specify each key only once")
        try:
            values[key] = parse_value(raw)
        except ValueError as error:
            raise UsageError(
                f"{origin}: {key}: {error}", hint="write the values as in a config file"
            ) from None
    missing = dict.fromkeys(DEGREES, 1)
    if values.get("dp_replicate") != -1:
        missing["dp_shard"] = -1  # -1 means that dp_shard is derived.
    return {**missing, **values}


def layout_name(layout: Layout, others: Mapping[str, object]) -> str:
    """Return the layout's name in ``--layout`` syntax: the degrees above 1, then the `others` keys."""
    degrees = {name: getattr(layout, name) for name in DEGREES if getattr(layout, name) > 1}
    return (
        ",".join(f"{key}={yaml_text(value)}" for key, value in {**degrees, **others}.items()) or "dp_shard=1"
    )


def yaml_text(value: object) -> str:
    """Return a value of the section `parallel` as YAML text."""
    return str(value).lower() if isinstance(value, bool) else str(value)
