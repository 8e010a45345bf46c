"""Tests values that a command replaces in a loaded config."""

from pathlib import Path

import pytest

from trainkit.config import LoadedConfig, load_config
from trainkit.config.load import with_values
from trainkit.errors import ConfigError


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntrain: {steps: 7}\n")
    return load_config(file, environ={}, cwd=tmp_path)


def test_the_others_stay_as_they_are(loaded):
    values = {"name": "other", "optimizer.lr": 0.5, "launch.env": {"A": "b"}, "checkpoint.async": False}
    changed = with_values(loaded, values, "a test")
    assert changed.config.name == "other"
    assert changed.config.optimizer.lr == 0.5
    assert changed.config.launch.env == {"A": "b"}
    assert not changed.config.checkpoint.async_save
    assert changed.config.train == loaded.config.train
    assert {key for key, origin in changed.origins.items() if origin == "a test"} == values.keys()
    assert changed.origins["train.steps"] == loaded.origins["train.steps"] == "mine.yaml:2"
    assert loaded.config.name == "mine"


def test_arguments_of_a_task(loaded):
    """Arguments of a task may have any name, and the original config keeps its values."""
    first = with_values(loaded, {"task_args.width": 32, "task_args.depth": 2}, "a test")
    second = with_values(first, {"task_args.width": 64}, "a test")
    assert second.config.task_args == {"width": 64, "depth": 2}
    assert first.config.task_args == {"width": 32, "depth": 2}
    assert loaded.config.task_args == {}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"parallel.tp": 0}, "a test: parallel.tp: must be a whole number of at least 1, not 0"),
        ({"parallel.zero": 4}, "a test: parallel.zero: must be "),
        ({"train.epochs": 2.0}, "a test: train.epochs: is 2 and train.steps is 7"),
    ],
)
def test_what_is_not_allowed(loaded, values, problem):
    with pytest.raises(ConfigError) as caught:
        with_values(loaded, values, "a test")
    (found,) = caught.value.problems
    assert found.render().startswith(problem)
