"""Tests which layer wins, and that every value records its source."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.config import dump_effective, load_config, read_effective
from trainkit.config.layers import Layers
from trainkit.errors import ConfigError

STRONGEST_LAST = (
    *("user.yaml:1", "trainkit.yaml:1", "run.yaml:1", "profiles/p.yaml:2", "TRAINKIT_SEED", "--set seed=6"),
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("strongest", range(-1, 6))
def test_the_stronger_layer_wins(tmp_path, strongest):
    """Each layer sets the seed to a different number."""
    environ, options = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}, {}
    user_file = tmp_path / "xdg/trainkit/config.yaml"
    files = (user_file, "seed: 1\n"), ("trainkit.yaml", "seed: 2\n"), ("run.yaml", "seed: 3\n")
    write(tmp_path / "work/run.yaml", "name: x\n")
    for name, text in (*files, ("profiles/p.yaml", "\nseed: 4\n"))[: strongest + 1]:
        write(tmp_path / "work" / name, text)
    if strongest >= 3:
        options["profile"] = "p"
    if strongest >= 4:
        environ["TRAINKIT_SEED"] = "5"
    if strongest >= 5:
        options["overrides"] = ["seed=6"]
    loaded = load_config("run.yaml", cwd=tmp_path / "work", environ=environ, **options)
    origin = (*STRONGEST_LAST, "default")[strongest].replace("user.yaml", str(user_file))
    assert (loaded.config.seed, loaded.origins["seed"]) == (strongest + 1, origin)
    assert loaded.set_by_user("seed") == (strongest >= 0)
    assert strongest >= 0 or loaded.origins["name"] == "run.yaml:1"


def test_without_layers_around_the_file(tmp_path):
    write(tmp_path / "trainkit.yaml", "seed: 2\n")
    write(tmp_path / "run.yaml", "name: x\n")
    given = {"environ": {"TRAINKIT_SEED": "5"}, "overrides": ["train.steps=9"], "layers": False}
    config = load_config("run.yaml", cwd=tmp_path, **given).config
    assert (config.seed, config.train.steps) == (0, 9)


def test_no_file_or_the_one_in_the_home_folder(tmp_path, monkeypatch):
    loaded = load_config(None, cwd=tmp_path, environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert set(loaded.origins.values()) == {"default"}
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "home/.config/trainkit/config.yaml", "resources: {account: abc}\n")
    assert load_config(None, cwd=tmp_path, environ={}).config.resources.account == "abc"


def test_mappings_merge_and_lists_replace(tmp_path):
    write(
        tmp_path / "trainkit.yaml", "launch: {env: {A: '1', B: '1'}}\nrequeue: {on: [crash, hang], max: 7}\n"
    )
    write(tmp_path / "run.yaml", "launch: {env: {B: '2'}}\nrequeue: {on: [timeout]}\n")
    loaded = load_config("run.yaml", cwd=tmp_path, environ={})
    assert loaded.config.launch.env == {"A": "1", "B": "2"}
    assert (loaded.config.requeue.on, loaded.config.requeue.max) == (("timeout",), 7)
    assert loaded.origins["launch.env.A"] == "trainkit.yaml:1"
    assert loaded.origins["launch.env.B"] == "run.yaml:1"


def test_environment_names(tmp_path):
    keys = {"TRAIN__STEPS": "7", "CHECKPOINT__ASYNC": "false", "REQUEUE__ON": "[crash]"}
    more = {"LAUNCH__ENV__NCCL_DEBUG": "INFO", "JOB_ID": "12", "WEBHOOK_URL": "https://hooks.example.org/x"}
    environ = {f"TRAINKIT_{name}": value for name, value in {**keys, **more}.items()}
    environ |= {"TRAINKIT": "x", "HOME": str(tmp_path)}
    config = load_config(None, cwd=tmp_path, environ=environ).config
    assert (config.train.steps, config.checkpoint.async_save, config.requeue.on) == (7, False, ("crash",))
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


def test_set_value_and_a_section_with_nothing_in_it(tmp_path):
    values = {"b=c": "b=c", "01:00:00": "01:00:00", "x y": "x y", "": None, "[1]": [1]}
    for text, value in values.items():
        assert Layers(tmp_path).flags([f"a={text}"], {})[0].plain() == {"a": value}
    write(tmp_path / "run.yaml", "train:\n  # steps: 3\nseed: 1\n")
    assert load_config("run.yaml", cwd=tmp_path, environ={}).config.train.steps == 200


def test_data_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    source = "[a.txt, /b.txt, stdlib]"
    write(tmp_path / "sub/run.yaml", f"data: {{source: {source}, tokenizer: ~/t.json, cache_dir: c}}\n")
    data = load_config("sub/run.yaml", cwd=tmp_path, environ={}).config.data
    assert data.source == [f"{tmp_path}/a.txt", "/b.txt", "stdlib"]
    assert (data.tokenizer, data.cache_dir) == ("/home/me/t.json", f"{tmp_path}/c")
    data = load_config(None, cwd=tmp_path, environ={}, overrides=["data.source=bytes"]).config.data
    assert (data.tokenizer, data.source) == ("bytes", f"{tmp_path}/bytes")


def test_a_mixture_is_one_value_with_absolute_paths(tmp_path):
    write(tmp_path / "base.yaml", "data: {source: {a.txt: 0.7, /b.txt: 0.3, stdlib: 1}}\n")
    write(tmp_path / "run.yaml", "extends: base.yaml\nseed: 1\n")
    write(tmp_path / "other.yaml", "extends: base.yaml\ndata:\n  source:\n    c.txt: 1\n")

    def source(name, *overrides):
        return load_config(name, cwd=tmp_path, environ={}, overrides=overrides).config.data.source

    loaded = load_config("run.yaml", cwd=tmp_path, environ={})
    assert loaded.config.data.source == {f"{tmp_path}/a.txt": 0.7, "/b.txt": 0.3, "stdlib": 1}
    assert loaded.origins["data.source"] == "base.yaml:1"
    write(tmp_path / "effective.yaml", dump_effective(loaded.config))
    assert read_effective(tmp_path / "effective.yaml") == loaded.config
    assert source("other.yaml") == {f"{tmp_path}/c.txt": 1}
    assert source("run.yaml", "data.source={d.txt: 2, /b.txt: 1}") == {f"{tmp_path}/d.txt": 2, "/b.txt": 1}
    assert source("run.yaml", "data.source=stdlib") == "stdlib"


WRONG_WEIGHTS = ("{a: 0}", "{a: -1, b: 2}", "{a: .inf}", "{a: true}", "{a: [1]}", "{}", "{a: 1, ./a: 2}")


def test_wrong_weights():
    for source in WRONG_WEIGHTS:
        with pytest.raises(ConfigError) as caught:
            load_config(None, cwd=Path("/work-folder"), environ={}, overrides=[f"data.source={source}"])
        said(caught.value.message)
