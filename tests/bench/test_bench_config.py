"""What a bench changes in a config, and how long its runs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.bench import plan_bench
from trainkit.bench.plan_bench import (
    BenchRequest,
    PlannedBench,
    bench_values,
    plan_layouts,
    profiler_values,
)
from trainkit.bench.run_bench import PROFILED_STEPS, BenchLength, profiled_ranks
from trainkit.config import LoadedConfig, load_config
from trainkit.config.load import Change, with_changes, with_values
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan


def load(folder: Path, *settings: str) -> LoadedConfig:
    file = folder / "mine.yaml"
    file.write_text("name: mine\n")
    return load_config(file, overrides=settings, environ={}, cwd=folder)


def changes_of(loaded: LoadedConfig, length: BenchLength, world_size: int, keep_name: bool) -> list[Change]:
    made = bench_values(loaded.config, "layouts", length, keep_name)
    return with_changes(loaded, {**made, **profiler_values(length, world_size)}, "trainkit bench")[1]


def test_only_training_is_left(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train.epochs=3", "checkpoint.every_minutes=5", "train.stop_at_step=7")
    found = changes_of(loaded, BenchLength(30, 5), 2, keep_name=False)
    values = {change.key: change.value for change in found}
    assert values == {
        "name": "mine-layouts",
        "train.steps": 30,
        "train.epochs": None,
        "train.stop_at_step": None,
        "train.log_every": 1,
        "train.eval_every": None,
        "notify.webhook": None,
        "checkpoint.every_steps": None,
        "checkpoint.every_minutes": None,
        "checkpoint.best_metric": None,
        "checkpoint.async": False,
        "requeue.on": [],
        "logging.tensorboard": False,
        "profiler.start_step": 28,
        "profiler.num_steps": 3,
        "profiler.ranks": [0, 1],
    }
    short = with_values(loaded, values, "trainkit bench")
    assert changes_of(short, BenchLength(30, 5), 2, keep_name=True) == []


def test_a_name_that_was_typed_stays(tmp_path: Path) -> None:
    found = changes_of(load(tmp_path), BenchLength(30, 5), 1, keep_name=True)
    assert "name" not in [change.key for change in found]


def test_a_decay_that_is_longer_than_the_bench(tmp_path: Path) -> None:
    wsd = ("schedule.name=wsd", "schedule.warmup_steps=20", "schedule.decay_steps=40", "train.steps=100")
    for steps, expected in ((30, True), (60, False)):
        found = changes_of(load(tmp_path, *wsd), BenchLength(steps, 5), 1, keep_name=True)
        assert ("schedule.decay_steps" in [change.key for change in found]) == expected


def test_every_step_is_of_one_kind() -> None:
    length = BenchLength(30, 5)
    assert list(length.measured) == list(range(6, 28))
    assert length.first_profiled == 28
    assert length.first_profiled + PROFILED_STEPS - 1 == length.steps
    assert length.text == "30 per run: 5 warm-up, 22 measured, 3 profiled"


def test_one_step_has_to_be_measured() -> None:
    assert len(BenchLength(5 + PROFILED_STEPS + 1, 5).measured) == 1
    with pytest.raises(UsageError) as caught:
        BenchLength(5 + PROFILED_STEPS, 5)
    assert caught.value.message.startswith("--steps 8: 5 warm-up steps (--warmup) and 3 profiled")
    assert caught.value.hint == "at least --steps 9"


@pytest.mark.parametrize(
    ("world_size", "ranks"),
    [(1, (0,)), (4, (0, 1, 2, 3)), (8, (0, 2, 4, 7)), (64, (0, 21, 42, 63))],
)
def test_the_ranks_that_are_profiled(world_size: int, ranks: tuple[int, ...]) -> None:
    assert profiled_ranks(world_size) == ranks


def layouts_of_four(folder: Path) -> PlannedBench:
    shape = "model={preset: nano, num_layers: 8, num_kv_heads: 4}"
    loaded = load(folder, "resources.gpus_per_node=4", "device=cpu", "launch.backend=local", shape)
    return plan_layouts(BenchRequest("mine.yaml", BenchLength(30, 5), 1, keep_name=False), loaded, ())


def test_a_bench_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_bench, "MAX_LAYOUTS", 3)
    planned = layouts_of_four(tmp_path)
    assert [point.name for point in planned.points] == ["dp_shard=4", "dp_replicate=4", "tp=4"]
    assert planned.left_out[:2] == ["pp=4", "dp_replicate=2,dp_shard=2"]


def refuse(monkeypatch: pytest.MonkeyPatch, **degrees: int) -> None:
    """Refuse to plan layouts with these degrees, as if they were too large for a GPU."""
    plan_run = plan_bench.plan_run

    def plan(loaded: LoadedConfig, facts: Facts) -> LaunchPlan:
        if all(getattr(loaded.config.parallel, name) == degree for name, degree in degrees.items()):
            raise ConfigError([Problem("parallel.dp_shard", "is 1: too large for a GPU")])
        return plan_run(loaded, facts)

    monkeypatch.setattr(plan_bench, "plan_run", plan)


def test_one_that_cannot_be_planned_makes_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_bench, "MAX_LAYOUTS", 2)
    refuse(monkeypatch, dp_replicate=4)
    planned = layouts_of_four(tmp_path)
    assert [point.name for point in planned.points] == ["dp_shard=4", "tp=4"]
    assert planned.impossible["dp_replicate=4"] == "parallel.dp_shard is 1: too large for a GPU"


def test_when_none_can_be_planned_the_config_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    with pytest.raises(ConfigError, match=r"parallel\.dp_shard: is 1: too large for a GPU"):
        layouts_of_four(tmp_path)
