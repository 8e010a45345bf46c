"""Tests that the effective config is read back equal, and that any input loads or is refused with hints."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hostile_configs import tried
from tests.support.said import said
from trainkit.config import RunConfig, dump_effective, load_config, read_effective
from trainkit.config.schema import all_keys
from trainkit.config.yamlfile import dump
from trainkit.errors import ConfigError, Problem

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=50)
@given(
    env=st.dictionaries(names, names, max_size=3),
    secrets=st.lists(st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]*\Z"), max_size=3),
    text_key=names.filter(bool),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    epochs=st.none() | st.floats(min_value=0.001, max_value=1e6),
)
def test_round_trip(tmp_path_factory, env, secrets, text_key, lr, seed, epochs):
    values = {"seed": seed, "launch": {"env": env, "secrets": secrets}, "data": {"text_key": text_key}}
    config = RunConfig.model_validate({**values, "optimizer": {"lr": lr}, "train": {"epochs": epochs}})
    file = tmp_path_factory.mktemp("run") / "config.yaml"
    file.write_text(dump_effective(config), encoding="utf-8", newline="")
    assert read_effective(file) == config


def test_complete_and_in_the_order_of_the_schema():
    dumped = yaml.safe_load(dump_effective(RunConfig()))
    assert list(dumped) == list(RunConfig.model_fields)
    assert dumped["checkpoint"]["async"] is True
    assert dumped["requeue"]["on"] == ["preempted", "timeout", "node_fail", "crash", "hang"]
    assert dumped["resources"]["time"] == "01:00:00"
    sections = [value for key, value in dumped.items() if key != "task_args"]
    assert len(all_keys()) == 1 + sum(len(value) if isinstance(value, dict) else 1 for value in sections)
    given = ["seed=1", "train.steps=2"]
    configs = [load_config(None, overrides=each, environ={}).config for each in (given, given[::-1])]
    assert dump_effective(configs[0]) == dump_effective(configs[1])


def test_damaged_file_names_key_and_line(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("seed: 1\ntrain:\n  steps: x\n  stps: 1\n")
    with pytest.raises(ConfigError) as error:
        read_effective(file)
    said(error.value.message)
    file.write_text("config_version: 9\nother: 1\n")
    newer = "written for a newer trainkit version: the file has config version 9"
    with pytest.raises(ConfigError, match=newer):
        read_effective(file)


@pytest.mark.parametrize(
    ("version", "read"), [("config_version: 1\n", "auto"), ("config_version: 2\n", True), ("", True)]
)
def test_what_was_the_default_of_an_older_version_demands_nothing(tmp_path, version, read):
    file = tmp_path / "config.yaml"
    file.write_text(f"{version}logging: {{tensorboard: true}}\n")
    loaded = load_config(file, environ={}, cwd=tmp_path)
    assert loaded.config == read_effective(file)
    assert (loaded.config.config_version, loaded.config.logging.tensorboard) == (2, read)
    asked = load_config(file, overrides=["logging.tensorboard=true"], environ={}, cwd=tmp_path)
    assert asked.config.logging.tensorboard is True
    for typed in ({"overrides": ["config_version=1"]}, {"environ": {"TRAINKIT_CONFIG_VERSION": "1"}}):
        assert load_config(file, **{"environ": {}, "cwd": tmp_path, **typed}).config == loaded.config
    schema = RunConfig.model_json_schema()["properties"]["config_version"]
    assert (schema["enum"], schema["default"]) == ([1, 2], 2)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
keys = st.sampled_from([*RunConfig.model_fields, *all_keys(), "extends", "steps", "on", "", "a.b"]) | text
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | text
    | st.sampled_from([1, 2, 8, 0.5, "auto", "cuda", "sqrt"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=10,
)
variables = st.dictionaries(st.text("ABEIJNOPRSTX_", max_size=10), text, max_size=2)


@settings(max_examples=75, deadline=None)
@given(
    content=st.dictionaries(keys, values, max_size=4), sets=st.dictionaries(keys, values), environ=variables
)
def test_any_input(tmp_path_factory, content, sets, environ):
    folder = tmp_path_factory.mktemp("run")
    write(folder / "run.yaml", dump(content))
    refused: list[Problem] = []
    try:
        config = load_config(
            "run.yaml",
            overrides=[f"{key}={dump(value)}" for key, value in sets.items()],
            environ={f"TRAINKIT_{name}": value for name, value in environ.items()},
            cwd=folder,
        ).config
    except ConfigError as error:
        refused = error.problems
    assert all(problem.hint for problem in refused), refused
    if refused:
        return
    write(folder / "config.yaml", dump_effective(config))
    assert read_effective(folder / "config.yaml") == config
    assert load_config("config.yaml", layers=False, cwd=folder).config == config


def write(file: Path, content: str) -> None:
    file.write_text(content, encoding="utf-8", newline="")


def test_hostile_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(text, fault) for text, fault, _ in tried(100, seed=2) if fault] == []


def test_values_that_are_nested_too_deeply(tmp_path):
    deep = "[" * 900 + "]" * 900
    write(tmp_path / "run.yaml", f"seed: 1\ntask_args: {{a: {deep}}}\n")
    for overrides, where in (((), "run.yaml:2"), ((f"task_args={deep}",), f"--set task_args={deep}")):
        with pytest.raises(ConfigError) as caught:
            load_config("run.yaml" if not overrides else None, overrides=overrides, environ={}, cwd=tmp_path)
        assert caught.value.problems[0].origin == where
        said(caught.value.problems[0].message)
