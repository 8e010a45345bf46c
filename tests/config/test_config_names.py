"""Tests which file CONFIG refers to: a file, or a shipped config by its name."""

import pytest

from trainkit.config import load_config
from trainkit.folders import find_shipped_config, shipped_config_names, shipped_configs


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quickstart", "quickstart.yaml"),
        ("quickstart.yaml", "quickstart.yaml"),
        ("configs/quickstart.yaml", "quickstart.yaml"),
        ("./configs/quickstart.yaml", "quickstart.yaml"),
        ("models/8b", "models/8b.yaml"),
        ("models/8b.yaml", "models/8b.yaml"),
        ("configs/models/8b.yaml", "models/8b.yaml"),
    ],
)
def test_names_of_a_shipped_config(name, file, tmp_path):
    assert find_shipped_config(name) == shipped_configs() / file
    loaded = load_config(name, cwd=tmp_path, environ={})
    assert str(shipped_configs() / file) in {origin.rpartition(":")[0] for origin in loaded.origins.values()}


@pytest.mark.parametrize(
    "name", ["", ".", "configs", "models", "8b", "/quickstart", "../configs/quickstart", "quickstart.json"]
)
def test_what_is_no_name_of_a_shipped_config(name):
    assert find_shipped_config(name) is None


def test_a_file_wins_over_a_shipped_config(tmp_path):
    (tmp_path / "quickstart").write_text("seed: 1\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "8b.yaml").write_text("seed: 2\n")
    assert load_config("quickstart", cwd=tmp_path, environ={}).config.seed == 1
    assert load_config("models/8b.yaml", cwd=tmp_path, environ={}).config.seed == 2
    # A folder is no config, and a shipped name in it still refers to the shipped config.
    assert load_config("models/7b", cwd=tmp_path, environ={}).config.model.preset == "7b"


def test_every_name_that_is_listed_is_found():
    assert shipped_config_names()[0] == "quickstart"
    assert all(find_shipped_config(name) is not None for name in shipped_config_names())
