"""Tests that any typed input loads or is refused with problems that have hints, and raises nothing else."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hostile_configs import tried
from tests.support.said import said
from trainkit.config import RunConfig, dump_effective, load_config, read_effective
from trainkit.config.schema import all_keys
from trainkit.config.yamlfile import dump
from trainkit.errors import ConfigError, Problem

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
