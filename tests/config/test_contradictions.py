"""Tests values that are valid alone and contradict each other, and epochs that replace the default steps."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.config import LoadedConfig, dump_effective, load_config
from trainkit.config.validation import OF_BASH
from trainkit.errors import ConfigError


def load(tmp_path: Path, *overrides: str) -> LoadedConfig:
    return load_config(None, overrides=overrides, environ={}, cwd=tmp_path)


def problem(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *overrides)
    return error.value.message


def test_epochs_survive_the_run_folder(tmp_path):
    first = load(tmp_path, "train.epochs=2").config
    (tmp_path / "config.yaml").write_text(dump_effective(first))
    again = load_config(tmp_path / "config.yaml", overrides=["seed=1"], layers=False, cwd=tmp_path).config
    assert again == first.model_copy(update={"seed": 1})


@pytest.mark.parametrize(
    ("file", "flag", "length", "note"),
    [
        ("epochs: 2", "train.steps=20", (20, None), "20 steps: {} replaces train.epochs"),
        ("steps: 9", "train.epochs=0.5", (None, 0.5), "0.5 epochs: {} replaces train.steps"),
        ("{epochs: 2, steps: null}", "train.steps=20", (20, None), "20 steps: {} replaces train.epochs"),
        *(("epochs: 2", "seed=1", (None, 2), ""), ("{steps: 10, epochs: null}", "seed=1", (10, None), "")),
    ],
)
def test_a_later_length_replaces_an_earlier_one(tmp_path, file, flag, length, note):
    (tmp_path / "run.yaml").write_text(f"train:\n  {file}\n")
    loaded = load_config("run.yaml", overrides=[flag], environ={}, cwd=tmp_path)
    assert (loaded.config.train.steps, loaded.config.train.epochs) == length
    assert loaded.length_note == note.format(f"--set {flag}")


@pytest.mark.parametrize("also", [(), ("train.steps=null",)])
def test_epochs_win_over_the_default_of_steps(tmp_path, also):
    loaded = load(tmp_path, "train.epochs=0.5", *also)
    assert (loaded.config.train.epochs, loaded.config.train.steps) == (0.5, None)
    assert loaded.origins["train.steps"] == (f"--set {also[0]}" if also else "default")


EIGHT_BIT = "optimizer.name=adamw_8bit"


CONTRADICTIONS = """\
train.steps=null
train.epochs=2 train.steps=10
schedule.decay_steps=5
schedule.decay_steps=181 schedule.name=wsd
schedule.name=mine.py:f schedule.decay_steps=5 schedule.min_lr_ratio=0.2
schedule.name=mine.py:f schedule.min_lr_ratio=0.1
precision.float8=rowwise precision.dtype=fp16
precision.float8=gather parallel.offload=true
precision.tf32=true
optimizer.state_dtype=bf16 optimizer.name=adamw_8bit
optimizer.name=sgd optimizer.betas=[0.9,0.99] optimizer.eps=1e-6
optimizer.name=lion optimizer.eps=1e-6 optimizer.nesterov=true optimizer.momentum=0
optimizer.momentum=0.8
optimizer.name=sgd optimizer.state_dtype=bf16 optimizer.momentum=0.999
optimizer.name=sgd optimizer.nesterov=true optimizer.momentum=0
optimizer.name=mine.py:Mine parallel.pp=2
optimizer.name=mine.py:Mine optimizer.state_dtype=bf16
optimizer.options.alpha=1
optimizer.name=adamw_8bit parallel.tp=3
optimizer.name=adamw_8bit parallel.tp=16
optimizer.momentum=0.9 optimizer.ns_precision=bf16
optimizer.name=muon task=mine.py:Mine
optimizer.name=muon model.architecture=transformers model.hf=here model.lora.r=8
optimizer.name=muon parallel.offload=true
optimizer.name=muon optimizer.state_dtype=bf16
optimizer.name=muon optimizer.ns_precision=tf32x3 device=cpu
checkpoint.best_metric=val_accuracy
checkpoint.best_metric=val_loss_ema
checkpoint.best_metric=val_accuracy ema.decay=0.9
model.init_weights=ema
checkpoint.best_metric=val_accuracy task=mine.py:Mine train.eval_every=null
checkpoint.best_metric=val_loss_ema ema.decay=0.9 train.eval_every=null
notify.mail=me@x.org resources.mail_user=you@x.org
notify.mail=me@x.org resources.mail_type=ALL
notify.mail=me@x.org notify.on=[stalled,slow]
launch.env.HF_TOKEN=abc
launch.env.WANDB_API_KEY=abc
launch.env.MY_PASSWORD=abc
data.document_mask=true parallel.cp=2
data.document_mask=true parallel.pp=2
data.document_mask=true model.architecture=mine.py:Mine
data.document_mask=true task=mine.py:Mine
train.z_loss=0.001 task=mine.py:Mine
notify.webhook=https://hooks.example.org/services/T0P
notify.webhook=hooks.example.org/x
notify.webhook=MY_HOOK launch.env.MY_HOOK=https://hooks.example.org/services/T0P
notify.webhook=MY_HOOK launch.env.MY_HOOK=hooks.example.org/x
""".splitlines()
ONE_OVERRIDE = (
    "notify.webhook=a b",
    *('launch.setup=["export HF_TOKEN=hf_abcdefgh"]', """launch.setup=["A_KEY='long enough' python x.py"]"""),
    *("logging.pattern=step (", "logging.pattern=loss (?P<loss>.)"),
    *(f"logging.pattern=(?P<step>.) (?P<{name}>.)" for name in ("time", "attempt", "source")),
)


def test_contradictions(tmp_path):
    """The message about a secret does not show the secret."""
    cases = [*(line.split() for line in CONTRADICTIONS), *([one] for one in ONE_OVERRIDE)]
    said("\n".join(problem(tmp_path, *overrides) for overrides in cases))


def test_what_does_not_contradict(tmp_path):
    assert load(tmp_path, "schedule.name=wsd", "schedule.decay_steps=180").config.schedule.decay_steps == 180
    load(tmp_path, EIGHT_BIT, "optimizer.state_dtype=fp32", "optimizer.betas=[0.9, 0.999]")
    for override in ("optimizer.name=sgd", "schedule.name=mine.py:f"):
        (tmp_path / "effective.yaml").write_text(dump_effective(load(tmp_path, override).config))
        load_config(tmp_path / "effective.yaml", environ={})
    assert load(tmp_path, "schedule.name=mine.py:f").config.schedule.warmup_steps == 0
    assert (
        load(tmp_path, "schedule.name=mine.py:f", "schedule.warmup_steps=3").config.schedule.warmup_steps == 3
    )
    load(tmp_path, "optimizer.name=muon", "optimizer.momentum=0.9", "optimizer.ns_precision=bf16")
    for tp in (2, 4, 8):
        load(tmp_path, EIGHT_BIT, f"parallel.tp={tp}")
    assert load(tmp_path, "optimizer.name=lion").config.optimizer.betas == (0.9, 0.99)
    assert load(tmp_path, "optimizer.name=lion", "optimizer.betas=[0.5, 0.6]").config.optimizer.betas == (
        0.5,
        0.6,
    )
    load(tmp_path, "checkpoint.best_metric=val_accuracy", "task=mine.py:Mine")
    load(tmp_path, "checkpoint.best_metric=loss")
    load(tmp_path, "data.document_mask=true", "parallel.tp=2")
    more = (
        *("export HF_TOKEN=$(cat ~/.token)", 'HF_TOKEN="$MINE" x', "MAX_TOKENS=4096 x"),
        "x max_tokens=40960000",
    )
    assert load(tmp_path, f"launch.setup={json.dumps(more)}").config.launch.setup == more


NO_NAMES = ("1A", "A-B", "A B", "", "A=B", "A;touch X", "Ä", "A\nB", "A.B", "A\0")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, "1", f"{name!r} is not a valid environment variable name") for name in NO_NAMES),
        *((name, "1", "is a variable that bash itself sets in the job") for name in OF_BASH),
        ("A", "\0", "has a NUL character, which an environment variable cannot contain"),
    ],
)
def test_variables_that_a_batch_script_would_drop(tmp_path, name, value, message):
    file = tmp_path / "config.yaml"
    file.write_text(f"launch:\n  env:\n    A1: x\n    {json.dumps(name)}: {json.dumps(value)}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, environ={}, cwd=tmp_path)
    [found] = error.value.problems
    assert (found.message, found.line, bool(found.hint)) == (message, 4, True)


def test_bash_sets_these_variables_itself():
    for name in OF_BASH:
        script = f"export {name}=77 2>/dev/null; /usr/bin/env"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert f"{name}=77\n" not in done.stdout


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/x", "s3://bucket/x is a URL, not a path"),
        ("~no-such-user/x", "~no-such-user/x: there is no user no-such-user on this machine"),
    ],
)
@pytest.mark.parametrize(
    "key", ["model.init_from", "data.source", "data.cache_dir", "data.tokenizer", "model.hf"]
)
def test_what_is_no_path(tmp_path, key, path, message):
    assert f"--set {key}={path}: {key}: {message}" in problem(tmp_path, f"{key}={path}")
    file = tmp_path / "config.yaml"
    file.write_text(f"extends: {path}\n")
    with pytest.raises(ConfigError, match=re.escape(f"config.yaml:1: extends: {message}")):
        load_config(file, environ={}, cwd=tmp_path)


@pytest.mark.parametrize("name", ["last", "local-12", "4711", "4711_3"])
def test_a_name_that_means_another_run(tmp_path, name):
    said(problem(tmp_path, f'name="{name}"'))
    assert load(tmp_path, f"name=run-{name}").config.name
