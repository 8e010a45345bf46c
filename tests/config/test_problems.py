"""Tests the errors for invalid values: all problems at once, with value, place and allowed values."""

import json
from pathlib import Path

import pytest

from tests.support.said import said
from tests.support.tables import messages
from trainkit.config import load_config
from trainkit.config.schema import all_keys, allowed_values, default_values, show_value
from trainkit.errors import ConfigError

A_NAME = "a name of at most 100 letters, digits, dots, dashes and underscores"


def problems(tmp_path: Path, *overrides: str, text: str = "seed: 1\n", **environ: str) -> list[str]:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("run.yaml", overrides=overrides, environ=environ, cwd=tmp_path)
    assert error.value.exit_code == 2
    return [problem.render() for problem in error.value.problems]


def default_hint(key: str) -> str:
    """Return the hint for input that is not similar to an allowed value."""
    return f"\n  hint: the default is {show_value(default_values()[key])}"


def test_all_at_once(tmp_path):
    text = "train:\n  stps: 3\n  log_every: 0\nschedule: {name: cosin}\nresources:\n  time: 090\n"
    said("\n".join(problems(tmp_path, "model.dropout=1", "x", text=text, TRAINKIT_SEED="-1")))


LONG = """
optimizer.betas=[0.9]
    optimizer.betas: must be a list of 2, each a number of at least 0 and below 1, not [0.9]
schedule.min_lr_ratio=2
    schedule.min_lr_ratio: must be a number of at least 0 and of at most 1, not 2
resources.gpus_per_node=0
    resources.gpus_per_node: must be a whole number of at least 1 or auto, not 0
requeue.on=[crash, bored]
    requeue.on: must be a list, each one of preempted, timeout, node_fail, crash, hang, not ["crash",
    "bored"]
name=0123
    name: must be a name of at most 100 letters, digits, dots, dashes and underscores, not 0123
    hint: job ids are reserved; add a letter, such as run-0123
train=3
    train: must be a section with keys such as steps, epochs, stop_at_step, not 3
    hint: did you mean --set train.steps=3?
launch.env={A: [1]}
    launch.env: must be a mapping, each value text, not {"A": ["1"]}
    hint: write it as {NAME: VALUE}
launch.env={A: [1], B: "${HOME}"}
    launch.env: must be a mapping, each value text, not {"A": ["1"], "B": "${HOME}"}
    hint: write it as {NAME: VALUE}
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *messages(LONG),
        ("train.steps=two", 'train.steps: must be a whole number of at least 1 or null, not "two"'),
        ("train.steps=true", "train.steps: must be a whole number of at least 1 or null, not true"),
        ("train.steps={a: 1}", 'train.steps: must be a whole number of at least 1 or null, not {"a": 1}'),
        ("optimizer.lr=0", "optimizer.lr: must be a number above 0, not 0"),
        ("optimizer.lr=.inf", "optimizer.lr: must be a number above 0, not Infinity"),
        ("optimizer.lr=.nan", "optimizer.lr: must be a number above 0, not NaN"),
        ("optimizer.lr=", "optimizer.lr: must be a number above 0, not null"),
        (
            "checkpoint.keep_last=0",
            "checkpoint.keep_last: must be a whole number of at least 1 or null, not 0",
        ),
        (
            "checkpoint.async=1",
            "checkpoint.async: must be true or false, not 1\n  hint: did you mean --set"
            " checkpoint.async=true?",
        ),
        ("parallel.dp_shard=0", "parallel.dp_shard: must be -1 or a whole number of at least 1, not 0"),
        ("config_version=3", "config_version: must be one of 1, 2, not 3"),
        ("seed={a: 1", None),
        ("name=1e3", f"name: must be {A_NAME}, not 1e3\n  hint: did you mean --set 'name=\"1e3\"'?"),
        ("name=true", f"name: must be {A_NAME}, not true\n  hint: did you mean --set 'name=\"true\"'?"),
        *(
            (
                f"name={json.dumps(name)}",
                f"name: must be {A_NAME}, not {json.dumps(name, ensure_ascii=False)}"
                + (f"\n  hint: did you mean --set name={meant}?" if meant else "")
                + (" A name begins with a letter or a digit" if meant and not name[0].isalnum() else ""),
            )
            for name, meant in {
                **{"": "", "..": "", "* ?": "", "../x": "x", "-x": "x", "a b": "a-b"},
                **{"two\nlines": "two-lines", "name\n": "name", "$(touch x)": "touch-x"},
                "modell-größe": "modell-grosse",
                "été 1": "ete-1",
            }.items()
        ),
    ],
)
def test_message(tmp_path, override, message):
    found = problems(tmp_path, override)
    if message is None:
        message = (
            "seed: {a: 1 is not valid YAML: while parsing a flow mapping, did not find expected ',' or '}'"
            "\n  hint: seed must be a whole number of at least 0 and below 9.22337e+18"
        )
    if "\n  hint: " not in message and ": must be " in message:
        message += default_hint(override.partition("=")[0])
    assert found == [f"--set {override}: {message}"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.step=1", "did you mean train.steps?"),
        ("trian.steps=1", "did you mean train?"),
        ("lr=1", "did you mean optimizer.lr?"),
        ("train.lr=1", "did you mean optimizer.lr?"),
        ("train.warmup_steps=1", "did you mean schedule.warmup_steps?"),
        ("train_steps=1", "did you mean train.steps?"),
        ("nodes=1", "did you mean resources.nodes?"),
        ("nmae=1", "did you mean name?"),
        ("train.seed=1", "did you mean seed?"),
        ("checkpoint.async_save=true", "did you mean checkpoint.async?"),
        ("learningrate=1", "`trainkit schema` prints every key"),
        ("qqqqq=1", "`trainkit schema` prints every key"),
        (
            "checkpoint.dir=1",
            "checkpoint has every_steps, every_minutes, keep_last, best_metric, best_mode, async",
        ),
        ("schedule.name_=1", "did you mean schedule.name?"),
        ("notify.name=1", "notify has on, webhook, mail, min_interval_s, stalled_after_s"),
        (
            "train.batch_size=1",
            "did you mean train.device_batch_size, the samples per process and pass, or"
            " train.global_batch_size, the samples per optimizer step?",
        ),
        ("data.dataset=1", "did you mean data.source?"),
        ("slurm=1", "did you mean resources?"),
        ("optimizer.decay=1", "did you mean optimizer.weight_decay?"),
        ("train.steps.x=1", None),
    ],
)
def test_closest_match(tmp_path, override, hint):
    key = override.partition("=")[0]
    if hint is None:
        expected = (
            f'--set {override}: train.steps: must be a whole number of at least 1 or null, not {{"x": 1}}'
            + default_hint("train.steps")
        )
    else:
        shown = "trian" if key.startswith("trian") else key
        expected = f"--set {override}: {shown}: unknown key\n  hint: {hint}"
    assert problems(tmp_path, override) == [expected]


def test_dotted_key_in_a_file(tmp_path):
    said("\n".join(problems(tmp_path, text="train.steps: 3\n")))


def test_unknown_variable(tmp_path):
    said("\n".join(problems(tmp_path, TRAINKIT_TRAIN_STEPS="3")))


def test_an_overruled_value_is_not_judged_but_its_name_is(tmp_path):
    text = "seed: many\ntrian: 1\n"
    said("\n".join(problems(tmp_path, "seed=3", text=text)))


def test_a_newer_version_is_the_only_problem(tmp_path):
    text = "new_key: 1\nconfig_version: 3\ntrain: {steps: [1, 2]}\n"
    said("\n".join(problems(tmp_path, "seed=x", text=text)))


def test_a_long_value_is_cut(tmp_path):
    [found] = problems(tmp_path, f"seed=[{', '.join(map(str, range(100)))}]")
    shown = found.removesuffix(default_hint("seed")).partition(" not ")[2]
    assert shown.startswith("[0, 1, 2")
    assert shown.endswith("…")
    assert len(shown) == 80


def test_a_tracker_is_true_or_a_mapping(tmp_path):
    found = problems(tmp_path, "logging.wandb={projekt: x}", "logging.mlflow=sqlite.db")
    said("\n".join(found))


def test_a_password_in_a_tracking_uri_is_not_shown(tmp_path):
    [found] = problems(tmp_path, "logging.mlflow={tracking_uri: 'https://me:hunter2@host'}")
    said(found)


def test_the_file_store_of_mlflow(tmp_path):
    [found] = problems(tmp_path, "logging.mlflow={tracking_uri: 'file:///data/mlruns'}")
    said(found)


@pytest.mark.parametrize("key", all_keys())
def test_every_key_can_say_what_it_may_hold(key):
    assert allowed_values(tuple(key.split(".")))


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
