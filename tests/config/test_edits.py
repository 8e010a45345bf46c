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
            ["launch.env.A=3", "launch.env.A=null", "launch.env.A=4", "launch.env.DROP=null"],
            "launch.env",
            {"KEEP": "1", "A": "4"},
        ),
        (["launch.env+={NEW: 007}"], "launch.env", {"KEEP": "1", "DROP": "2", "NEW": "007"}),
        (["resources.extra.hint=null"], "resources.extra", {"gres-flags": "enforce-binding"}),
        (["data.source=[a, b]", "data.source+=c"], "data.source", ["a", "b", "c"]),
        (["task_args={on: [true]}", "task_args.on.0=1", "task_args.width=null"], "task_args.on", [1]),
        (
            [
                "task_args.blocks.1.dim=7",
                "task_args.blocks+=[{dim: 3}]",
                "task_args.0=one",
                "task_args.width=null",
            ],
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
    assert (
        load(**{"optimizer.betas.1": 0.5, "launch.setup+": "a", "launch.env.KEEP": None}).config.launch.env
        == {}
    )
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


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_refused(override):
    with pytest.raises(ConfigError) as caught:
        load(override)
    said(caught.value.message)


@pytest.mark.parametrize(
    ("content", "override"),
    [
        ('launch: {env: {A: "1"}}', "launch.env+={Q: [1]}"),
        ('launch: {env: {A: "1"}}', "launch.env.Q=[1]"),
        ("resources: {extra: {a: 1}}", "resources.extra.b=[1]"),
        ("data: {source: {web: 0.7, code: 0.3}}", "data.source.code=wide"),
    ],
)
def test_the_part_that_is_refused_is_named_and_not_what_was_right(content, override):
    Path("run.yaml").write_text(content + "\n")
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert [problem.origin for problem in caught.value.problems] == [f"--set {override}"]
    Path("run.yaml").write_text('launch:\n  env:\n    A: "1"\n    B: [2]\n')
    with pytest.raises(ConfigError) as caught:
        load("launch.env.C=3")
    assert [problem.origin for problem in caught.value.problems] == ["run.yaml:4"]


def test_a_mapping_that_is_added_conflicts_with_another_value_of_its_key():
    with pytest.raises(ConfigError, match=r"conflicts with --set tags\+=\{a: 1\}"):
        load("tags+={a: 1}", tags=["x"])
    with pytest.raises(ConfigError, match="conflicts with a flag"):
        load(**{"launch.env+": {"A": "1"}, "launch.env": {"B": "2"}})
    assert load(**{"launch.env+": {"A": "1"}, "launch.env": {"A": "1"}}).config.launch.env["A"] == "1"


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
