"""Plans a bench of layouts or settings: plans the run of every point, and creates the bench's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from trainkit.bench.bench_file import (
    LAYOUT,
    Bench,
    BenchLength,
    BenchRun,
    Kind,
    bench_changes,
    effective,
    point_name,
    profiler_changes,
    write_bench,
)
from trainkit.bench.layouts import (
    DEGREES,
    BenchLayout,
    LayoutConstraints,
    Selection,
    all_layouts,
    fill_degrees,
    first_problem,
    parse_layout,
    refuse_duplicates,
    requested_layout,
    select,
)
from trainkit.cluster.target import Target
from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.changes import Change, with_values
from trainkit.errors import ConfigError, UsageError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.submit.create import new_folder
from trainkit.submit.plan_run import Gatherer, gather, plan_run
from trainkit.submit.submission import LoadedPoint, PlannedPoint, job_difference

ORIGIN = "trainkit bench"
OPTION = "--out"
REPEAT = "repeat"
"""The key of the repeat in the values of a group's point."""
Planned = TypeVar("Planned")


@dataclass(frozen=True)
class BenchPoint:
    """One point of a bench before its first run."""

    values: dict[str, Any]
    """The layout, or the values of the swept keys."""
    settings: Mapping[str, Any]
    """The values in the config that make it this point, by dotted key."""
    config: RunConfig
    plan: LaunchPlan
    notes: tuple[str, ...] = ()
    """The values adapted to the layout, one sentence each."""

    @property
    def name(self) -> str:
        return point_name(self.values)

    def run(self, folder: str, repeat: int) -> BenchRun:
        """One of its runs."""
        layout, batch = self.plan.layout, self.plan.batch
        return BenchRun(
            run=folder,
            values=self.values,
            repeat=repeat,
            degrees={name: getattr(layout, name) for name in DEGREES},
            device_batch_size=batch.device_batch_size,
            pp_microbatches=batch.pp_microbatches,
            notes=list(self.notes),
        )


@dataclass(frozen=True)
class BenchRequest:
    """What was typed, for every kind of bench."""

    config: str
    """The file or name of the config."""
    length: BenchLength
    repeats: int
    keep_name: bool
    """Keep the config's name."""


