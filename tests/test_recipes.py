"""Each recipe, as docs/recipes.md types it, learns, survives a SIGKILL, and exports a model."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import need
from tests.test_docs import ROOT, commands, environ_of, losses
from trainkit.manifest import published
from trainkit.rundir import RunDir, read_metrics

PAGE = ROOT / "docs" / "recipes.md"


@dataclass(frozen=True)
class Recipe:
    """A recipe and the validation loss that it reaches."""

    name: str
    val_loss: float
    """Upper bound; an untrained model over bytes has 5.55, the logarithm of 257."""
    is_text: bool
    """Whether the export is a model of transformers."""
    before: str | None = None
    """The recipe from which it starts."""


RECIPES = [
    Recipe("gpt_3d", 3.0, is_text=True),
    Recipe("dual_gpu_gpt", 3.0, is_text=True),
    Recipe("temporal_encoder", 0.05, is_text=False),
    Recipe("multimodal_qa", 0.5, is_text=False),
    Recipe("phase2_multimodal", 0.2, is_text=False, before="phase1_multimodal"),
]


def typed(command: str, folder: Path) -> str:
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environ_of(folder), text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow(seconds=200)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe(recipe: Recipe, tmp_path: Path) -> None:
    need("transformers", "safetensors")
    documented = [line for line in commands(PAGE, "console recipe") if recipe.name in line]
    assert f"trainkit submit recipes/{recipe.name} --follow" in documented
    assert f"trainkit ckpt export {recipe.name} --out {recipe.name}-model" in documented
    if recipe.before is not None:
        typed(f"trainkit submit recipes/{recipe.before} --follow", tmp_path)
    for command in documented:
        typed(command, tmp_path)
    whole = RunDir(tmp_path / "runs" / recipe.name)
    values = [record["val_loss"] for record in read_metrics(whole) if "val_loss" in record]
    assert values[-1] < recipe.val_loss, values
    assert values[-1] < values[0]
    check_export(tmp_path / f"{recipe.name}-model", recipe)
    killed = RunDir(tmp_path / "runs" / "killed")
    interrupt(recipe, killed, tmp_path)
    typed("trainkit resume killed --follow", tmp_path)
    assert losses(killed.path) == losses(whole.path)
    assert {record["attempt"] for record in read_metrics(killed)} == {1, 2}


def interrupt(recipe: Recipe, killed: RunDir, folder: Path) -> None:
    """Start the recipe, and kill it after its first checkpoint."""
    argv = ["trainkit", "run", f"recipes/{recipe.name}", "--name", "killed"]
    with subprocess.Popen(argv, cwd=folder, env=environ_of(folder), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not published(killed.checkpoints_dir):
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        typed("trainkit cancel killed --now", folder)


def check_export(folder: Path, recipe: Recipe) -> None:
    if recipe.is_text:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        tokens = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt")["input_ids"]
        assert torch.isfinite(model(tokens).logits).all()
    else:
        from safetensors.torch import load_file

        tensors = load_file(folder / "model.safetensors")
        assert any(name.startswith("aligner.") for name in tensors)
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
