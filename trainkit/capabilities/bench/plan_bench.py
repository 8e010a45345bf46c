"""Plans a bench: a sweep over layouts or config keys, where each trial runs for only a few steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

from trainkit.backend import backend_named
from trainkit.capabilities.bench.run_bench import (
    LAYOUT,
    PROFILED_STEPS,
    Bench,
    BenchLength,
    BenchRun,
    Kind,
    profiled_ranks,
    trial_name,
)
from trainkit.capabilities.layouts.choices import LONG_SEQUENCE, enumerate_layouts
from trainkit.capabilities.report.sweep_report import REPEAT
from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.load import Change, Values, short_training, with_changes, with_values
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.launch.gpu_hours import with_gpu_hours
from trainkit.launch.plan_run import Gatherer, plan_run
from trainkit.launch.submission import PlannedTrial, Submission, checked
from trainkit.launch.sweep import ArraySpec, LoadedTrial
from trainkit.plan.batch import GLOBAL, MICROBATCHES, BatchRequest, batch_changes, make_batch
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.plan.layout_rules import DEGREES, layout_name, layout_problems, make_layout, parse_layout
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.plan.step_work import work_of

ORIGIN = "trainkit bench"
OPTION = "--out"
MAX_LAYOUTS = 16
"""Maximum number of layouts to run if --layout is not given. The limit keeps the total time of a bench
acceptable."""


@dataclass(frozen=True)
class BenchTrial(PlannedTrial):
    """A bench trial that has not started.

    The `values` of a trial are its layout or the values of the swept keys.
    """

    settings: Mapping[str, object]
    """Config values that define the trial, keyed by dotted name."""
    notes: tuple[str, ...]
    """One sentence for each config value that was adapted to the layout."""

    @property
    def name(self) -> str:
        return trial_name(self.values)

    def run(self, index: int, repeat: int) -> BenchRun:
        layout, batch = self.plan.layout, self.plan.batch
        degrees = {name: getattr(layout, name) for name in DEGREES}
        sizes = batch.device_batch_size, batch.pp_microbatches
        return BenchRun(str(index), self.values, repeat, degrees, *sizes, list(self.notes))


@dataclass
class PlannedBench:
    """A bench that has not started: the trials that can run, and the errors of trials that cannot run."""

    kind: Kind
    config: str
    """The config's file or name, as the user typed it."""
    length: BenchLength
    repeats: int
    keep_name: bool
    """True if the runs keep the `name` given in the config."""
    gatherer: Gatherer = field(default_factory=Gatherer)
    loaded: LoadedConfig | None = None
    """The config of the first trial."""
    trials: list[BenchTrial] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Config changes that the bench makes in all runs."""
    errors: dict[str, ConfigError] = field(default_factory=dict)
    """Maps the name of each trial that cannot run to its error."""
    left_out: list[str] = field(default_factory=list)
    """Names of possible layouts that the bench omits because of `MAX_LAYOUTS`."""

    @property
    def impossible(self) -> dict[str, str]:
        """Map the name of each trial that cannot run to the reason why it cannot run."""
        return {name: error.problems[0].sentence for name, error in self.errors.items()}

    def add_layout(
        self,
        loaded: LoadedConfig,
        layout: Layout,
        ranks: LaunchPlan,
        shape: ModelShape,
        typed: Mapping[str, object],
    ) -> None:
        """Plan a trial with a layout; raise ConfigError if the layout is impossible.

        `typed` contains the values from ``--layout``; if it is empty, at most `MAX_LAYOUTS` layouts are run.
        """
        name = layout_name(layout, {key: item for key, item in typed.items() if key not in DEGREES})
        if name in (trial.name for trial in self.trials):
            raise UsageError(
                f"--layout is given twice with the same value: {name}", hint="remove one of the two"
            )
        settings, notes = layout_settings(loaded.config, layout, ranks, shape, typed)
        if not typed and len(self.trials) == MAX_LAYOUTS:
            self.left_out.append(name)
            return
        self.add({LAYOUT: name}, settings, with_values(loaded, settings, f"layout {name}"), notes)

    def add(
        self,
        values: dict[str, object],
        settings: Mapping[str, object],
        loaded: LoadedConfig,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Plan a trial; raise ConfigError if it cannot run."""
        self.loaded = self.loaded or loaded
        config, plan, changes = self._shortened(loaded, values)
        self.trials.append(BenchTrial(len(self.trials), values, config, plan, settings, notes))
        self.changes = self.changes or changes

    def _shortened(
        self, loaded: LoadedConfig, values: Mapping[str, object]
    ) -> tuple[RunConfig, LaunchPlan, list[Change]]:
        """Return the config and launch plan of a trial, and the config changes that the bench made."""
        own = bench_values(loaded.config, self.kind, self.length, self.keep_name)
        if self.kind == "settings":
            _refuse_set_by_bench(values, {**own, **profiler_values(self.length, 1)})
        resources = loaded.config.resources
        if resources.fewest_nodes < resources.most_nodes:
            message = f"{loaded.origins['resources.nodes']}: a bench needs a fixed number of nodes"
            raise UsageError(message, hint=f"for example --nodes {resources.most_nodes}")
        facts = self.gatherer.facts(loaded)
        target = facts.target
        if target.submits_job and (problem := backend_named(target.backend).array_problem()):
            raise UsageError(*problem)
        short, changes = with_changes(loaded, own, ORIGIN)
        plan = plan_run(short, facts)
        full, more = with_changes(short, profiler_values(self.length, plan.world_size), ORIGIN)
        return full.config, plan, [*changes, *more]

    @property
    def name(self) -> str:
        return self.trials[0].config.name

    @property
    def plan(self) -> LaunchPlan:
        """Return the launch plan of the first trial."""
        return self.trials[0].plan

    def submission(self, at_once: int) -> Submission:
        """Return a submission that starts all runs as one job array.

        The array contains all trials in sequence, once per repeat. Repeats are interleaved, so that a short
        disturbance of the machine affects one repeat of several trials rather than all repeats of one trial.
        Raises UsageError if the runs need different job requests, or the ConfigError of the first trial if no
        trial can run.
        """
        if not self.trials:
            raise next(iter(self.errors.values()))
        runs: list[PlannedTrial] = []
        for index, (repeat, trial) in enumerate(self.order):
            values = {**trial.values, REPEAT: repeat} if self.repeats > 1 else trial.values
            runs.append(replace(trial, index=index, values=values))
        assert self.loaded is not None
        with_gpu_hours(self.loaded, [run.plan for run in runs])
        return checked(runs, (), ArraySpec(tuple(range(len(runs))), at_once))

    @property
    def order(self) -> list[tuple[int, BenchTrial]]:
        """Return the repeat number and the trial of every run, in the order of the array."""
        return list(product(range(1, self.repeats + 1), self.trials))

    def to_dict(self) -> dict[str, object]:
        """Return a JSON object with the trials that would run and the trials that cannot run."""
        trials = [
            {
                **({LAYOUT: item.name} if self.kind == "layouts" else {}),
                "values": dict(item.settings),
                "notes": list(item.notes),
            }
            for item in self.trials
        ]
        return {
            "layouts" if self.kind == "layouts" else "points": trials,
            "repeats": self.repeats,
            "impossible": self.impossible,
            "left_out": self.left_out,
        }

    def create(self, folder: Path) -> Bench:
        """Create the folder for the bench's group of runs, and write bench.json into it."""
        bench = Bench(
            folder=folder.absolute(),
            kind=self.kind,
            config=self.config,
            backend=self.plan.backend,
            device=self.plan.device,
            length=self.length,
            repeats=self.repeats,
            keys=list(self.trials[0].values),
            changes=list(map(asdict, self.changes)),
            runs=[trial.run(index, repeat) for index, (repeat, trial) in enumerate(self.order)],
            impossible=self.impossible,
            left_out=self.left_out,
        )
        bench.write()
        return bench


