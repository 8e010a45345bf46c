from pathlib import Path

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.capabilities.drill.command import MIN_STEPS, NUM_SAVES, Drill, drill_config
from trainkit.config import LoadedConfig, RunConfig, load_config
from trainkit.run.events import StepRecord


@pytest.fixture
def load(tmp_path: Path):
    def load(*settings: str) -> LoadedConfig:
        file = tmp_path / "mine.yaml"
        file.write_text("name: mine\n")
        return load_config(file, overrides=settings, environ={}, cwd=tmp_path)

    return load


def test_only_the_length_and_the_saves_change(load):
    loaded = load("train.epochs=3", "checkpoint.every_minutes=5", "train.stop_at_step=7", "optimizer.lr=0.01")
    short, changes = drill_config(loaded, 30, "cpu")
    unset = (
        "train.epochs",
        "train.stop_at_step",
        "train.eval_every",
        "notify.webhook",
        "checkpoint.every_minutes",
    )
    expected = {"train.steps": 30, "train.log_every": 1, "checkpoint.every_steps": 5, **dict.fromkeys(unset)}
    assert {change.key: change.value for change in changes} == expected
    before, after = loaded.config.model_dump(), short.config.model_dump()
    differing = {
        f"{section}.{key}"
        for section, values in before.items()
        if isinstance(values, dict)
        for key in values
        if values[key] != after[section][key]
    }
    assert differing == {change.key for change in changes}
    assert {short.origins[change.key] for change in changes} == {"trainkit drill"}
    assert short.origins["optimizer.lr"] == "--set optimizer.lr=0.01"


def test_no_run_of_a_drill_is_in_a_tracker(load):
    short, changes = drill_config(load("logging.mlflow=true", "logging.wandb={project: p}"), 30, "cpu")
    assert short.config.logging.trackers == {}
    assert {"logging.mlflow", "logging.wandb"} <= {change.key for change in changes}


def test_what_is_so_already_is_no_change(load):
    short = ("train.steps=30", "train.log_every=1", "train.eval_every=null", "checkpoint.every_steps=5")
    loaded = load(*short, "notify.webhook=null")
    assert drill_config(loaded, 30, "cpu") == (loaded, [])


@pytest.mark.parametrize(("num_steps", "device", "decay_steps"), [(30, "cuda", None), (60, "cpu", 40)])
def test_what_a_drill_changes_if_it_has_to(load, num_steps, device, decay_steps):
    """A decay that is longer than the drill becomes a share of it. On GPUs, kernels must be deterministic."""
    wsd = ("schedule.name=wsd", "schedule.warmup_steps=20", "schedule.decay_steps=40", "train.steps=100")
    short, changes = drill_config(load(*wsd), num_steps, device)
    assert short.config.schedule.decay_steps == decay_steps
    assert short.config.train.deterministic == (device == "cuda")
    said(changes[0].sentence)


NO_LOSS = "losses cannot be compared, because one of the two runs has no loss for some step"


@pytest.mark.parametrize(
    ("device", "loss", "difference", "line"),
    [
        ("cpu", 2.002, None, None),
        ("cuda", 2.002, 1e-3, "losses have relative differences of up to 1.0e-03 between the two runs"),
        ("cuda", None, None, NO_LOSS),
    ],
)
def test_on_gpus_an_equal_run_without_deterministic_kernels_is_compared(
    load, tmp_path, monkeypatch, device, loss, difference, line
):
    losses, asked, lines = {"uninterrupted": 2.0, "not-deterministic": loss}, {}, []

    def run_uninterrupted(drill: Drill, name: str, config: RunConfig) -> tuple[list[StepRecord], float]:
        asked[name] = config.train.deterministic
        return [StepRecord({"step": 1, "loss": None}), StepRecord({"step": 2, "loss": losses[name]})], 1.0

    monkeypatch.setattr(Drill, "_run_uninterrupted", run_uninterrupted)
    config = drill_config(load(), 30, device)[0].config
    drill = Drill(tmp_path, config, launch_plan(device=device), 0, 5, lines.append)
    assert list(drill.run([])) == []
    if device == "cpu":
        assert (drill.difference, asked) == (None, {"uninterrupted": False})
        return
    assert asked == {"uninterrupted": True, "not-deterministic": False}
    assert drill.difference == pytest.approx(difference)
    assert lines == [f"not-deterministic: {line}"]


def test_the_shortest_drill_saves_twice_before_its_last_third():
    assert 2 * (MIN_STEPS // NUM_SAVES) + 1 <= MIN_STEPS * 2 // 3