@dataclass(frozen=True)
class PlannedBench:
    """A bench before its first run."""

    kind: Kind
    request: BenchRequest
    points: list[BenchPoint]
    changes: list[Change]
    """The changes to the config for all runs."""
    impossible: Mapping[str, str]
    """Name of an impossible point -> reason."""
    left_out: tuple[str, ...] = ()
    """Names of possible layouts beyond the maximum."""

    @property
    def name(self) -> str:
        """The name of its runs."""
        return self.points[0].config.name

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the first point."""
        return self.points[0].plan

    @property
    def runs(self) -> list[PlannedPoint]:
        """All points once, then all of them again for each further repeat.

        What disturbs the machine for a while thus disturbs several points, not one.
        """
        repeats = range(1, self.request.repeats + 1)
        order = [(repeat, point) for repeat in repeats for point in self.points]
        return [
            PlannedPoint(index, self._group_values(point, repeat), point.config, point.plan)
            for index, (repeat, point) in enumerate(order)
        ]

    @cached_property
    def arrays(self) -> list[list[PlannedPoint]]:
        """The runs by the array on Slurm that has them, in the order in which the arrays run.

        One has them all if their jobs have one script and size. Otherwise every kind of job has one for each
        round of repeats.
        """
        kinds: list[list[PlannedPoint]] = []
        for item in self.runs:
            own = next((runs for runs in kinds if not job_difference(runs[0], item)), None)
            if own is None:
                kinds.append(own := [])
            own.append(item)
        if len(kinds) == 1:
            return kinds
        num_points = len(self.points)
        rounds = range(self.request.repeats)
        return [
            [item for item in kind if item.index // num_points == one] for one in rounds for kind in kinds
        ]

    def _group_values(self, point: BenchPoint, repeat: int) -> dict[str, Any]:
        return {**point.values, REPEAT: repeat} if self.request.repeats > 1 else point.values

    def to_dict(self) -> dict[str, Any]:
        """The points that would run, and those that would not, as a JSON object."""
        points = [
            {
                **({LAYOUT: item.name} if self.kind == "layouts" else {}),
                "values": dict(item.settings),
                "notes": list(item.notes),
            }
            for item in self.points
        ]
        return {
            "layouts" if self.kind == "layouts" else "points": points,
            "repeats": self.request.repeats,
            "impossible": dict(self.impossible),
            "left_out": list(self.left_out),
        }

    def create(self, folder: Path, run_names: Sequence[str]) -> Bench:
        """Write bench.json in the folder; `run_names` are the folders of the runs in it."""
        num_points = len(self.points)
        bench = Bench(
            folder=folder.absolute(),
            kind=self.kind,
            backend=self.plan.backend,
            device=self.plan.device,
            length=self.request.length,
            repeats=self.request.repeats,
            keys=tuple(self.points[0].values),
            runs=tuple(
                self.points[index % num_points].run(name, index // num_points + 1)
                for index, name in enumerate(run_names)
            ),
        )
        write_bench(bench, self.request.config, self.changes, self.impossible, self.left_out)
        return bench

    def create_local(self, out: Path | None) -> Bench:
        """Create the folder of a bench on this machine; UsageError if it cannot be written."""
        # A layout is a name for a folder; values of settings can be anything.
        is_named = self.kind == "layouts"
        names = [item.name if is_named else f"point-{index}" for index, item in enumerate(self.points)]
        if self.request.repeats > 1:
            repeats = range(1, self.request.repeats + 1)
            names = [f"{name}.repeat-{repeat}" for repeat in repeats for name in names]
        with new_folder(self.name, out, OPTION) as (folder, _):
            return self.create(folder, names)


def plan_settings(request: BenchRequest, points: Iterable[LoadedPoint]) -> PlannedBench:
    """Plan the run of every point of a sweep; `points` are the values and the config with these values.

    Points that cannot run are listed with the reason. Raises the ConfigError of the first point if none can
    run, and UsageError for a swept key that a bench sets itself.
    """
    plan = SettingsPlanner(request)
    errors: list[ConfigError] = []
    planned: list[BenchPoint] = []
    impossible: dict[str, str] = {}
    for _, values, loaded in points:
        try:
            if isinstance(loaded, ConfigError):
                raise loaded
            planned.append(plan.point(values, loaded))
        except ConfigError as error:
            errors.append(error)
            impossible[point_name(values)] = first_problem(error)
    if not planned:
        raise errors[0]
    return PlannedBench("settings", request, planned, plan.changes, impossible)


class SettingsPlanner:
    """Plans the points of a sweep, which share the cluster and mostly the data."""

    def __init__(self, request: BenchRequest) -> None:
        self.request = request
        self.changes: list[Change] = []
        """The changes to the config of the first point."""
        self._gatherer = Gatherer()

    def point(self, values: dict[str, Any], loaded: LoadedConfig) -> BenchPoint:
        """Plan a point; raises ConfigError if it cannot run."""
        length = self.request.length
        own = bench_changes(loaded.config, "settings", length, self.request.keep_name)
        _refuse_set_by_bench(values, [*own, *profiler_changes(loaded.config, length, 1)])
        facts = self._gatherer.facts(loaded)
        _refuse_submitit(facts.target)
        changes = effective(own)
        short = with_values(loaded, {item.key: item.value for item in changes}, ORIGIN)
        plan = plan_run(short, facts)
        profiler = effective(profiler_changes(short.config, length, plan.world_size))
        full = with_values(short, {item.key: item.value for item in profiler}, ORIGIN)
        self.changes = self.changes or [*changes, *profiler]
        return BenchPoint(values, values, full.config, plan)


def _refuse_set_by_bench(values: Mapping[str, Any], changes: Sequence[Change]) -> None:
    for key in values:
        if key in ("launch", "launch.backend", "launch.cluster"):
            raise UsageError(
                f"--sweep {key}: all points of a bench run in one place", hint="run one bench for each"
            )
        for change in changes:
            if change.key == key or change.key.startswith(f"{key}."):
                raise UsageError(
                    f"--sweep {key}: a bench sets {change.key} itself ({change.why})", hint="remove it"
                )


def _refuse_submitit(target: Target) -> None:
    if target.backend == "submitit":
        raise UsageError("trainkit does not submit arrays through submitit", hint="add --backend sbatch")


def plan_layouts(request: BenchRequest, loaded: LoadedConfig, layouts: Sequence[str]) -> PlannedBench:
    """Choose the layouts, the typed ones or all possible ones, and plan the run of each.

    Raises ConfigError and UsageError.
    """
    if loaded.config.has_user_task:
        message = f"is {loaded.config.task}, whose possible layouts are unknown"
        hint = "`trainkit bench layouts` needs the task causal_lm; `trainkit bench settings` takes any task"
        raise ConfigError([loaded.problem("task", message, hint)])
    if loaded.config.uses_transformers:
        message = "is transformers, whose memory is unknown"
        hint = (
            "`trainkit bench layouts` needs trainkit's own decoder; `trainkit bench settings` takes any model"
        )
        raise ConfigError([loaded.problem("model.architecture", message, hint)])
    facts = gather(loaded)
    _refuse_submitit(facts.target)
    constraints = _find_constraints(loaded, facts)
    changes = effective(
        [
            *bench_changes(loaded.config, "layouts", request.length, request.keep_name),
            *profiler_changes(loaded.config, request.length, constraints.world_size),
        ]
    )
    short = with_values(loaded, {change.key: change.value for change in changes}, ORIGIN)

    def plan(layout: BenchLayout) -> BenchPoint:
        values = with_values(short, layout.values, f"layout {layout.name}")
        made = plan_run(values, facts)
        return BenchPoint({LAYOUT: layout.name}, layout.values, values.config, made, layout.notes)

    selection, points = _select(short, constraints, layouts, plan)
    return PlannedBench("layouts", request, points, changes, selection.impossible, selection.left_out)


def _select(
    short: LoadedConfig,
    constraints: LayoutConstraints,
    typed: Sequence[str],
    plan: Callable[[BenchLayout], Planned],
) -> tuple[Selection, list[Planned]]:
    """The typed layouts, which must all be possible, else all possible ones; with their plans."""
    if not typed:
        return select(*all_layouts(short.config.parallel, constraints), plan)
    layouts = []
    for text in typed:
        values = {f"parallel.{key}": value for key, value in fill_degrees(parse_layout(text)).items()}
        parallel = with_values(short, values, f"--layout {text}").config.parallel
        layouts.append(requested_layout(text, parallel, constraints))
    refuse_duplicates(layouts)
    return Selection(tuple(layouts), {}, ()), [plan(item) for item in layouts]


def _find_constraints(loaded: LoadedConfig, facts: Facts) -> LayoutConstraints:
    """The sizes of the config and the number of processes, from a plan without layout and batch."""
    degrees = {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "pp": 1, "cp": 1}
    values = {f"parallel.{key}": value for key, value in degrees.items()}
    neutral = with_values(
        loaded, {**values, "train.device_batch_size": 1, "train.global_batch_size": None}, ORIGIN
    )
    assert facts.data is not None
    plan = make_plan(neutral, replace(facts, data=None, missing=frozenset()))
    config, train = loaded.config, loaded.config.train
    return LayoutConstraints(
        world_size=plan.world_size,
        node_size=plan.workers_per_node,
        shape=resolve_model_shape(config.model, facts.data.vocab_size),
        seq_len=config.data.seq_len,
        device_batch_size=train.device_batch_size,
        global_batch_size=train.global_batch_size or train.device_batch_size * plan.world_size,
    )