BARE: Values = {
    "checkpoint.every_steps": (None, "a bench does not save checkpoints"),
    "checkpoint.every_minutes": (None, "a bench does not save checkpoints"),
    "checkpoint.best_metric": (None, "a bench does not save checkpoints"),
    "checkpoint.async": (False, "a bench reserves no memory for checkpoints"),
    "resources.slice": (None, "a bench runs in a single job"),
    "requeue.on": ([], "a failed run is not restarted"),
    "requeue.follow_ups": (0, "a failed run is not restarted"),
    "logging.tensorboard": (False, "a bench writes its results to summary.csv"),
}
"""Config values that disable saves and restarts and reduce logging, each with a reason."""


def bench_values(config: RunConfig, kind: Kind, length: BenchLength, keep_name: bool) -> Values:
    """Return the config values that a bench sets in all of its runs, each with a reason.

    The values do not affect the model, the data or the optimizer.
    """
    name = f"{config.name}-{kind}"[:100], "distinguishes the runs of the bench from other runs"
    return {**({} if keep_name else {"name": name}), **short_training(config, length.steps, "bench"), **BARE}


def profiler_values(length: BenchLength, world_size: int) -> Values:
    """Return the values that a bench sets in the config section `profiler`."""
    values = {
        "start_step": length.first_profiled,
        "num_steps": PROFILED_STEPS,
        "ranks": list(profiled_ranks(world_size)),
    }
    return {f"profiler.{key}": (value, "measures exposed communication") for key, value in values.items()}


def plan_settings(planned: PlannedBench, trials: Iterable[LoadedTrial]) -> None:
    """Plan the runs of all trials of a sweep.

    The error of each trial that cannot run is stored in `planned`. Raises UsageError if the sweep contains a
    key that the bench sets itself.
    """
    for trial in trials:
        try:
            if isinstance(trial.loaded, ConfigError):
                raise trial.loaded
            planned.add(trial.values, trial.values, trial.loaded)
        except ConfigError as error:
            planned.errors[trial_name(trial.values)] = error


