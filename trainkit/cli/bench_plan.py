"""Plans a bench of layouts: which there are, and the run of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from trainkit.errors import UsageError
from trainkit.frozen import dataclass

if TYPE_CHECKING:
    from trainkit.bench.fitting import Site
    from trainkit.bench.layouts import BenchLayout, Selection
    from trainkit.bench.shorten import Length
    from trainkit.cli.options import ConfigRequest
    from trainkit.config import LoadedConfig
    from trainkit.config.changes import Change
    from trainkit.config.training import DataConfig
    from trainkit.plan.check import DataLook
    from trainkit.plan.cluster import Target
    from trainkit.plan.launch import LaunchPlan
    from trainkit.submit.sweep import PlannedPoint

ORIGIN = "trainkit bench"
Planned = TypeVar("Planned")


@dataclass(frozen=True)
class LayoutsRequest:
    """What was typed besides the config."""

    layouts: tuple[str, ...]
    steps: int
    warmup: int
    out: str | None
    at_once: int
    follow: bool
    dry_run: bool
    as_json: bool


@dataclass(frozen=True)
class PlannedBench:
    """Everything that is known before the first run."""

    config: str
    """The file that was asked for."""
    length: Length
    selection: Selection
    points: list[PlannedPoint]
    changes: list[Change]

    @property
    def plan(self) -> LaunchPlan:
        """That of the first layout."""
        return self.points[0].plan


def plan_bench(request: ConfigRequest, typed: LayoutsRequest) -> PlannedBench:
    """Choose the layouts and plan the run of each.

    Raises ConfigError and UsageError with what is wrong.
    """
    from trainkit.bench.shorten import Length, changes
    from trainkit.cli.launch import look_once, plan_for
    from trainkit.config.changes import with_values
    from trainkit.submit.sweep import PlannedPoint
    from trainkit.submit.target import make_target

    length = Length(typed.steps, typed.warmup)
    loaded = request.load()
    target, look = make_target(loaded), look_once()
    if target.backend == "submitit":
        raise UsageError(
            "submitit has arrays of its own kind, which trainkit does not make", hint="add --backend sbatch"
        )
    site = _find_site(loaded, target, look)
    changed = changes(loaded.config, length, site.world_size, keeps_name="name" in request.flags)
    short = with_values(loaded, {change.key: change.value for change in changed}, ORIGIN)

    def plan(layout: BenchLayout) -> tuple[BenchLayout, LoadedConfig, LaunchPlan]:
        config = with_values(short, layout.values, f"layout {layout.name}")
        return layout, config, plan_for(config, target=target, look=look)

    selection, plans = _select(short, site, typed.layouts, plan)
    points = [
        PlannedPoint(index, {"layout": layout.name}, config.config, made)
        for index, (layout, config, made) in enumerate(plans)
    ]
    return PlannedBench(request.path, length, selection, points, changed)


def _select(
    short: LoadedConfig, site: Site, typed: Sequence[str], plan: Callable[[BenchLayout], Planned]
) -> tuple[Selection, list[Planned]]:
    """The layouts that were typed, all of which must be possible, or all that are."""
    from trainkit.bench.layouts import (
        Selection,
        all_layouts,
        asked_layout,
        parse_layout,
        refuse_twice,
        select,
        with_all_degrees,
    )
    from trainkit.config.changes import with_values

    if not typed:
        return select(*all_layouts(short.config.parallel, site), plan)
    asked = []
    for text in typed:
        values = {f"parallel.{key}": value for key, value in with_all_degrees(parse_layout(text)).items()}
        parallel = with_values(short, values, f"--layout {text}").config.parallel
        asked.append(asked_layout(text, parallel, site))
    refuse_twice(asked)
    return Selection(tuple(asked), {}, ()), [plan(item) for item in asked]


def _find_site(loaded: LoadedConfig, target: Target, look: Callable[[DataConfig], DataLook]) -> Site:
    """How many processes there are, found by planning them without regard to the model and its batch."""
    from trainkit.bench.fitting import Site
    from trainkit.config.changes import with_values
    from trainkit.plan.machine import detect_machine
    from trainkit.plan.make_plan import make_plan
    from trainkit.plan.model_shape import resolve_model_shape

    degrees = {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "pp": 1, "cp": 1}
    values = {f"parallel.{key}": value for key, value in degrees.items()}
    neutral = with_values(
        loaded, {**values, "train.device_batch_size": 1, "train.global_batch_size": None}, ORIGIN
    )
    plan = make_plan(neutral, detect_machine(), target)
    config, train = loaded.config, loaded.config.train
    return Site(
        world_size=plan.world_size,
        node_size=plan.workers_per_node,
        shape=resolve_model_shape(config.model, look(config.data).vocab_size),
        seq_len=config.data.seq_len,
        device_batch_size=train.device_batch_size,
        global_batch_size=train.global_batch_size or train.device_batch_size * plan.world_size,
    )
