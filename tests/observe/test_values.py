"""Tests the requested values of a run: a COMMAND or a function has only keys that have an effect on it."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.capabilities.report.compared_runs import compared_values
from trainkit.config import RunConfig, dump_effective
from trainkit.observe.values import asked_of
from trainkit.run.files import write_json
from trainkit.run.group import GroupRecord, Trial
from trainkit.run.rundir import RunDir

FUNCTION = ["/usr/bin/python3", "-m", "trainkit.function"]
SCRIPT = ["python", "train.py", "--lr", "1e-4"]
TRAINERS = {"optimizer.lr", "task", "seed", "train.steps", "model.preset", "logging.tensorboard"}


def made(folder: Path, plan: dict[str, object], config: dict[str, object] | None = None) -> RunDir:
    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.config_file.write_text(dump_effective(RunConfig.model_validate({"name": "one", **(config or {})})))
    write_json(run.plan_file, plan)
    return run


def test_the_trainer_had_its_config(tmp_path):
    run = made(tmp_path / "one", {}, {"seed": 3})
    found = asked_of(run)
    assert found.keys() > TRAINERS
    assert (found["seed"], "COMMAND" in found) == (3, False)
    run.config_file.write_text("name: [")
    assert asked_of(run) == {}


def test_a_command_had_its_words_and_its_job(tmp_path):
    config = {"launch": {"env": {"A": "1"}}, "resources": {"nodes": 2}}
    found = asked_of(made(tmp_path / "one", {"command": SCRIPT}, config))
    assert not found.keys() & TRAINERS
    said(found["COMMAND"])
    assert (found["launch.env"], found["resources.nodes"]) == ({"A": "1"}, 2)


def test_a_launcher_had_what_it_was_given(tmp_path):
    part = {"keys": ["precision.dtype"], "files": {"accelerate.yaml": "mixed_precision: bf16"}}
    plan = {"command": SCRIPT, "capabilities": {"launchers": part}}
    assert "precision.dtype" in asked_of(made(tmp_path / "one", plan))
    del part["files"]  # the launcher did not get the value, because no file was written
    assert "precision.dtype" not in asked_of(made(tmp_path / "two", plan))


@pytest.mark.parametrize(
    ("command", "values", "expected"),
    [
        # The command of a trial is the command of its group.
        (SCRIPT, {"lr": "1e-4"}, {"lr": "1e-4", "COMMAND": "python train.py --lr '{lr}'"}),
        (SCRIPT, {"seed": 3, "resources.nodes": 1}, {"seed": 3, "resources.nodes": 2}),
        # A parameter of a function may have the name of a config key.
        (FUNCTION, {"device": "b", "lr": 0.1}, {"device": "b", "lr": 0.1, "COMMAND": None}),
        (None, {"seed": 9, "of_nothing": 1}, {"seed": 0, "of_nothing": 1, "COMMAND": None}),
    ],
)
def test_a_point_had_its_values(tmp_path, command, values, expected):
    group = tmp_path / "group"
    run = made(group / "0", {"command": command}, {"resources": {"nodes": 2}})
    write_json(group / "sweep.json", GroupRecord(name="group").to_dict([Trial(0, values)]))
    argv = ["trainkit", "submit", "--sweep", "lr=1e-4", "--", "python", "train.py", "--lr", "{lr}"]
    write_json(run.provenance_file, {"argv": argv})
    found = asked_of(run)
    assert {key: found.get(key) for key in expected} == expected


def test_a_function_on_its_own_had_its_arguments(tmp_path):
    run = made(tmp_path / "one", {"command": FUNCTION})
    write_json(run.values_file, {"lr": 0.1})
    found = asked_of(run)
    assert (found["lr"], "COMMAND" in found, found.keys() & TRAINERS) == (0.1, False, set())


def test_a_parameter_may_be_called_name(tmp_path):
    run = made(tmp_path / "one", {"command": FUNCTION})
    assert asked_of(run)["name"] == "one"
    assert "name" not in compared_values(run, asked_of(run))
    write_json(run.values_file, {"name": "bert"})
    assert asked_of(run)["name"] == "bert"
    assert compared_values(run, asked_of(run))["name"] == "bert"