def plan_layouts(planned: PlannedBench, loaded: LoadedConfig, layouts: Sequence[str]) -> None:
    """Plan runs for the given layouts or, if none are given, for the first `MAX_LAYOUTS` possible layouts.

    Raises ConfigError or UsageError if a given layout is impossible.
    """
    needs, takes = "`trainkit bench layouts` needs", "`trainkit bench settings` accepts any"
    loaded.require_decoder(
        (
            "and trainkit cannot list the possible layouts of its model",
            f"{needs} the task causal_lm; {takes} task",
        ),
        ("and its memory use is unknown", f"{needs} trainkit's own decoder; {takes} model"),
        or_own=True,
    )
    facts = planned.gatherer.facts(loaded)
    assert facts.data is not None
    shape, ranks = resolve_model_shape(loaded.config.model, facts.data.vocab_size), _ranks(loaded, facts)
    for text in layouts:
        origin, typed = f"--layout {text}", parse_layout(text)
        own = with_values(loaded, {f"parallel.{key}": value for key, value in typed.items()}, origin)
        try:
            layout = make_layout(own.config.parallel, ranks.world_size)[0]
            planned.add_layout(own, layout, ranks, shape, typed)
        except ConfigError as error:
            problems = [Problem(item.key, item.message, origin, item.hint) for item in error.problems]
            raise ConfigError(problems) from None
    if not layouts:
        splits_sequence = loaded.config.parallel.cp > 1 or loaded.config.data.seq_len >= LONG_SEQUENCE
        experts = shape.moe.num_experts if shape.moe else 1
        found = enumerate_layouts(ranks.world_size, ranks.workers_per_node, splits_sequence, experts)
        for layout in sorted(found, key=_complexity):
            try:
                planned.add_layout(loaded, layout, ranks, shape, {})
            except ConfigError as error:
                planned.errors[layout_name(layout, {})] = error


def _ranks(loaded: LoadedConfig, facts: Facts) -> LaunchPlan:
    """Return a launch plan that contains the number of processes, but no model, layout or batch size."""
    neutral = {f"parallel.{name}": -1 if name == "dp_shard" else 1 for name in DEGREES}
    sizes: dict[str, object] = {
        "train.device_batch_size": 1,
        "train.global_batch_size": None,
        "train.batch_warmup": [],
    }
    without_data = replace(facts, data=None, missing=())
    return make_plan(with_values(loaded, {**neutral, **sizes}, ORIGIN), without_data)


def _complexity(layout: Layout) -> tuple[int, ...]:
    """Return a sort key that orders layouts by complexity.

    Layouts with fewer kinds of parallelism come first and, among these, layouts with more common kinds.
    """
    degrees = (layout.dp_shard, layout.dp_replicate, layout.tp, layout.pp, layout.cp, layout.ep)
    return (sum(degree > 1 for degree in degrees), *(-degree for degree in degrees))


def layout_settings(
    config: RunConfig, layout: Layout, ranks: LaunchPlan, shape: ModelShape, typed: Mapping[str, object]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the config values for a layout, and one sentence per value that was adapted to the layout.

    The global batch size is the same for all layouts. `typed` contains the values given with ``--layout``.
    Raises ConfigError if the layout is impossible.
    """
    train, parallel = config.train, config.parallel
    total = train.global_batch_size or train.device_batch_size * ranks.world_size
    fixed = {GLOBAL, *([MICROBATCHES] if "pp_microbatches" in typed else [])}
    request = BatchRequest(train.device_batch_size, total, parallel, frozenset(fixed))
    batch = make_batch(request, layout, config.data.seq_len)
    if found := list(layout_problems(work_of(config, shape, layout, batch))):
        raise ConfigError(found)
    settings = {
        **{f"parallel.{key}": value for key, value in typed.items()},
        **{f"parallel.{name}": getattr(layout, name) for name in DEGREES},
        "train.global_batch_size": total,
        "train.batch_warmup": [],
        "train.device_batch_size": batch.device_batch_size,
        "parallel.pp_microbatches": batch.pp_microbatches or parallel.pp_microbatches,
    }
    return settings, tuple(f"{note} to fit this layout" for note in batch_changes(batch, request))


def _refuse_set_by_bench(values: Mapping[str, object], own: Values) -> None:
    for key in values:
        if key in ("launch", "launch.backend", "launch.cluster"):
            raise UsageError(
                f"--sweep {key}: all trials of a bench must run on the same machine or cluster",
                hint="run a separate bench for each value",
            )
        for name, (_, why) in own.items():
            if name == key or name.startswith(f"{key}."):
                raise UsageError(f"--sweep {key}: every bench sets {name} itself ({why})", hint="remove it")
