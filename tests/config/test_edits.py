"""Tests flags that change a part of a value."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.cli.main import main
from trainkit.config import LoadedConfig, load_config
from trainkit.config.load import with_values
from trainkit.errors import ConfigError

CONFIG = """
name: x
tags: [a]
optimizer: {betas: [0.9, 0.98]}
launch:
  env: {KEEP: "1", DROP: "2"}
  setup: ["ulimit -n 4096"]
resources: {extra: {gres-flags: enforce-binding, hint: nomultithread}}
task_args: {width: 3, blocks: [{dim: 1}, {dim: 2}], 0: zero}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.replace(", 0: zero", ', "0": zero'))


def load(*overrides: str, **flags: Any) -> LoadedConfig:
    named = {key: ("a flag", value) for key, value in flags.items()}
    return load_config("run.yaml", overrides=overrides, flags=named, environ={})


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["optimizer.betas.0=0.8"], "optimizer.betas", [0.8, 0.98]),
        (["optimizer.betas.0=0.7", "optimizer.betas.1=0.8"], "optimizer.betas", [0.7, 0.8]),
        (["optimizer.betas.0=0.7", "optimizer.betas=[0.5, 0.6]"], "optimizer.betas", [0.5, 0.6]),
        (["optimizer.betas=[0.5, 0.6]", "optimizer.betas.1=0.7"], "optimizer.betas", [0.5, 0.7]),
        (["launch.setup+=module load cuda"], "launch.setup", ["ulimit -n 4096", "module load cuda"]),
        (["launch.setup+=[a, b]", "launch.setup.0=c"], "launch.setup", ["c", "a", "b"]),
        (["launch.modules+=cuda/12"], "launch.modules", ["cuda/12"]),
        (["tags+=b", "tags += c"], "tags", ["a", "b", "c"]),
        (["launch.env.DROP=null", "launch.env.NEW=3"], "launch.env", {"KEEP": "1", "NEW": "3"}),
        (["launch.env+={KEEP: 3}", "launch.env.KEEP=007"], "launch.env", {"KEEP": "007", "DROP": "2"}),
        (["launch.env+={A: 3}", "launch.env={B: 4}"], "launch.env", {"KEEP": "1", "DROP": "2", "B": "4"}),
        (
            [f"launch.env.{one}" for one in ("A=3", "A=null", "A=4", "DROP=null")],
            "launch.env",
            {"KEEP": "1", "A": "4"},
        ),
        (["launch.env+={NEW: 007}"], "launch.env", {"KEEP": "1", "DROP": "2", "NEW": "007"}),
        (["resources.extra.hint=null"], "resources.extra", {"gres-flags": "enforce-binding"}),
        (["data.source=[a, b]", "data.source+=c"], "data.source", ["a", "b", "c"]),
        (["task_args={on: [true]}", "task_args.on.0=1", "task_args.width=null"], "task_args.on", [1]),
        (
            [f"task_args.{one}" for one in ("blocks.1.dim=7", "blocks+=[{dim: 3}]", "0=one", "width=null")],
            "task_args",
            {"width": None, "blocks": [{"dim": 1}, {"dim": 7}, {"dim": 3}], "0": "one"},
        ),
    ],
)
def test_parts_of_values(overrides, key, expected):
    value = load(*overrides).config.model_dump(mode="json", by_alias=True)
    for name in key.split("."):
        value = value[name]
    if key == "data.source":
        expected = [str(Path(item).absolute()) for item in expected]  # type: ignore[attr-defined]
    # JSON distinguishes 1 from true
    assert json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_defaults_origins_and_named_flags():
    Path("run.yaml").write_text('launch: {env: {KEEP: "1"}}\n')
    loaded = load("optimizer.betas.1=0.9", "launch.env.NEW=2", **{"launch.env.NONE": None})
    assert loaded.config.optimizer.betas == (0.9, 0.9)
    assert loaded.origins["optimizer.betas"] == "--set optimizer.betas.1=0.9"
    assert loaded.origins["launch.env.KEEP"] == "run.yaml:1"
    dropped = load(**{"optimizer.betas.1": 0.5, "launch.setup+": "a", "launch.env.KEEP": None})
    assert dropped.config.launch.env == {}
    later = load("launch.env+={A: 3}", **{"launch.env.A": "4"})  # the same key in a sweep
    assert later.config.launch.env == {"KEEP": "1", "A": "4"}
    with pytest.raises(ConfigError, match=r"conflicts with --set optimizer\.betas\.1=0\.9"):
        load("optimizer.betas.1=0.9", **{"optimizer.betas.1": 0.5})


