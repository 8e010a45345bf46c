"""Plans a bench: a sweep of layouts, or of any keys, whose points run for a few steps each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.bench.run_bench import (
    LAYOUT,
    PROFILED_STEPS,
    Bench,
    BenchLength,
    BenchRun,
    Kind,
    point_name,
    profiled_ranks,
    write_bench,
)
from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.load import Change, short_training, with_values
from trainkit.errors import ConfigError, UsageError
from trainkit.formats import JsonObject
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layouts.axis import (
    DEGREES,
    LayoutConstraints,
    all_layouts,
    fill_degrees,
    parse_layout,
    refuse_duplicates,
    requested_layout,
)
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.submit.create import new_folder
from trainkit.submit.plan_run import Gatherer, plan_run
from trainkit.submit.submission import LoadedPoint, PlannedPoint, job_difference

ORIGIN = "trainkit bench"
OPTION = "--out"
REPEAT = "repeat"
"""The key of the repeat in the values of a group's point."""
MAX_LAYOUTS = 16
"""Maximum number of layouts to run without --layout, to limit the duration of a bench."""


@dataclass(frozen=True)
class Candidate:
    """A point to plan."""

    values: JsonObject
    """The layout, or the values of the swept keys."""
    loaded: LoadedConfig | ConfigError
    """Its config, or why that is invalid; for a layout, the config of all."""
    settings: Mapping[str, object]
    """The values in the config that make it this point, by dotted key."""
    notes: tuple[str, ...] = ()
    """The values adapted to the layout, one sentence each."""


