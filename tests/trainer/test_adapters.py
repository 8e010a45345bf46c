"""Tests the adapters of `model.lora` in tasks: trained, saved, exported and refused weights."""

from pathlib import Path

import pytest
import torch

from tests.capabilities.multimodal.test_multimodal import ARGS, config_of, options
from tests.support.hf_models import export_run, need, save_model
from tests.support.parity import Case, assert_same_curves, run_cases, saved_tensors
from trainkit.capabilities.task_check.worker import Smoke
from trainkit.errors import TrainkitError
from trainkit.safetensors import StoredWeights
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_code import TaskError
from trainkit.trainer.user_task import UserTask, load_task

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
TARGETS = "target_modules: [q_proj, v_proj]"
TASK = """
import torch
from torch import nn
from trainkit.task import Loss, Task, add_adapters

class Mine(Task):
    def build_model(self):
        model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))})
        model["head"] = nn.Linear(8, 1)
        %s
        return model

    def train_dataset(self):
        values = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return [(x, x.sum().view(1)) for x in values]

    def loss(self, model, batch):
        x, y = batch
        return Loss((model["head"](model["body"](x)) - y).square().sum(), len(x))
"""


@pytest.fixture(autouse=True)
def _peft() -> None:
    need("transformers", "peft")


def questions(tmp_path: Path, lora: str = TARGETS, *, args: str = ARGS) -> tuple[str, ...]:
    """Return options for questions about curves, with a model of transformers."""
    folder = tmp_path / "model"
    if not folder.exists():
        save_model(folder)
    common = (item for item in options(tmp_path, args=args) if "num_layers" not in item)
    adapters = (f"model.lora={{r: 4, {lora}}}",) if lora else ()
    return (*common, f"model.hf={folder}", "data.tokenizer=bytes", *adapters)


def saved_names(run: Path) -> set[str]:
    return {name.removeprefix("model.") for name in saved_tensors(run) if name.startswith("model.")}


def export(run: Path, out: Path, merge: bool = False) -> dict[str, torch.Tensor]:
    export_run(run, out, merge)
    found = StoredWeights(out)
    return {name: found.read(name) for name in found._tensors}


def test_a_language_model_in_a_task(tmp_path):
    common = questions(tmp_path)
    cases = [
        Case("alone", 1, {}),
        Case("ddp", 2, {"dp_replicate": 2}),
        Case("fsdp", 2, {"dp_shard": 2}),
        Case("parts", 2, {"dp_shard": 2}, ("train.stop_at_step=2",)),
    ]
    run_cases(tmp_path, cases, common)
    run_cases(tmp_path, [Case("parts", 1, {})], common)
    assert_same_curves(tmp_path, cases[1:])
    names = saved_names(tmp_path / "fsdp")
    assert all(".lora_" in name for name in names if name.startswith("lm."))
    assert len([name for name in names if ".lora_" in name]) == 4 * 2 * 2
    assert any(name.startswith("encoder.") for name in names)
    assert any(name.startswith("aligner.") for name in names)

    adapted, merged = (
        export(tmp_path / "fsdp", tmp_path / "a"),
        export(tmp_path / "fsdp", tmp_path / "b", merge=True),
    )
    prefix = "lm.model.model.layers.3.self_attn.q_proj"
    base = StoredWeights(tmp_path / "model").read("model.layers.3.self_attn.q_proj.weight")
    assert torch.equal(adapted[f"{prefix}.base_layer.weight"], base)
    low, high = (adapted[f"{prefix}.lora_{part}.default.weight"] for part in "AB")
    assert high.abs().max() > 0
    # peft's default of lora_alpha is 8, for an r of 4
    torch.testing.assert_close(merged[f"{prefix}.weight"], base + 2 * high @ low, rtol=0, atol=1e-6)
    assert not [name for name in merged if "lora_" in name or "base_layer" in name]


def test_the_second_phase_adds_adapters_to_a_model_that_was_frozen(tmp_path):
    run_cases(tmp_path, [Case("first", 1, {})], questions(tmp_path, "", args=f"{ARGS}, frozen: ['lm.*']"))
    assert not [name for name in saved_names(tmp_path / "first") if name.startswith("lm.")]
    start = f"model.init_from={tmp_path / 'first'}"
    parts = "model.init_include=[encoder.*, aligner.*]"
    cases = [Case("whole", 1, {}, (start,)), Case("parts", 1, {}, (start, parts))]
    run_cases(tmp_path, cases, questions(tmp_path))
    assert all(".lora_" in name for name in saved_names(tmp_path / "parts") if name.startswith("lm."))
    # Frozen weights may come from another run, so they are saved in this case.
    embedding = "lm.model.model.embed_tokens.weight"
    assert embedding in saved_names(tmp_path / "whole")
    base = StoredWeights(tmp_path / "model").read("model.embed_tokens.weight")
    for name in ("whole", "parts"):
        found = export(tmp_path / name, tmp_path / f"{name}-out", merge=True)
        assert torch.equal(found[embedding], base)


def mine(tmp_path: Path, code: str) -> tuple[str, ...]:
    file = tmp_path / "mine.py"
    file.write_text(TASK % code)
    return (f"task={file}:Mine", "train.steps=4", "model.lora={r: 2, target_modules: ['0', '2']}")


def test_a_module_of_ones_own(tmp_path):
    chosen = mine(tmp_path, "add_adapters(model['body'], self.config)")
    assert list(Smoke(config_of(*chosen)).problems()) == []
    cases = [Case("alone", 1, {}), Case("fsdp", 2, {"dp_shard": 2})]
    run_cases(tmp_path, cases, chosen)
    assert_same_curves(tmp_path, cases[1:])
    merged = export(tmp_path / "fsdp", tmp_path / "out", merge=True)
    assert {name: tuple(value.shape) for name, value in merged.items()} == {
        "body.0.weight": (8, 4),
        "body.0.bias": (8,),
        "body.2.weight": (8, 8),
        "body.2.bias": (8,),
        "head.weight": (1, 8),
        "head.bias": (1,),
    }


def test_a_task_that_adds_none_is_refused(tmp_path):
    task = UserTask(config_of(*mine(tmp_path, "pass")), None)
    with pytest.raises(TaskError, match=r"build_model\(\) added no adapters for model.lora") as error:
        task.build_model()
    assert "trainkit.task.add_adapters" in error.value.hint


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rr: 4}", "model.lora is {'rr': 4}: "),
        ("{r: 4, target_modules: ['0'], modules_to_save: ['2']}", "model.lora.modules_to_save is ['2'], but"),
        ("{r: 4, target_modules: [q_proj]}", "model.lora.target_modules has q_proj, which matches no module"),
        ("{r: 4}", "model.lora does not fit Sequential"),
    ],
)
def test_adapters_that_do_not_fit(tmp_path, lora, message):
    chosen = mine(tmp_path, "add_adapters(model['body'], self.config)")
    config = config_of(*chosen[:-1], f"model.lora={lora}")
    with pytest.raises(TrainkitError) as error:
        load_task(config).build_model()
    assert error.value.message.startswith(message)
    found = definite_problem(config)
    assert (found is None) == ("rr" not in lora)
