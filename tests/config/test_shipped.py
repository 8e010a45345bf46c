"""The schema as interfaces promise it, and the shipped configs, which all load as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from trainkit.config import RunConfig, load_config
from trainkit.resources import shipped_configs

SHIPPED = sorted(
    file for file in shipped_configs().rglob("*.yaml") if file.parent.name != "clusters"
)  # profiles of clusters are no run configs


@pytest.mark.parametrize("file", SHIPPED, ids=[str(file.relative_to(shipped_configs())) for file in SHIPPED])
def test_shipped_config(file: Path, tmp_path: Path) -> None:
    assert file.read_text().startswith("# ")
    load_config(file, environ={}, cwd=tmp_path)


def test_quickstart_and_a_model_of_every_useful_size_ship() -> None:
    names = {str(file.relative_to(shipped_configs())) for file in SHIPPED}
    assert names >= {"quickstart.yaml", "models/tiny.yaml", "models/8b.yaml", "profiles/smoke.yaml"}


def test_every_model_config_is_named_for_its_preset(tmp_path: Path) -> None:
    for file in (shipped_configs() / "models").glob("*.yaml"):
        assert load_config(file, environ={}, cwd=tmp_path).config.model.preset == file.stem.partition("-")[0]


def test_every_field_has_one_sentence() -> None:
    def check(model: type[BaseModel]) -> None:
        for name, field in model.model_fields.items():
            assert field.description, name
            assert field.description.endswith("."), name
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation)

    check(RunConfig)


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.steps = 3  # type: ignore[misc]


def test_config_and_plan_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, trainkit.config, trainkit.plan.make_plan, trainkit.cluster.machine\n"
        "print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