@dataclass(frozen=True)
class BenchPoint:
    """One point of a bench before its first run."""

    of: Candidate
    config: RunConfig
    plan: LaunchPlan

    @property
    def name(self) -> str:
        return point_name(self.of.values)

    def run(self, folder: str, repeat: int) -> BenchRun:
        """One of its runs."""
        layout, batch = self.plan.layout, self.plan.batch
        return BenchRun(
            run=folder,
            values=self.of.values,
            repeat=repeat,
            degrees={name: getattr(layout, name) for name in DEGREES},
            device_batch_size=batch.device_batch_size,
            pp_microbatches=batch.pp_microbatches,
            notes=list(self.of.notes),
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

    @property
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
        return {**point.of.values, REPEAT: repeat} if self.request.repeats > 1 else point.of.values

    def to_dict(self) -> dict[str, Any]:
        """The points that would run, and those that would not, as a JSON object."""
        points = [
            {
                **({LAYOUT: item.name} if self.kind == "layouts" else {}),
                "values": dict(item.of.settings),
                "notes": list(item.of.notes),
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
            keys=tuple(self.points[0].of.values),
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


def bench_changes(config: RunConfig, kind: Kind, length: BenchLength, keep_name: bool) -> list[Change]:
    """The values that a bench sets in the config of all its runs, changed or not.

    Model, data and optimizer are not among them.
    """
    return [
        *([] if keep_name else _named(config, kind)),
        *short_training(config, length.steps, "bench"),
        *_bare(config),
    ]


def effective(changes: Sequence[Change]) -> list[Change]:
    """The changes that change something."""
    return [change for change in changes if change.value != change.before]


def _named(config: RunConfig, kind: Kind) -> Iterator[Change]:
    yield Change("name", f"{config.name}-{kind}"[:100], config.name, "runs of a bench have their own name")


def _bare(config: RunConfig) -> Iterator[Change]:
    """The changes so that runs save nothing, log less and are not restarted."""
    checkpoint, requeue, logging = config.checkpoint, config.requeue, config.logging
    reason = "a bench saves nothing"
    yield Change("checkpoint.every_steps", None, checkpoint.every_steps, reason)
    yield Change("checkpoint.every_minutes", None, checkpoint.every_minutes, reason)
    yield Change("checkpoint.best_metric", None, checkpoint.best_metric, reason)
    yield Change("checkpoint.async", False, checkpoint.async_save, "a bench needs no memory for saves")
    yield Change("requeue.on", [], list(requeue.on), "a failed run is not restarted")
    yield Change("requeue.follow_ups", 0, requeue.follow_ups, "a failed run is not restarted")
    reason = "the result is summary.csv"
    yield Change("logging.tensorboard", False, logging.tensorboard, reason)
    yield Change("logging.mlflow", None, logging.mlflow, reason)
    yield Change("logging.wandb", None, logging.wandb, reason)


def profiler_changes(config: RunConfig, length: BenchLength, world_size: int) -> list[Change]:
    """The values that a bench sets in the section `profiler`, changed or not."""
    profiler, reason = config.profiler, "measures exposed communication"
    ranks = list(profiled_ranks(world_size))
    return [
        Change("profiler.start_step", length.first_profiled, profiler.start_step, reason),
        Change("profiler.num_steps", PROFILED_STEPS, profiler.num_steps, reason),
        Change("profiler.ranks", ranks, list(profiler.ranks), reason),
    ]


def plan_settings(request: BenchRequest, points: Iterable[LoadedPoint]) -> PlannedBench:
    """Plan the run of every point of a sweep; points that cannot run are listed with the reason.

    Raises the ConfigError of the first point if none can run, and UsageError for a key that a bench sets.
    """
    found = (Candidate(point.values, point.loaded, point.values) for point in points)
    return _plan("settings", request, found, Gatherer(), {})


def plan_layouts(request: BenchRequest, loaded: LoadedConfig, layouts: Sequence[str]) -> PlannedBench:
    """Plan the run of the typed layouts, which must all be possible, else of the first possible ones.

    Raises ConfigError and UsageError.
    """
    needs, takes = "`trainkit bench layouts` needs", "`trainkit bench settings` takes any"
    loaded.require_decoder(
        ("whose possible layouts are unknown", f"{needs} the task causal_lm; {takes} task"),
        ("whose memory is unknown", f"{needs} trainkit's own decoder; {takes} model"),
        or_own=True,
    )
    gatherer = Gatherer()
    constraints = _find_constraints(loaded, gatherer.facts(loaded))
    impossible: dict[str, str] = {}
    if not layouts:
        found, impossible = all_layouts(loaded.config.parallel, constraints)
    else:
        found = []
        for text in layouts:
            values = {f"parallel.{key}": value for key, value in fill_degrees(parse_layout(text)).items()}
            parallel = with_values(loaded, values, f"--layout {text}").config.parallel
            found.append(requested_layout(text, parallel, constraints))
        refuse_duplicates(found)
    candidates = (Candidate({LAYOUT: item.name}, loaded, item.values, item.notes) for item in found)
    return _plan("layouts", request, candidates, gatherer, impossible, must_all=bool(layouts))


def _plan(
    kind: Kind,
    request: BenchRequest,
    candidates: Iterable[Candidate],
    gatherer: Gatherer,
    impossible: Mapping[str, str],
    must_all: bool = False,
) -> PlannedBench:
    """Plan the candidates that can run, all of them if they `must`, or of untyped layouts the first.

    Raises the ConfigError of the first if none can run.
    """
    refused, left_out = dict(impossible), list[str]()
    points: list[BenchPoint] = []
    errors: list[ConfigError] = []
    changes: list[Change] = []
    for item in candidates:
        name = point_name(item.values)
        if kind == "layouts" and not must_all and len(points) == MAX_LAYOUTS:
            left_out.append(name)
            continue
        try:
            point, own = _plan_point(kind, request, item, gatherer)
        except ConfigError as error:
            if must_all:
                raise
            errors.append(error)
            refused[name] = error.problems[0].sentence
        else:
            points.append(point)
            changes = changes or own
    if not points:
        raise errors[0]
    return PlannedBench(kind, request, points, changes, refused, tuple(left_out))


def _plan_point(
    kind: Kind, request: BenchRequest, item: Candidate, gatherer: Gatherer
) -> tuple[BenchPoint, list[Change]]:
    """Plan a point, and what a bench changes in its config; raises ConfigError if it cannot run."""
    loaded, length = item.loaded, request.length
    if isinstance(loaded, ConfigError):
        raise loaded
    if kind == "layouts":
        loaded = with_values(loaded, item.settings, f"layout {point_name(item.values)}")
    own = bench_changes(loaded.config, kind, length, request.keep_name)
    if kind == "settings":
        _refuse_set_by_bench(item.values, [*own, *profiler_changes(loaded.config, length, 1)])
    facts = gatherer.facts(loaded)
    if facts.target.backend == "submitit":
        raise UsageError("trainkit does not submit arrays through submitit", hint="add --backend sbatch")
    changes = effective(own)
    short = with_values(loaded, {change.key: change.value for change in changes}, ORIGIN)
    plan = plan_run(short, facts)
    profiler = effective(profiler_changes(short.config, length, plan.world_size))
    full = with_values(short, {change.key: change.value for change in profiler}, ORIGIN)
    return BenchPoint(item, full.config, plan), [*changes, *profiler]


def _refuse_set_by_bench(values: JsonObject, changes: Sequence[Change]) -> None:
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
