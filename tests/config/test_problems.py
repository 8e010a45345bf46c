"""Tests the errors for invalid values: all problems at once, with value, place and allowed values."""

import json
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.config import load_config
from trainkit.config.schema import all_keys, allowed_values
from trainkit.errors import ConfigError


def problems(tmp_path: Path, *overrides: str, text: str = "seed: 1\n", **environ: str) -> list[str]:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("run.yaml", overrides=overrides, environ=environ, cwd=tmp_path)
    assert error.value.exit_code == 2
    return [problem.render() for problem in error.value.problems]


ALL_AT_ONCE = "train:\n  stps: 3\n  log_every: 0\nschedule: {name: cosin}\nresources:\n  time: 090\n"
CASES = {
    "all at once": (["model.dropout=1", "x"], ALL_AT_ONCE, {"TRAINKIT_SEED": "-1"}),
    "a dotted key in a file": ([], "train.steps: 3\n", {}),
    "an unknown variable": ([], "seed: 1\n", {"TRAINKIT_TRAIN_STEPS": "3"}),
    "an overruled value is not judged, but its name is": (["seed=3"], "seed: many\ntrian: 1\n", {}),
    "a newer version": (["seed=x"], "new_key: 1\nconfig_version: 3\ntrain: {steps: [1, 2]}\n", {}),
    "trackers": (["logging.wandb={projekt: x}", "logging.mlflow=sqlite.db"], "seed: 1\n", {}),
    "a password": (["logging.mlflow={tracking_uri: 'https://me:hunter2@host'}"], "seed: 1\n", {}),
    "a file store": (["logging.mlflow={tracking_uri: 'file:///data/mlruns'}"], "seed: 1\n", {}),
}


def test_problems(tmp_path):
    for overrides, text, environ in CASES.values():
        said("\n".join(problems(tmp_path, *overrides, text=text, **environ)))


WRONG_VALUES = [
    *("optimizer.betas=[0.9]", "schedule.min_lr_ratio=2", "resources.gpus_per_node=0"),
    *("requeue.on=[crash, bored]", "train=3", "launch.env={A: [1]}", 'launch.env={A: [1], B: "${HOME}"}'),
    *("train.steps=two", "train.steps=true", "train.steps={a: 1}", "train.steps.x=1", "seed={a: 1"),
    *("optimizer.lr=0", "optimizer.lr=.inf", "optimizer.lr=.nan", "optimizer.lr=", "checkpoint.keep_last=0"),
    *("checkpoint.async=1", "parallel.dp_shard=0", "config_version=3", "name=0123", "name=1e3", "name=true"),
    *(f"name={json.dumps(name)}" for name in ("", "..", "* ?", "../x", "-x", "a b", "two\nlines", "name\n")),
    *(f"name={json.dumps(name)}" for name in ("$(touch x)", "modell-größe", "été 1")),
]
UNKNOWN_KEYS = """
train.step=1 trian.steps=1 lr=1 train.lr=1 train.warmup_steps=1 train_steps=1 nodes=1 nmae=1 train.seed=1
checkpoint.async_save=true learningrate=1 qqqqq=1 checkpoint.dir=1 schedule.name_=1 notify.name=1
train.batch_size=1 data.dataset=1 slurm=1 optimizer.decay=1
"""


def test_messages(tmp_path):
    said("\n".join("\n".join(problems(tmp_path, one)) for one in (*WRONG_VALUES, *UNKNOWN_KEYS.split())))


def test_a_long_value_is_cut(tmp_path):
    [found] = problems(tmp_path, f"seed=[{', '.join(map(str, range(100)))}]")
    shown = found.partition("\n")[0].partition(" not ")[2]
    assert (shown[:8], shown[-1], len(shown)) == ("[0, 1, 2", "…", 80)


def test_every_key_can_say_what_it_may_hold():
    assert [key for key in all_keys() if not allowed_values(tuple(key.split(".")))] == []


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("task: t.py:T\ntask_args: {class_path: a.B, fit: {x: 1}}\n", []),
        ("train: {steps: 5}\nmixed_precision: bf16\nnum_machines: 2\n", ["mixed_precision", "num_machines"]),
        ("schedule: {name: linear}\ntrainer: {stps: 5, log_every: 2}\n", ["trainer"]),
        ("resources: {nodes: 1}\nparameters: {lr: 1}\nmethod: grid\n", ["parameters", "method"]),
    ],
)
def test_a_file_with_a_section_of_trainkit_alone_is_not_of_another_program(tmp_path, text, keys):
    if not keys:
        (tmp_path / "run.yaml").write_text(text)
        assert load_config("run.yaml", environ={}, cwd=tmp_path).config.task_args["fit"] == {"x": 1}
        return
    found = problems(tmp_path, text=text)
    assert [one.split("\n")[0].partition(": ")[2] for one in found] == [f"{key}: unknown key" for key in keys]
