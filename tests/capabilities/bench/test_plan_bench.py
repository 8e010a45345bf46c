"""Tests which config values a bench changes, the lengths of its runs, and the layouts that it plans."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.capabilities.bench import plan_bench
from trainkit.capabilities.bench.plan_bench import PlannedBench, bench_values, plan_layouts, profiler_values
from trainkit.capabilities.bench.run_bench import PROFILED_STEPS, BenchLength, profiled_ranks
from trainkit.capabilities.layouts.choices import LONG_SEQUENCE
from trainkit.config import LoadedConfig, load_config
from trainkit.config.load import Change, with_changes, with_values
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.plan.layout_rules import parse_layout


def load(folder: Path, *settings: str) -> LoadedConfig:
    file = folder / "mine.yaml"
    file.write_text("name: mine\n")
    return load_config(file, overrides=settings, environ={}, cwd=folder)


def changes_of(loaded: LoadedConfig, length: BenchLength, world_size: int, keep_name: bool) -> list[Change]:
    made = bench_values(loaded.config, "layouts", length, keep_name)
    return with_changes(loaded, {**made, **profiler_values(length, world_size)}, "trainkit bench")[1]


def test_only_training_is_left(tmp_path):
    loaded = load(tmp_path, "train.epochs=3", "checkpoint.every_minutes=5", "train.stop_at_step=7")
    found = changes_of(loaded, BenchLength(30, 5), 2, keep_name=False)
    values = {change.key: change.value for change in found}
    said("\n".join(f"{key}: {value}" for key, value in values.items()))
    short = with_values(loaded, values, "trainkit bench")
    assert changes_of(short, BenchLength(30, 5), 2, keep_name=True) == []


def test_what_stays_as_it_was_typed(tmp_path):
    wsd = ("schedule.name=wsd", "schedule.warmup_steps=20", "schedule.decay_steps=40", "train.steps=100")
    for steps, changed in ((30, {"schedule.decay_steps"}), (60, set())):
        found = changes_of(load(tmp_path, *wsd), BenchLength(steps, 5), 1, keep_name=True)
        assert {change.key for change in found} & {"name", "schedule.decay_steps"} == changed


def test_every_step_is_of_one_kind_and_one_has_to_be_measured():
    length = BenchLength(30, 5)
    assert list(length.measured) == list(range(6, 28))
    assert length.first_profiled == 28
    assert length.first_profiled + PROFILED_STEPS - 1 == length.steps
    assert len(BenchLength(5 + PROFILED_STEPS + 1, 5).measured) == 1


@pytest.mark.parametrize(
    ("world_size", "ranks"), [(1, (0,)), (4, (0, 1, 2, 3)), (8, (0, 2, 4, 7)), (64, (0, 21, 42, 63))]
)
def test_the_ranks_that_are_profiled(world_size, ranks):
    assert profiled_ranks(world_size) == ranks


def test_a_bench_ends_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_bench, "MAX_LAYOUTS", 3)
    found = planned(tmp_path, 4)
    assert names(found) == ["dp_shard=4", "dp_replicate=4", "tp=4"]
    assert found.left_out[:2] == ["pp=4", "dp_replicate=2,dp_shard=2"]


def refuse(monkeypatch: pytest.MonkeyPatch, **degrees: int) -> None:
    """Reject layouts with these degrees as if they were too large for a GPU."""
    plan_run = plan_bench.plan_run

    def plan(loaded: LoadedConfig, facts: Facts) -> LaunchPlan:
        if all(getattr(loaded.config.parallel, name) == degree for name, degree in degrees.items()):
            raise ConfigError([Problem("parallel.dp_shard", "is 1: too large for a GPU")])
        return plan_run(loaded, facts)

    monkeypatch.setattr(plan_bench, "plan_run", plan)


def test_one_that_cannot_be_planned_makes_room_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_bench, "MAX_LAYOUTS", 2)
    refuse(monkeypatch, dp_replicate=4)
    found = planned(tmp_path, 4)
    assert names(found) == ["dp_shard=4", "tp=4"]
    said(found.impossible["dp_replicate=4"])


def test_when_none_can_be_planned_the_config_is_to_blame(tmp_path, monkeypatch):
    refuse(monkeypatch)
    with pytest.raises(ConfigError, match=r"parallel\.dp_shard: is 1: too large for a GPU"):
        planned(tmp_path, 4).submission(1)


SIZES = (
    *("device=cpu", "launch.backend=local", "data.seq_len=64"),
    *("train.device_batch_size=4", "train.global_batch_size=16"),
)
MODEL = ("model.preset=nano", "model.num_layers=8", "model.num_kv_heads=4")


def planned(folder: Path, ranks: int, layouts: tuple[str, ...] = (), *settings: str) -> PlannedBench:
    """Plan a bench on one node with a nano model that has enough layers and heads to be split."""
    overrides = (*SIZES, *MODEL, f"resources.gpus_per_node={ranks}", *settings)
    loaded = load_config(None, overrides=overrides, environ={}, cwd=folder)
    found = PlannedBench("layouts", "mine.yaml", BenchLength(30, 5), 1, keep_name=False)
    plan_layouts(found, loaded, layouts)
    return found


def asked(folder: Path, text: str, ranks: int = 4, *settings: str) -> plan_bench.BenchTrial:
    [trial] = planned(folder, ranks, (text,), *settings).trials
    return trial


def names(found: PlannedBench) -> list[str]:
    return [trial.name for trial in found.trials]


def test_every_way_to_split_four_processes(tmp_path):
    assert names(planned(tmp_path, 4)) == [
        *("dp_shard=4", "dp_replicate=4", "tp=4", "pp=4"),
        *("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_shard=2,pp=2"),
        *("dp_replicate=2,tp=2", "dp_replicate=2,pp=2", "tp=2,pp=2"),
    ]
    assert names(planned(tmp_path, 1)) == ["dp_shard=1"]


def test_sequences_are_split_when_they_are_long_or_the_config_does_it(tmp_path):
    for settings in ((), ("parallel.cp=2",), (f"data.seq_len={LONG_SEQUENCE}",)):
        assert ("cp=4" in names(planned(tmp_path, 4, (), *settings))) == bool(settings)


def test_what_is_not_possible_has_a_reason(tmp_path):
    found = planned(tmp_path, 4, (), "model.num_layers=2", "model.num_kv_heads=2")
    assert "tp=4" not in names(found)
    assert found.impossible.keys() == {"tp=4", "pp=4"}
    for name in ("tp=4", "pp=4"):
        said(found.impossible[name])
    three = planned(tmp_path, 3)
    assert names(three) == ["pp=3"]
    said(three.impossible["dp_shard=3"])


def test_the_samples_of_a_step_are_the_same_on_every_layout(tmp_path):
    for ranks in (2, 4, 8):
        for trial in planned(tmp_path, ranks).trials:
            assert trial.plan.batch.global_batch_size == trial.settings["train.global_batch_size"] == 16
            assert trial.plan.batch.device_batch_size == trial.settings["train.device_batch_size"]
            if ranks < 8:
                assert (trial.plan.batch.device_batch_size, trial.notes) == (4, ())


@pytest.mark.parametrize(
    ("text", "ranks", "settings", "batch"),
    [
        ("dp_shard=8", 8, (), (2, None)),
        ("tp=2", 2, ("train.device_batch_size=7",), (4, None)),
        ("pp=2", 2, ("parallel.pp_microbatches=3",), (4, 2)),
        # the microbatches of a whole step fill the pipeline
        ("pp=8", 8, ("parallel.pp_microbatches=2",), (4, 2)),
        ("pp=2,pp_microbatches=4", 2, (), (4, 4)),
    ],
)
def test_the_batch_is_adapted_to_the_layout(text, ranks, settings, batch, tmp_path):
    trial = asked(tmp_path, text, ranks, *settings)
    assert (trial.plan.batch.device_batch_size, trial.plan.batch.pp_microbatches) == batch
    said("\n".join(trial.notes))


def test_what_is_left_out_is_what_a_config_would_take(tmp_path):
    assert asked(tmp_path, "tp=2").plan.layout == Layout(1, 2, tp=2)
    assert asked(tmp_path, "dp_replicate=2,tp=2").plan.layout == Layout(2, 1, tp=2)
    assert asked(tmp_path, "dp_replicate=-1").plan.layout == Layout(4, 1)
    assert asked(tmp_path, "zero=2").name == "dp_shard=4,zero=2"
    assert asked(tmp_path, "tp=2,sequence_parallel=false").settings["parallel.sequence_parallel"] is False


@pytest.mark.parametrize("text", ["tp", "tp=2,,pp=2", "tq=2", "tp=2,tp=4", "tp=["])
def test_what_was_typed_wrong(text):
    with pytest.raises(UsageError) as caught:
        parse_layout(text)
    said(caught.value.render())


@pytest.mark.parametrize(
    ("text", "ranks", "settings"),
    [("tp=3", 4, ()), ("dp_shard=2", 4, ()), ("pp=8", 8, ("train.global_batch_size=4",))],
)
def test_an_impossible_layout_that_was_asked_for(text, ranks, settings, tmp_path):
    with pytest.raises(ConfigError) as caught:
        asked(tmp_path, text, ranks, *settings)
    said(caught.value.problems[0].render())
