"""Plans a bench of layouts: chooses the layouts, plans the run of each, and creates the bench's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainkit.bench.bench_file import Bench, BenchLength, bench_changes, bench_runs, write_bench
from trainkit.bench.layouts import (
    BenchLayout,
    LayoutConstraints,
    Selection,
    all_layouts,
    fill_degrees,
    parse_layout,
    refuse_duplicates,
    requested_layout,
    select,
)
from trainkit.cluster.machine import detect_machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig
from trainkit.config.changes import Change, with_values
from trainkit.errors import ConfigError, UsageError
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import DataFacts, inspect_data, make_plan
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.submit.create import new_folder
from trainkit.submit.plan_run import plan_run
from trainkit.submit.sweep import PlannedPoint

ORIGIN = "trainkit bench"
OPTION = "--out"
Planned = TypeVar("Planned")


@dataclass(frozen=True)
class PlannedBench:
    """A bench before its first run."""

    config: str
    """The file or name of the config, as typed."""
    length: BenchLength
    selection: Selection
    points: list[PlannedPoint]
    changes: list[Change]

    @property
    def name(self) -> str:
        """The name of its runs."""
        return self.points[0].config.name

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the first layout."""
        return self.points[0].plan

    def to_dict(self) -> dict[str, Any]:
        """Return the layouts that would run, and those that would not, as a JSON object."""
        return {
            "layouts": [
                {"layout": item.name, "values": dict(item.values), "notes": list(item.notes)}
                for item in self.selection.layouts
            ],
            "impossible": dict(self.selection.impossible),
            "left_out": list(self.selection.left_out),
        }

    def create(self, folder: Path, run_names: Sequence[str]) -> Bench:
        """Write bench.json in the folder; `run_names` are the folders of the runs in it."""
        runs = bench_runs(self.selection.layouts, run_names)
        bench = Bench(folder.absolute(), self.plan.backend, self.plan.device, self.length, runs)
        write_bench(bench, self.config, self.selection, self.changes)
        return bench

    def create_local(self, out: Path | None) -> Bench:
        """Create the folder of a bench on this machine; UsageError if it cannot be written."""
        with new_folder(self.name, out, OPTION) as (folder, _):
            return self.create(folder, [item.name for item in self.selection.layouts])


def plan_bench(
    loaded: LoadedConfig, config: str, length: BenchLength, layouts: Sequence[str], keep_name: bool
) -> PlannedBench:
    """Choose the layouts, the typed ones or all possible ones, and plan the run of each.

    `config` is the file or name as typed; `keep_name` keeps the config's name. Raises ConfigError and
    UsageError.
    """
    if loaded.config.has_user_task:
        message = f"is {loaded.config.task}, whose possible layouts are unknown"
        raise ConfigError(
            [loaded.problem("task", message, "`trainkit bench layouts` needs the task causal_lm")]
        )
    if loaded.config.uses_transformers:
        message = "is transformers, whose memory is unknown"
        hint = "`trainkit bench layouts` needs trainkit's own decoder"
        raise ConfigError([loaded.problem("model.architecture", message, hint)])
    target, data = make_target(loaded), inspect_data(loaded.config.data)
    if target.backend == "submitit":
        raise UsageError("trainkit does not submit arrays through submitit", hint="add --backend sbatch")
    constraints = _find_constraints(loaded, target, data)
    changes = bench_changes(loaded.config, length, constraints.world_size, keep_name)
    short = with_values(loaded, {change.key: change.value for change in changes}, ORIGIN)

    def plan(layout: BenchLayout) -> tuple[BenchLayout, LoadedConfig, LaunchPlan]:
        values = with_values(short, layout.values, f"layout {layout.name}")
        return layout, values, plan_run(values, target=target, data=data)

    selection, plans = _select(short, constraints, layouts, plan)
    points = [
        PlannedPoint(index, {"layout": layout.name}, values.config, made)
        for index, (layout, values, made) in enumerate(plans)
    ]
    return PlannedBench(config, length, selection, points, changes)


def _select(
    short: LoadedConfig,
    constraints: LayoutConstraints,
    typed: Sequence[str],
    plan: Callable[[BenchLayout], Planned],
) -> tuple[Selection, list[Planned]]:
    """Return the typed layouts, which must all be possible, else all possible ones; with their plans."""
    if not typed:
        return select(*all_layouts(short.config.parallel, constraints), plan)
    layouts = []
    for text in typed:
        values = {f"parallel.{key}": value for key, value in fill_degrees(parse_layout(text)).items()}
        parallel = with_values(short, values, f"--layout {text}").config.parallel
        layouts.append(requested_layout(text, parallel, constraints))
    refuse_duplicates(layouts)
    return Selection(tuple(layouts), {}, ()), [plan(item) for item in layouts]


def _find_constraints(loaded: LoadedConfig, target: Target, data: DataFacts) -> LayoutConstraints:
    """Return the sizes of the config and the number of processes, from a plan without layout and batch."""
    degrees = {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "pp": 1, "cp": 1}
    values = {f"parallel.{key}": value for key, value in degrees.items()}
    neutral = with_values(
        loaded, {**values, "train.device_batch_size": 1, "train.global_batch_size": None}, ORIGIN
    )
    plan = make_plan(neutral, detect_machine(), target)
    config, train = loaded.config, loaded.config.train
    return LayoutConstraints(
        world_size=plan.world_size,
        node_size=plan.workers_per_node,
        shape=resolve_model_shape(config.model, data.vocab_size),
        seq_len=config.data.seq_len,
        device_batch_size=train.device_batch_size,
        global_batch_size=train.global_batch_size or train.device_batch_size * plan.world_size,
    )
