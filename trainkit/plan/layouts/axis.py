"""The axis of layouts of a bench: the requested ones, or all ways to split the processes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.config.names import near
from trainkit.config.running import ParallelConfig
from trainkit.config.yamlfile import parse_value
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.formats import JsonObject
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import divisors, divisors_of, layout_problems, make_layout
from trainkit.plan.layouts.choices import LONG_SEQUENCE, enumerate_layouts
from trainkit.plan.model_shape import ModelShape


@dataclass(frozen=True)
class LayoutConstraints:
    """The values that all layouts of a bench share and must be compatible with."""

    world_size: int
    node_size: int
    """Processes per node."""
    shape: ModelShape
    seq_len: int
    device_batch_size: int
    """The device batch size of the config."""
    global_batch_size: int
    """Samples per step, the same on every layout."""


@dataclass(frozen=True)
class FittedBatch:
    """The batch per process on a layout."""

    device_batch_size: int
    microbatches: int
    notes: tuple[str, ...]
    """The differences from the config with their reasons, one sentence each."""


def fit_batch(
    layout: Layout, parallel: ParallelConfig, constraints: LayoutConstraints, microbatches: int | None
) -> FittedBatch:
    """The batch per process that divides the global batch and that the layout allows.

    `microbatches` fixes their number. Raises ConfigError if there is no such batch.
    """
    if constraints.global_batch_size % layout.dp:
        total = constraints.global_batch_size
        message = f"is {total}, which is not a multiple of {layout.dp} data-parallel processes"
        raise ConfigError([Problem("train.global_batch_size", message, hint=_sizes(constraints, layout))])
    share = constraints.global_batch_size // layout.dp
    problems: list[Problem] = []
    for size in _nearest(share, constraints.device_batch_size):
        for number in _microbatches(layout, size, parallel.pp_microbatches, microbatches):
            tried = parallel.model_copy(update={"pp_microbatches": number})
            found = list(
                layout_problems(layout, tried, constraints.shape, size, constraints.seq_len, share // size)
            )
            if not found:
                return FittedBatch(size, number, tuple(_notes(layout, parallel, constraints, size, number)))
            problems = problems or found
    raise ConfigError(problems)


def _sizes(constraints: LayoutConstraints, layout: Layout) -> str:
    below = constraints.global_batch_size // layout.dp * layout.dp
    return f"{' or '.join(str(size) for size in (below, below + layout.dp) if size)} works"


def _nearest(share: int, wanted: int) -> list[int]:
    """The divisors of `share`, nearest to `wanted` first; smaller ones first, to save memory."""
    return sorted(divisors_of(share), key=lambda size: (size > wanted, abs(size - wanted)))


def _microbatches(layout: Layout, size: int, wanted: int, fixed: int | None) -> Iterator[int]:
    """The possible numbers of microbatches: the fixed one, else those nearest to `wanted` first."""
    if fixed is not None or layout.pp == 1:
        yield wanted if fixed is None else fixed
        return
    yield from sorted(divisors_of(size), key=lambda number: (abs(number - wanted), number))


def _notes(
    layout: Layout, parallel: ParallelConfig, constraints: LayoutConstraints, size: int, microbatches: int
) -> Iterator[str]:
    wanted, share = constraints.device_batch_size, constraints.global_batch_size // layout.dp
    if size != wanted:
        if share % wanted:
            total = constraints.global_batch_size
            reason = f"each of {layout.dp} data-parallel processes gets {share} of {total} samples"
        else:
            reason = f"it is split into {microbatches} microbatches"
        yield f"train.device_batch_size: {size} instead of {wanted}: {reason}"
    if microbatches != parallel.pp_microbatches:
        reason = f"a batch of {size} allows {divisors(size)}"
        yield f"parallel.pp_microbatches: {microbatches} instead of {parallel.pp_microbatches}: {reason}"


DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


@dataclass(frozen=True)
class BenchLayout:
    """One layout of a bench, and its changes to the config."""

    name: str
    """Its degrees above 1 and other requested keys, as ``--layout`` takes them."""
    layout: Layout
    values: Mapping[str, object]
    """Config values by dotted key."""
    notes: tuple[str, ...] = ()
    """The values adapted to the layout, one sentence each."""


def parse_layout(text: str) -> JsonObject:
    """Parse the keys and values of ``--layout tp=2,dp_shard=2``, keys of the section `parallel`.

    Raises UsageError if the text is invalid.
    """
    origin, values = f"--layout {text}", {}
    for part in text.split(","):
        key, equals, raw = (piece.strip() for piece in part.partition("="))
        if not equals or not raw:
            raise UsageError(
                f"{origin}: {part.strip()!r} is not KEY=VALUE", hint="for example --layout tp=2,dp_shard=2"
            )
        if key not in ParallelConfig.model_fields:
            match = near(key, ParallelConfig.model_fields)
            hint = (
                f"did you mean {match}?"
                if match
                else f"its keys are {', '.join(ParallelConfig.model_fields)}"
            )
            raise UsageError(f"{origin}: the section parallel has no key {key}", hint=hint)
        if key in values:
            raise UsageError(f"{origin}: {key} appears twice", hint="give each key once")
        try:
            values[key] = parse_value(raw)
        except ValueError as error:
            raise UsageError(f"{origin}: {key}: {error}", hint="values are written as in a config") from None
    return values


def fill_degrees(values: JsonObject) -> JsonObject:
    """A typed layout with the defaults of the degrees that it omits."""
    missing = dict.fromkeys(DEGREES, 1)
    if values.get("dp_replicate") != -1:
        missing["dp_shard"] = -1  # derived
    return {**missing, **values}


def requested_layout(text: str, parallel: ParallelConfig, constraints: LayoutConstraints) -> BenchLayout:
    """The layout of a ``--layout`` whose values are in `parallel`.

    Raises ConfigError if it is impossible.
    """
    typed = parse_layout(text)
    try:
        layout = make_layout(parallel, constraints.world_size)[0]
        fixed = parallel.pp_microbatches if "pp_microbatches" in typed else None
        return _fitted(layout, parallel, constraints, typed, fixed)
    except ConfigError as error:
        origin = f"--layout {text}"
        problems = [Problem(item.key, item.message, origin, item.hint) for item in error.problems]
        raise ConfigError(problems) from None


def all_layouts(
    parallel: ParallelConfig, constraints: LayoutConstraints
) -> tuple[list[BenchLayout], dict[str, str]]:
    """The possible layouts, simplest first, and the reasons why others are impossible."""
    found: list[BenchLayout] = []
    impossible: dict[str, str] = {}
    splits_sequence = parallel.cp > 1 or constraints.seq_len >= LONG_SEQUENCE
    for layout in sorted(
        enumerate_layouts(constraints.world_size, constraints.node_size, splits_sequence), key=_complexity
    ):
        try:
            found.append(_fitted(layout, parallel, constraints, {}, None))
        except ConfigError as error:
            impossible[layout_name(layout, {})] = error.problems[0].sentence
    return found, impossible


def _complexity(layout: Layout) -> tuple[int, ...]:
    """A sort key: fewer kinds of parallelism first, then the more common ones."""
    degrees = (layout.dp_shard, layout.dp_replicate, layout.tp, layout.pp, layout.cp)
    return (sum(degree > 1 for degree in degrees), *(-degree for degree in degrees))


def _fitted(
    layout: Layout,
    parallel: ParallelConfig,
    constraints: LayoutConstraints,
    typed: JsonObject,
    microbatches: int | None,
) -> BenchLayout:
    batch = fit_batch(layout, parallel, constraints, microbatches)
    others = {key: value for key, value in typed.items() if key not in DEGREES}
    values = {
        **{f"parallel.{name}": getattr(layout, name) for name in DEGREES},
        **{f"parallel.{key}": value for key, value in others.items()},
        "train.global_batch_size": constraints.global_batch_size,
        "train.device_batch_size": batch.device_batch_size,
        "parallel.pp_microbatches": batch.microbatches,
    }
    return BenchLayout(layout_name(layout, others), layout, values, batch.notes)


def layout_name(layout: Layout, others: Mapping[str, object]) -> str:
    """The name of a layout, in the form of ``--layout``: degrees above 1, then other keys."""
    degrees = {name: getattr(layout, name) for name in DEGREES if getattr(layout, name) > 1}
    words = [f"{key}={_yaml(value)}" for key, value in {**degrees, **others}.items()]
    return ",".join(words) or "dp_shard=1"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_duplicates(layouts: Sequence[BenchLayout]) -> None:
    """Raise UsageError when two ``--layout`` are the same."""
    names = [item.name for item in layouts]
    duplicate = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if duplicate is not None:
        raise UsageError(f"two --layout are the same: {duplicate}", hint="remove one of them")
