"""Tests that each recipe of docs/recipes.md learns, survives a SIGKILL, and exports a model."""

import json
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import need
from tests.support.programs import RunProcesses, run_program
from tests.test_docs import ROOT, commands, environ_of
from trainkit.job.processes import signal_all
from trainkit.run.events import read_metrics
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir

PAGE = ROOT / "docs" / "recipes.md"


@dataclass(frozen=True)
class Recipe:
    """A recipe and the validation loss that it reaches."""

    name: str
    val_loss: float
    """The upper bound of the loss. An untrained model over bytes has 5.55, the logarithm of 257."""
    is_text: bool
    """True if the export is a model of transformers."""
    before: str | None = None
    """The recipe whose model this recipe starts with."""
    steps: int = 96

    @property
    def environ(self) -> dict[str, str]:
        """Return variables that shorten the recipe without a change of its commands."""
        return {
            "TRAINKIT_TRAIN__STEPS": str(self.steps),
            "TRAINKIT_TRAIN__EVAL_EVERY": str(self.steps // 4),
            "TRAINKIT_TRAIN__LOG_EVERY": "1",
            "TRAINKIT_CHECKPOINT__EVERY_STEPS": str(self.steps // 4),
        }


RECIPES = [
    Recipe("gpt_3d", 3.3, is_text=True, steps=24),
    Recipe("dual_gpu_gpt", 3.3, is_text=True, steps=24),
    Recipe("temporal_encoder", 0.05, is_text=False),
    Recipe("multimodal_qa", 0.5, is_text=False),
    Recipe("phase2_multimodal", 0.2, is_text=False, before="phase1_multimodal"),
]


RECOMPUTED = 3
"""The number of steps after the first checkpoint at which a recipe is killed.

These steps are computed twice.
"""
NAMES = ("loss", "grad_norm", "lr", "val_loss", "samples_seen")


def typed(command: str, folder: Path, **environ: str) -> str:
    done = run_program(*shlex.split(command), cwd=folder, env=environ_of(folder, **environ), timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow(seconds=120)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe(recipe: Recipe, tmp_path: Path) -> None:
    need("transformers", "safetensors")
    environ = recipe.environ
    documented = [line for line in commands(PAGE, "console recipe") if recipe.name in line]
    train = f"trainkit submit recipes/{recipe.name} --follow"
    assert f"trainkit ckpt export {recipe.name} --out {recipe.name}-model" in documented
    at = documented.index(train)
    if recipe.before is not None:
        typed(f"trainkit submit recipes/{recipe.before} --follow", tmp_path, **environ)
    for command in documented[:at]:
        typed(command, tmp_path, **environ)
    run = RunDir(tmp_path / "runs" / recipe.name)
    kill(train, run, tmp_path, **environ)
    saved = published(run.checkpoints_dir)[-1].step
    first = {record["step"]: record for record in read_metrics(run) if record["step"] > saved}
    assert len(first) >= RECOMPUTED
    typed(f"trainkit resume {recipe.name} --follow", tmp_path, **environ)
    for command in documented[at + 1 :]:
        typed(command, tmp_path, **environ)
    records = read_metrics(run)
    again = {record["step"]: record for record in records if record["attempt"] == 2}
    assert min(again) == saved + 1
    for step, record in first.items():
        assert [json.dumps(again[step].get(name)) for name in NAMES] == [
            json.dumps(record.get(name)) for name in NAMES
        ]
    values = [record["val_loss"] for record in records if "val_loss" in record]
    assert values[-1] < recipe.val_loss, values
    assert values[-1] < values[0]
    check_export(tmp_path / f"{recipe.name}-model", recipe)


def kill(train: str, run: RunDir, folder: Path, **environ: str) -> None:
    """Start a recipe, and kill all its processes soon after its first checkpoint."""
    with subprocess.Popen(
        shlex.split(train),
        cwd=folder,
        env=environ_of(folder, **environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None and not is_due(run):
            time.sleep(0.02)
        pids = RunProcesses.of(run).everything
        signal_all(pids, signal.SIGKILL)
        assert pids
        process.wait(timeout=60)


def is_due(run: RunDir) -> bool:
    saved = published(run.checkpoints_dir)
    return bool(saved) and read_metrics(run)[-1]["step"] >= saved[-1].step + RECOMPUTED


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
