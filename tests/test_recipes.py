"""Tests that recipes of docs/recipes.md learn and export a model. One is killed and resumes exactly."""

import json
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import need
from tests.support.programs import RunProcesses
from tests.test_docs import ROOT, commands
from trainkit.cli.main import main
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
    """The recipe whose model this recipe starts with. A recipe of a second phase is killed and resumed."""
    steps: int = 96
    num_procs: int = 1

    @property
    def environ(self) -> dict[str, str]:
        """Return variables that shorten the recipe without a change of its commands."""
        return {
            "TRAINKIT_TRAIN__STEPS": str(self.steps),
            "TRAINKIT_TRAIN__EVAL_EVERY": str(self.steps // 4),
            "TRAINKIT_TRAIN__LOG_EVERY": "1",
            "TRAINKIT_CHECKPOINT__EVERY_STEPS": str(self.steps // 4),
            "TRAINKIT_RESOURCES__GPUS_PER_NODE": str(self.num_procs),
        }


RECIPES = [
    # gpt_3d trains the same kind of model, in a layout that needs four processes.
    Recipe("dual_gpu_gpt", 3.3, is_text=True, steps=24),
    # The learning rate of this recipe depends on the ranks.
    Recipe("temporal_encoder", 0.05, is_text=False, num_procs=2),
    Recipe("multimodal_qa", 0.5, is_text=False),
    Recipe("phase2_multimodal", 0.2, is_text=False, before="phase1_multimodal"),
]


RECOMPUTED = 3
"""The number of steps after the first checkpoint at which a recipe is killed.

These steps are computed twice.
"""
NAMES = ("loss", "grad_norm", "lr", "val_loss", "samples_seen")


def typed(command: str) -> None:
    """Type a command, which must succeed."""
    program, *words = shlex.split(command)
    assert program == "trainkit"
    assert main(words) == 0, command


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("transformers", "safetensors")
    monkeypatch.chdir(tmp_path)
    for name, value in recipe.environ.items():
        monkeypatch.setenv(name, value)
    documented = [line for line in commands(PAGE, "console recipe") if recipe.name in line]
    train = f"trainkit submit recipes/{recipe.name} --follow"
    assert train in documented
    assert f"trainkit ckpt export {recipe.name} --out {recipe.name}-model" in documented
    if recipe.before is not None:
        typed(f"trainkit submit recipes/{recipe.before} --follow")
    run = RunDir(tmp_path / "runs" / recipe.name)
    for command in documented:
        if command == train and recipe.before is not None:
            resumes_exactly(train, run)
        else:
            typed(command)
    values = [record["val_loss"] for record in read_metrics(run) if "val_loss" in record]
    assert values[-1] < recipe.val_loss, values
    assert values[-1] < values[0]
    check_export(tmp_path / f"{recipe.name}-model", recipe)


def resumes_exactly(train: str, run: RunDir) -> None:
    """Kill all processes of a recipe soon after its first checkpoint, and resume it."""
    typed(train.removesuffix(" --follow"))
    while not is_due(run):
        assert not run.attempt(1).end_file.exists()
        time.sleep(0.02)
    pids = RunProcesses.of(run).everything
    assert pids
    signal_all(pids, signal.SIGKILL)
    saved = published(run.checkpoints_dir)[-1].step
    first = {record["step"]: record for record in read_metrics(run) if record["step"] > saved}
    assert len(first) >= RECOMPUTED
    typed(f"trainkit resume {run.path.name} --follow")
    again = {record["step"]: record for record in read_metrics(run) if record["attempt"] == 2}
    assert min(again) == saved + 1
    for step, record in first.items():
        assert [json.dumps(again[step].get(name)) for name in NAMES] == [
            json.dumps(record.get(name)) for name in NAMES
        ]


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
