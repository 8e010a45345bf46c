"""Which layouts a bench runs: those that were asked for, or all ways to split the processes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from trainkit.config.names import near
from trainkit.config.running import ParallelConfig
from trainkit.config.yamlfile import parse_value
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.plan.launch import Layout
from trainkit.plan.layouts.choices import LONG_SEQUENCE
from trainkit.plan.layouts.rules import divisors, layout_problems, make_layout
from trainkit.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Site:
    """What all layouts of a bench have in common."""

    world_size: int
    node_size: int
    """Processes of a node."""
    shape: ModelShape
    seq_len: int
    device_batch_size: int
    """As the config has it."""
    global_batch_size: int
    """Samples of a step, the same on every layout."""


@dataclass(frozen=True)
class FittedBatch:
    """What one process reads at once on a layout."""

    device_batch_size: int
    microbatches: int
    notes: tuple[str, ...]
    """What differs from the config, and why."""


def fit(layout: Layout, parallel: ParallelConfig, site: Site, microbatches: int | None) -> FittedBatch:
    """The batch of a process that shares the samples of a step evenly and that the layout can be run with.

    `microbatches` is a number that was asked for. Raises ConfigError when there is none.
    """
    if site.global_batch_size % layout.dp:
        message = (
            f"is {site.global_batch_size}, which {layout.dp} data-parallel processes cannot share evenly"
        )
        raise ConfigError([Problem("train.global_batch_size", message, hint=_sizes(site, layout))])
    share = site.global_batch_size // layout.dp
    problems: list[Problem] = []
    for size in _nearest(share, site.device_batch_size):
        for number in _microbatches(layout, size, parallel.pp_microbatches, microbatches):
            tried = parallel.model_copy(update={"pp_microbatches": number})
            found = list(layout_problems(layout, tried, site.shape, size, site.seq_len, share // size))
            if not found:
                return FittedBatch(size, number, tuple(_notes(layout, parallel, site, size, number)))
            problems = problems or found
    raise ConfigError(problems)


def _sizes(site: Site, layout: Layout) -> str:
    below = site.global_batch_size // layout.dp * layout.dp
    return f"{' or '.join(str(size) for size in (below, below + layout.dp) if size)} would do"


def _nearest(share: int, wanted: int) -> list[int]:
    """The divisors of a share, those that take no more memory than what is wanted first, nearest first."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    return sorted(sizes, key=lambda size: (size > wanted, abs(size - wanted)))


def _microbatches(layout: Layout, size: int, wanted: int, asked: int | None) -> Iterator[int]:
    """How a batch can be cut: what was asked for, else as nearly as possible what the config has."""
    if asked is not None or layout.pp == 1:
        yield wanted if asked is None else asked
        return
    cuts = [number for number in range(1, size + 1) if size % number == 0]
    yield from sorted(cuts, key=lambda number: (abs(number - wanted), number))


def _notes(
    layout: Layout, parallel: ParallelConfig, site: Site, size: int, microbatches: int
) -> Iterator[str]:
    wanted, share = site.device_batch_size, site.global_batch_size // layout.dp
    if size != wanted:
        if share % wanted:
            why = f"each of {layout.dp} data-parallel has {share} of the {site.global_batch_size} samples"
        else:
            why = f"it is cut into {microbatches} microbatches"
        yield f"train.device_batch_size: {size} instead of {wanted}: {why}"
    if microbatches != parallel.pp_microbatches:
        why = f"of a batch of {size} {parallel.pp_schedule} over {layout.pp} ranks can have {divisors(size)}"
        yield f"parallel.pp_microbatches: {microbatches} instead of {parallel.pp_microbatches}: {why}"


DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
MOST_LAYOUTS = 16
"""Layouts that are run without being named: a bench is meant to end soon."""


Planned = TypeVar("Planned")


@dataclass(frozen=True)
class BenchLayout:
    """One layout of a bench: what is changed in the config for it."""

    name: str
    """Its degrees above 1 and what else was asked for, as ``--layout`` takes them."""
    layout: Layout
    values: Mapping[str, Any]
    """By dotted key."""
    notes: tuple[str, ...] = ()
    """What had to be adapted to it, one sentence each."""


@dataclass(frozen=True)
class Selection:
    """The layouts of a bench, and those that are not among them."""

    layouts: tuple[BenchLayout, ...]
    impossible: Mapping[str, str]
    """Name of a layout that cannot be run -> why."""
    left_out: tuple[str, ...]
    """Names of those that could be run and are not."""


def parse_layout(text: str) -> dict[str, Any]:
    """What ``--layout tp=2,dp_shard=2`` says: keys of the section `parallel` with their values.

    Raises UsageError.
    """
    origin, values = f"--layout {text}", {}
    for part in text.split(","):
        key, equals, raw = (piece.strip() for piece in part.partition("="))
        if not equals or not raw:
            raise UsageError(
                f"{origin}: {part.strip()!r} is no KEY=VALUE", hint="for example --layout tp=2,dp_shard=2"
            )
        if key not in ParallelConfig.model_fields:
            match = near(key, ParallelConfig.model_fields)
            hint = (
                f"did you mean {match}?" if match else f"there are {', '.join(ParallelConfig.model_fields)}"
            )
            raise UsageError(f"{origin}: the section parallel has no key {key}", hint=hint)
        if key in values:
            raise UsageError(f"{origin}: {key} stands there twice", hint="every key has one value")
        try:
            values[key] = parse_value(raw)
        except ValueError as error:
            raise UsageError(f"{origin}: {key}: {error}", hint="values are those of a config") from None
    return values


