"""Tests files that extend files, and profiles."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.config import LoadedConfig, load_config
from trainkit.errors import ConfigError


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
