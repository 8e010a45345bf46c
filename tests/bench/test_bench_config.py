"""What a bench changes in a config, and how long its runs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.bench.bench_file import (
    PROFILED_STEPS,
    BenchLength,
    bench_changes,
    effective,
    profiled_ranks,
    profiler_changes,
)
from trainkit.config import LoadedConfig, RunConfig, load_config
from trainkit.config.changes import Change, with_values
from trainkit.errors import UsageError


def load(folder: Path, *settings: str) -> LoadedConfig:
    file = folder / "mine.yaml"
    file.write_text("name: mine\n")
    return load_config(file, overrides=settings, environ={}, cwd=folder)


def changes_of(config: RunConfig, length: BenchLength, world_size: int, keep_name: bool) -> list[Change]:
    made = bench_changes(config, "layouts", length, keep_name)
    return effective([*made, *profiler_changes(config, length, world_size)])


def test_only_training_is_left(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train.epochs=3", "checkpoint.every_minutes=5", "train.stop_at_step=7")
    found = changes_of(loaded.config, BenchLength(30, 5), 2, keep_name=False)
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
    short = with_values(loaded, values, "trainkit bench").config
    assert changes_of(short, BenchLength(30, 5), 2, keep_name=True) == []


def test_a_name_that_was_typed_stays(tmp_path: Path) -> None:
    found = changes_of(load(tmp_path).config, BenchLength(30, 5), 1, keep_name=True)
    assert "name" not in [change.key for change in found]


def test_a_decay_that_is_longer_than_the_bench(tmp_path: Path) -> None:
    wsd = ("schedule.name=wsd", "schedule.warmup_steps=20", "schedule.decay_steps=40", "train.steps=100")
    for steps, expected in ((30, True), (60, False)):
        found = changes_of(load(tmp_path, *wsd).config, BenchLength(steps, 5), 1, keep_name=True)
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