def with_all_degrees(values: Mapping[str, Any]) -> dict[str, Any]:
    """A typed layout with the degrees that were left out, which are those of a config without any."""
    missing = dict.fromkeys(DEGREES, 1)
    if values.get("dp_replicate") != -1:
        missing["dp_shard"] = -1  # takes what is left
    return {**missing, **values}


def asked_layout(text: str, parallel: ParallelConfig, site: Site) -> BenchLayout:
    """The layout of a ``--layout`` whose values are in `parallel`.

    Raises ConfigError when it cannot be run.
    """
    typed = parse_layout(text)
    try:
        layout = make_layout(parallel, site.world_size)[0]
        fixed = parallel.pp_microbatches if "pp_microbatches" in typed else None
        return _fitted(layout, parallel, site, typed, fixed)
    except ConfigError as error:
        origin = f"--layout {text}"
        problems = [Problem(item.key, item.message, origin, item.hint) for item in error.problems]
        raise ConfigError(problems) from None


def all_layouts(parallel: ParallelConfig, site: Site) -> tuple[list[BenchLayout], dict[str, str]]:
    """The layouts that the model and the batch allow, the simplest first, and why the others are not."""
    found: list[BenchLayout] = []
    impossible: dict[str, str] = {}
    splits_sequence = parallel.cp > 1 or site.seq_len >= LONG_SEQUENCE
    for layout in sorted(every_layout(site.world_size, site.node_size, splits_sequence), key=_complexity):
        try:
            found.append(_fitted(layout, parallel, site, {}, None))
        except ConfigError as error:
            impossible[name_of(layout, {})] = reason(error)
    return found, impossible


def reason(error: ConfigError) -> str:
    """Why a layout cannot be run, in one line."""
    return f"{error.problems[0].key} {error.problems[0].message}"


def select(
    found: Sequence[BenchLayout],
    impossible: Mapping[str, str],
    plan: Callable[[BenchLayout], Planned],
    most: int = MOST_LAYOUTS,
) -> tuple[Selection, list[Planned]]:
    """The first layouts that can be planned, and what was planned for each.

    Raises ConfigError, that of the first, when there is none.
    """
    chosen: list[BenchLayout] = []
    plans: list[Planned] = []
    refused = dict(impossible)
    left_out: list[str] = []
    errors: list[ConfigError] = []
    for item in found:
        if len(chosen) == most:
            left_out.append(item.name)
            continue
        try:
            plans.append(plan(item))
            chosen.append(item)
        except ConfigError as error:
            errors.append(error)
            refused[item.name] = reason(error)
    if errors and not chosen:
        raise errors[0]
    return Selection(tuple(chosen), refused, tuple(left_out)), plans


def every_layout(world_size: int, node_size: int, splits_sequence: bool) -> Iterator[Layout]:
    """All ways to split processes; tensor parallelism stays within a node of `node_size` processes."""
    factors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    tps = [number for number in factors if number <= node_size]
    cps = factors if splits_sequence else [1]
    for tp, pp, cp, dp_shard in product(tps, factors, cps, factors):
        if world_size % (tp * pp * cp * dp_shard) == 0:
            yield Layout(world_size // (tp * pp * cp * dp_shard), dp_shard, tp, pp, cp)


def _complexity(layout: Layout) -> tuple[int, ...]:
    """How many kinds of parallelism, then the usual ones first."""
    degrees = (layout.dp_shard, layout.dp_replicate, layout.tp, layout.pp, layout.cp)
    return (sum(degree > 1 for degree in degrees), *(-degree for degree in degrees))


def _fitted(
    layout: Layout,
    parallel: ParallelConfig,
    site: Site,
    typed: Mapping[str, Any],
    microbatches: int | None,
) -> BenchLayout:
    batch = fit(layout, parallel, site, microbatches)
    others = {key: value for key, value in typed.items() if key not in DEGREES}
    values = {
        **{f"parallel.{name}": getattr(layout, name) for name in DEGREES},
        **{f"parallel.{key}": value for key, value in others.items()},
        "train.global_batch_size": site.global_batch_size,
        "train.device_batch_size": batch.device_batch_size,
        "parallel.pp_microbatches": batch.microbatches,
    }
    return BenchLayout(name_of(layout, others), layout, values, batch.notes)


def name_of(layout: Layout, others: Mapping[str, Any]) -> str:
    """A layout as ``--layout`` takes it: degrees above 1, then what else differs from the config."""
    degrees = {name: getattr(layout, name) for name in DEGREES if getattr(layout, name) > 1}
    words = [f"{key}={_yaml(value)}" for key, value in {**degrees, **others}.items()]
    return ",".join(words) or "dp_shard=1"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_twice(layouts: Sequence[BenchLayout]) -> None:
    """Raise UsageError when two ``--layout`` mean the same."""
    names = [item.name for item in layouts]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UsageError(f"two --layout mean the same: {twice}", hint="leave one of them out")