REFUSED = """\
optimizer.betas.2=0.5
launch.modules.0=x
optimizer.lr+=1
optimizer.lr.0=1
optimizer+=1
optimizer.beta.0=1
optimizer.betas+=0.5
optimizer.betas.0=wide
launch.env.NONE=null
task_args.blocks.2.dim=1
""".splitlines()


def refused(*overrides, **flags):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **flags)
    return caught.value


def test_what_is_refused():
    said("\n".join(refused(override).message for override in REFUSED))


@pytest.mark.parametrize(
    ("content", "override", "origin"),
    [
        ('launch: {env: {A: "1"}}', "launch.env+={Q: [1]}", "--set launch.env+={Q: [1]}"),
        ('launch: {env: {A: "1"}}', "launch.env.Q=[1]", "--set launch.env.Q=[1]"),
        ("resources: {extra: {a: 1}}", "resources.extra.b=[1]", "--set resources.extra.b=[1]"),
        ("data: {source: {web: 0.7, code: 0.3}}", "data.source.code=wide", "--set data.source.code=wide"),
        ('launch:\n  env:\n    A: "1"\n    B: [2]\n', "launch.env.C=3", "run.yaml:4"),
    ],
)
def test_the_part_that_is_refused_is_named_and_not_what_was_right(content, override, origin):
    Path("run.yaml").write_text(content + "\n")
    assert [problem.origin for problem in refused(override).problems] == [origin]


def test_a_mapping_that_is_added_conflicts_with_another_value_of_its_key():
    assert "conflicts with --set tags+={a: 1}" in refused("tags+={a: 1}", tags=["x"]).message
    both = {"launch.env+": {"A": "1"}, "launch.env": {"B": "2"}}
    assert "conflicts with a flag" in refused(**both).message
    assert load(**{**both, "launch.env": {"A": "1"}}).config.launch.env["A"] == "1"


def test_a_sweep_of_an_item(capsys):
    sweep = ["--sweep", "optimizer.betas.0=0.8,0.9", "--sweep", "launch.env.DROP=null,3"]
    assert main(["submit", "run.yaml", "--backend", "local", "--dry-run", "--json", *sweep]) == 0
    out, err = capsys.readouterr()
    said("\n".join(line for line in err.splitlines() if line.startswith("  trials ")))
    assert json.loads(out)["env"] == {"KEEP": "1"}


@pytest.fixture
def loaded(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntrain: {steps: 7}\n")
    return load_config(file, environ={}, cwd=tmp_path)


def test_the_others_stay_as_they_are(loaded):
    """Arguments of a task may have any name, and the original config keeps its values."""
    values = {"name": "other", "launch.env": {"A": "b"}, "checkpoint.async": False, "task_args.width": 32}
    first = with_values(loaded, {**values, "task_args.depth": 2}, "a test")
    second = with_values(first, {"task_args.width": 64}, "a test")
    changed = second.config
    assert (changed.name, changed.launch.env, changed.checkpoint.async_save) == ("other", {"A": "b"}, False)
    assert first.config.task_args == {"width": 32, "depth": 2}
    assert changed.task_args == {"width": 64, "depth": 2}
    assert changed.train == loaded.config.train
    origins = {key for key, origin in first.origins.items() if origin == "a test"}
    assert origins >= values.keys() - {"task_args.width"}
    assert second.origins["train.steps"] == loaded.origins["train.steps"] == "mine.yaml:2"
    assert (loaded.config.name, loaded.config.task_args) == ("mine", {})


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
