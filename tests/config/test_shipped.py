"""Tests the schema as interfaces promise it, and that all shipped configs load without changes."""

import json
import os
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.support.programs import run_program
from trainkit.config import RunConfig, load_config
from trainkit.folders import find_shipped_config, shipped_config_names, shipped_configs

# Profiles of clusters are no run configs.
FILES = sorted(file for file in shipped_configs().rglob("*.yaml") if file.parent.name != "clusters")
PROFILES = [file for file in FILES if "." in file.stem]
SHIPPED = [file for file in FILES if file not in PROFILES]


@pytest.mark.parametrize("file", SHIPPED, ids=[str(file.relative_to(shipped_configs())) for file in SHIPPED])
def test_shipped_config(file, tmp_path):
    assert file.read_text().startswith("# ")
    load_config(file, environ={}, cwd=tmp_path)


@pytest.mark.parametrize("file", PROFILES, ids=[file.stem for file in PROFILES])
def test_profile_of_one_config(file, tmp_path):
    """The models in these configs come from a hub, and any other model can replace them."""
    assert file.read_text().startswith("# ")
    recipe, _, profile = file.stem.partition(".")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    model = {"model_type": "qwen2", "intermediate_size": 96, "rms_norm_eps": 1e-6, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(model))
    has_model = "hf:" in file.read_text() or "phase1_multimodal.cluster.yaml" in file.read_text()
    overrides = [f"model.hf={tmp_path}", "data.tokenizer=bytes"] if has_model else []
    loaded = load_config(f"recipes/{recipe}", profile=profile, overrides=overrides, environ={}, cwd=tmp_path)
    assert loaded.config.resources.gpus_per_node in (2, 4, 8)
    assert loaded.config.precision.dtype == "bf16"


def test_names_of_shipped_configs(tmp_path):
    names = {str(file.relative_to(shipped_configs())) for file in SHIPPED}
    assert names >= {"quickstart.yaml", "models/tiny.yaml", "models/8b.yaml", "profiles/smoke.yaml"}
    assert shipped_config_names()[0] == "quickstart"
    assert all(find_shipped_config(name) is not None for name in shipped_config_names())
    for file in (shipped_configs() / "models").glob("*.yaml"):
        assert load_config(file, environ={}, cwd=tmp_path).config.model.preset == file.stem.partition("-")[0]


def test_every_field_has_one_sentence_and_is_frozen():
    def check(model: type[BaseModel]) -> None:
        for name, field in model.model_fields.items():
            assert (field.description or "").endswith("."), name
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation)

    check(RunConfig)
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.steps = 3


def test_config_and_plan_load_neither_torch_nor_numpy():
    code = (
        "import sys, trainkit.config, trainkit.plan.make_plan, trainkit.cluster.machine\n"
        "print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    result = run_program(sys.executable, "-c", code, check=True)
    assert result.stdout == "[]\n"


NAMES = {
    "quickstart.yaml": "quickstart quickstart.yaml configs/quickstart.yaml ./configs/quickstart.yaml",
    "models/8b.yaml": "models/8b models/8b.yaml configs/models/8b.yaml",
}


@pytest.mark.parametrize("file", NAMES)
def test_names_of_a_shipped_config(file, tmp_path):
    for name in NAMES[file].split():
        assert find_shipped_config(name) == shipped_configs() / file
        origins = load_config(name, cwd=tmp_path, environ={}).origins.values()
        assert str(shipped_configs() / file) in {origin.rpartition(":")[0] for origin in origins}
    wrong = ". configs models 8b /quickstart ../configs/quickstart quickstart.json"
    assert {find_shipped_config(name) for name in ["", *wrong.split()]} == {None}


def test_a_file_wins_over_a_shipped_config(tmp_path):
    (tmp_path / "quickstart").write_text("seed: 1\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "8b.yaml").write_text("seed: 2\n")
    assert load_config("quickstart", cwd=tmp_path, environ={}).config.seed == 1
    assert load_config("models/8b.yaml", cwd=tmp_path, environ={}).config.seed == 2
    # A folder is no config, and a shipped name in it still refers to the shipped config.
    assert load_config("models/7b", cwd=tmp_path, environ={}).config.model.preset == "7b"


ROOT = Path(__file__).parents[2]
CONFIG = "from trainkit.config.schema import RunConfig\nRunConfig(name='a')\n"
OTHER = "from pydantic import BaseModel\nclass Other(BaseModel):\n    name: str\n"


@pytest.mark.parametrize(("code", "is_loaded"), [(CONFIG, False), (OTHER, True), (CONFIG + OTHER, True)])
def test_a_plugin_of_pydantic_is_for_models_of_others(tmp_path, code, is_loaded):
    """A tracker may install such a plugin, with all its imports."""
    info = tmp_path / "tracker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pydantic]\ntracker = tracker\n")
    (tmp_path / "tracker.py").write_text("raise ImportError('it was loaded')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environ.pop("PYDANTIC_DISABLE_PLUGINS", None)
    done = run_program(sys.executable, "-c", code, env=environ)
    assert done.returncode == 0, done.stderr
    assert ("it was loaded" in done.stderr) == is_loaded
