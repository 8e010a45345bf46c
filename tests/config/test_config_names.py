"""Which file CONFIG stands for: a file, a shipped config by its name, or the default of the folder."""

from pathlib import Path

import pytest

from trainkit.config import load_config
from trainkit.errors import ConfigError
from trainkit.folders import default_config, find_shipped_config, shipped_config_names, shipped_configs


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
def test_names_of_a_shipped_config(name: str, file: str, tmp_path: Path) -> None:
    assert find_shipped_config(name) == shipped_configs() / file
    loaded = load_config(name, cwd=tmp_path, environ={})
    assert str(shipped_configs() / file) in {origin.rpartition(":")[0] for origin in loaded.origins.values()}


@pytest.mark.parametrize(
    "name", ["", ".", "configs", "models", "8b", "/quickstart", "../configs/quickstart", "quickstart.json"]
)
def test_what_is_no_name_of_a_shipped_config(name: str) -> None:
    assert find_shipped_config(name) is None


def test_a_file_wins_over_a_shipped_config(tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text("seed: 1\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "8b.yaml").write_text("seed: 2\n")
    assert load_config("quickstart", cwd=tmp_path, environ={}).config.seed == 1
    assert load_config("models/8b.yaml", cwd=tmp_path, environ={}).config.seed == 2
    # A folder is no config, and the shipped names in it still stand for what ships.
    assert load_config("models/7b", cwd=tmp_path, environ={}).config.model.preset == "7b"


@pytest.mark.parametrize("name", ["quickstart", "models/tiny", "models/tiny.yaml"])
def test_extends_takes_the_same_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"extends: {name}\n")
    assert load_config("run.yaml", cwd=tmp_path, environ={}).config.model.preset == "tiny"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no/zzz.yaml", "/no; shipped configs: quickstart, models/125m, "),
        ("zzz", "hint: shipped configs: quickstart, models/125m, "),
    ],
)
def test_a_missing_config(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(name, cwd=tmp_path, environ={})
    assert error.value.message.startswith(f"{name}: no such ")
    assert problem in error.value.message


def test_the_default_of_a_folder(tmp_path: Path) -> None:
    assert default_config(tmp_path) == ("quickstart", "shipped")
    (tmp_path / "first-run.yaml").touch()
    assert default_config(tmp_path) == ("first-run.yaml", "written by `trainkit init`")
    (tmp_path / "config.yaml").touch()
    assert default_config(tmp_path) == ("config.yaml", "in this folder")


def test_every_name_that_is_listed_is_found() -> None:
    assert shipped_config_names()[0] == "quickstart"
    assert all(find_shipped_config(name) is not None for name in shipped_config_names())
