"""Tests which layer wins, and that every value records its source."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.config import LoadedConfig, dump_effective, load_config, read_effective
from trainkit.errors import ConfigError

LAYERS = ["user file", "project file", "run file", "profile", "environment", "flag"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def load_layers(tmp_path: Path, layers: list[str]) -> LoadedConfig:
    """Load a config whose given layers set the seed, each to a different number."""
    cwd = tmp_path / "work"
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    write(cwd / "run.yaml", "seed: 3\n" if "run file" in layers else "name: x\n")
    options: dict[str, Any] = {}
    if "user file" in layers:
        write(tmp_path / "xdg/trainkit/config.yaml", "seed: 1\n")
    if "project file" in layers:
        write(cwd / "trainkit.yaml", "seed: 2\n")
    if "profile" in layers:
        write(cwd / "profiles/p.yaml", "\nseed: 4\n")
        options["profile"] = "p"
    if "environment" in layers:
        environ["TRAINKIT_SEED"] = "5"
    if "flag" in layers:
        options["overrides"] = ["seed=6"]
    return load_config("run.yaml", cwd=cwd, environ=environ, **options)


@pytest.mark.parametrize("strongest", range(6))
def test_the_stronger_layer_wins(tmp_path, strongest):
    loaded = load_layers(tmp_path, LAYERS[: strongest + 1])
    origins = [
        str(tmp_path / "xdg/trainkit/config.yaml:1"),
        "trainkit.yaml:1",
        "run.yaml:1",
        "profiles/p.yaml:2",
        "TRAINKIT_SEED",
        "--set seed=6",
    ]
    assert (loaded.config.seed, loaded.origins["seed"]) == (strongest + 1, origins[strongest])
    assert loaded.set_by_user("seed")


def test_default(tmp_path):
    loaded = load_layers(tmp_path, [])
    assert (loaded.config.seed, loaded.origins["seed"]) == (0, "default")
    assert not loaded.set_by_user("seed")
    assert loaded.origins["name"] == "run.yaml:1"


def test_without_layers_around_the_file(tmp_path):
    write(tmp_path / "trainkit.yaml", "seed: 2\n")
    write(tmp_path / "run.yaml", "name: x\n")
    loaded = load_config(
        "run.yaml", cwd=tmp_path, environ={"TRAINKIT_SEED": "5"}, overrides=["train.steps=9"], layers=False
    )
    assert loaded.config.seed == 0
    assert loaded.config.train.steps == 9


def test_no_file_at_all(tmp_path):
    loaded = load_config(None, cwd=tmp_path, environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert set(loaded.origins.values()) == {"default"}


def test_user_file_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "home/.config/trainkit/config.yaml", "resources: {account: abc}\n")
    loaded = load_config(None, cwd=tmp_path, environ={})
    assert loaded.config.resources.account == "abc"


def test_mappings_merge_and_lists_replace(tmp_path):
    write(
        tmp_path / "trainkit.yaml", "launch: {env: {A: '1', B: '1'}}\nrequeue: {on: [crash, hang], max: 7}\n"
    )
    write(tmp_path / "run.yaml", "launch: {env: {B: '2'}}\nrequeue: {on: [timeout]}\n")
    loaded = load_config("run.yaml", cwd=tmp_path, environ={})
    assert loaded.config.launch.env == {"A": "1", "B": "2"}
    assert loaded.config.requeue.on == ("timeout",)
    assert loaded.config.requeue.max == 7
    assert loaded.origins["launch.env.A"] == "trainkit.yaml:1"
    assert loaded.origins["launch.env.B"] == "run.yaml:1"


def test_environment_names(tmp_path):
    environ = {
        "TRAINKIT_TRAIN__STEPS": "7",
        "TRAINKIT_CHECKPOINT__ASYNC": "false",
        "TRAINKIT_REQUEUE__ON": "[crash]",
        "TRAINKIT_LAUNCH__ENV__NCCL_DEBUG": "INFO",
        "TRAINKIT_JOB_ID": "12",
        "TRAINKIT_WEBHOOK_URL": "https://hooks.example.org/x",
        "TRAINKIT": "x",
        "HOME": str(tmp_path),
    }
    config = load_config(None, cwd=tmp_path, environ=environ).config
    assert config.train.steps == 7
    assert config.checkpoint.async_save is False
    assert config.requeue.on == ("crash",)
    assert config.launch.env == {"NCCL_DEBUG": "INFO"}


def test_named_flags(tmp_path):
    nodes, environ = "resources.nodes", {"TRAINKIT_RESOURCES__NODES": "5"}
    given: dict[str, Any] = {"cwd": tmp_path, "environ": environ, "flags": {nodes: ("--nodes 2", 2)}}
    loaded = load_config(None, overrides=[f"{nodes}=2", "seed=1", "seed=2"], **given)
    assert (loaded.config.resources.nodes, loaded.origins[nodes]) == (2, "--nodes 2")
    assert (loaded.config.seed, loaded.origins["seed"]) == (2, "--set seed=2")
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides=[f"{nodes}=3"], **given)
    said(error.value.message)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=b=c", "b=c"), ("a=01:00:00", "01:00:00"), ("a=x y", "x y"), ("a=", None), ("a=[1]", [1])],
)
def test_set_value(tmp_path, text, value):
    from trainkit.config.layers import Layers

    assert Layers(tmp_path).flags([text], {})[0].plain() == {"a": value}


def test_a_section_with_nothing_in_it_asks_nothing(tmp_path):
    write(tmp_path / "run.yaml", "train:\n  # steps: 3\nseed: 1\n")
    assert load_config("run.yaml", cwd=tmp_path, environ={}).config.train.steps == 200


def test_data_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    write(
        tmp_path / "sub/run.yaml",
        "data: {source: [a.txt, /b.txt, stdlib], tokenizer: ~/t.json, cache_dir: c}\n",
    )
    data = load_config("sub/run.yaml", cwd=tmp_path, environ={}).config.data
    assert data.source == [f"{tmp_path}/a.txt", "/b.txt", "stdlib"]
    assert data.tokenizer == "/home/me/t.json"
    assert data.cache_dir == f"{tmp_path}/c"
    assert load_config(None, cwd=tmp_path, environ={}).config.data.tokenizer == "bytes"
    assert load_config(
        None, cwd=tmp_path, environ={}, overrides=["data.source=bytes"]
    ).config.data.source == (f"{tmp_path}/bytes")


def test_a_mixture_is_one_value_with_absolute_paths(tmp_path):
    write(tmp_path / "base.yaml", "data: {source: {a.txt: 0.7, /b.txt: 0.3, stdlib: 1}}\n")
    write(tmp_path / "run.yaml", "extends: base.yaml\nseed: 1\n")
    write(tmp_path / "other.yaml", "extends: base.yaml\ndata:\n  source:\n    c.txt: 1\n")
    loaded = load_config("run.yaml", cwd=tmp_path, environ={})
    assert loaded.config.data.source == {f"{tmp_path}/a.txt": 0.7, "/b.txt": 0.3, "stdlib": 1}
    assert loaded.origins["data.source"] == "base.yaml:1"
    write(tmp_path / "effective.yaml", dump_effective(loaded.config))
    assert read_effective(tmp_path / "effective.yaml") == loaded.config
    replaced = load_config("other.yaml", cwd=tmp_path, environ={})
    assert replaced.config.data.source == {f"{tmp_path}/c.txt": 1}
    flag = ["data.source={d.txt: 2, /b.txt: 1}"]
    by_flag = load_config("run.yaml", cwd=tmp_path, environ={}, overrides=flag)
    assert by_flag.config.data.source == {f"{tmp_path}/d.txt": 2, "/b.txt": 1}
    single = load_config("run.yaml", cwd=tmp_path, environ={}, overrides=["data.source=stdlib"])
    assert single.config.data.source == "stdlib"


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("{a: 0}", 'not {"a": 0}', "give each source a weight"),
        ("{a: -1, b: 2}", 'not {"a": -1, "b": 2}', "give each source a weight"),
        ("{a: .inf}", "not {", "give each source a weight"),
        ("{a: true}", 'not {"a": true}', "give each source a weight"),
        ("{a: [1]}", 'not {"a": [1]}', "give each source a weight"),
        ("{}", "not {}", "give each source a weight"),
        ("{a: 1, ./a: 2}", "names /work-folder/a twice", "add its weights"),
    ],
)
def test_wrong_weights(source, message, hint):
    with pytest.raises(ConfigError) as caught:
        load_config(None, cwd=Path("/work-folder"), environ={}, overrides=[f"data.source={source}"])
    [problem] = caught.value.problems
    assert problem.key == "data.source"
    assert message in problem.message
    assert hint in problem.hint
