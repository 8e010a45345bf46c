"""Tests which layer, extended file or profile wins, and that every value records its source."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.config import LoadedConfig, dump_effective, load_config, read_effective
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


def load(tmp_path: Path, files: dict[str, str], main: str = "run.yaml", **options: object) -> LoadedConfig:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return load_config(main, cwd=tmp_path, environ={}, **options)  # type: ignore[arg-type]


def message(tmp_path: Path, files: dict[str, str], **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, files, **options)
    return error.value.message


def test_later_files_win_and_this_file_wins_over_all(tmp_path):
    files = {
        "run.yaml": "extends: [a.yaml, sub/b.yaml]\nname: run\n",
        "a.yaml": "name: a\nseed: 1\ntrain: {steps: 1, log_every: 1}\n",
        "sub/b.yaml": "extends: c.yaml\nname: b\ntrain: {steps: 2}\n",
        "sub/c.yaml": "train:\n  steps: 3\n  device_batch_size: 3\n",
    }
    loaded = load(tmp_path, files)
    config, train = loaded.config, loaded.config.train
    assert (config.name, config.seed) == ("run", 1)
    assert (train.steps, train.log_every, train.device_batch_size) == (2, 1, 3)
    origins = [loaded.origins[f"train.{key}"] for key in ("device_batch_size", "log_every")]
    assert origins == ["sub/c.yaml:3", "a.yaml:3"]


def test_one_file_extended_twice_is_no_circle(tmp_path):
    files = {"run.yaml": "extends: [a.yaml, b.yaml]\n", "base.yaml": "seed: 9\nname: base\n"}
    files |= {"a.yaml": "extends: base.yaml\nseed: 1\n", "b.yaml": "extends: base.yaml\nname: b\n"}
    config = load(tmp_path, files).config
    # The second visit of base.yaml comes after a.yaml, so the second visit wins.
    assert (config.name, config.seed) == ("b", 9)


REFUSED = {
    "a circle": {"run.yaml": "seed: 1\nextends: a.yaml\n", "a.yaml": "extends: run.yaml\n"},
    "missing": {"run.yaml": "name: x\nextends:\n  - model/tiny.yaml\n  - zzz.yaml\n"},
    "lines of the extended file": {
        "run.yaml": "extends: a.yaml\nnodes: 1\n",
        "a.yaml": "\ntrain: {stepz: 1}\n",
    },
    **{
        value: {"run.yaml": f"extends: {value}\n", "a.yaml": "seed: 1\n"}
        for value in ("1", "[a.yaml, 2]", "{a: b}", '""')
    },
}


def test_what_is_refused(tmp_path):
    for files in REFUSED.values():
        said(message(tmp_path, files))


def test_shipped_configs_and_profiles_are_found_from_anywhere(tmp_path):
    config = load(tmp_path, {"run.yaml": "extends: models/nano.yaml\n"}, profile="smoke").config
    assert (config.model.preset, config.train.steps) == ("nano", 20)


@pytest.mark.parametrize("place", ["sub/profiles", "profiles", "configs/profiles"])
def test_profile_places(tmp_path, place):
    files = {"sub/run.yaml": "seed: 1\n", f"{place}/fast.yaml": "seed: 2\n"}
    loaded = load(tmp_path, files, "sub/run.yaml", profile="fast")
    assert (loaded.config.seed, loaded.origins["seed"]) == (2, f"{place}/fast.yaml:1")


def test_no_such_profile(tmp_path):
    files = {"run.yaml": "seed: 1\n", "profiles/big.yaml": "seed: 1\n"}
    said(message(tmp_path, files, profile="smok"))
    # a profile is a name, not a path
    assert "unknown profile '../run'" in message(tmp_path, files, profile="../run")
