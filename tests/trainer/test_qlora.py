"""Tests `model.quantize`: adapters on frozen weights of 4 bits, on a CPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.hf_models import export_run, logits_of, need, save_model
from tests.support.parity import Case, close, curve, make_trainer, run_cases, saved_tensors, worst_difference
from trainkit.config import load_config
from trainkit.errors import TrainkitError
from trainkit.run.events import read_metrics
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.quantization import NF4Linear, quantize_linears, quantized_layers
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_task import UserTask

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]

LORA = "model.lora={r: 4, target_modules: [q_proj, v_proj]}"
NF4 = "model.quantize=nf4"
COMMON = ("train.steps=6", "train.eval_every=2", "optimizer.lr=0.003", "data.tokenizer=bytes")


@pytest.fixture(autouse=True)
def libraries() -> None:
    need("transformers", "peft", "bitsandbytes")


def of(folder: Path, *more: str) -> tuple[str, ...]:
    return (f"model.hf={folder}", "model.architecture=transformers", "model.preset=tiny", LORA, *more)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(RunDir(run))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_linear_with_the_rounded_weight(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(96, 40).requires_grad_(False)
    layer = NF4Linear(linear)
    layer.quantize(linear.weight)
    weight = layer.weight_in(dtype)
    assert weight.dtype == dtype
    # The most distant neighbours of 16 values between -1 and 1 differ by 0.3 of a block's largest value.
    error = (weight.float() - linear.weight).abs()
    assert 0 < error.max() < 0.2 * linear.weight.abs().max()
    x = torch.randn(3, 5, 96, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    gradient, x.grad = x.grad, None
    expected = nn.functional.linear(x, weight, linear.bias.to(dtype))
    assert torch.equal(layer(x), expected)
    expected.sum().backward()
    assert torch.allclose(gradient, x.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
    assert not list(layer.state_dict()) or list(layer.state_dict()) == ["bias"]


def test_tied_and_trained_layers_stay():
    model = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(4))).requires_grad_(False)
    model[1].weight = model[0].weight
    model[2].requires_grad_(True)
    assert quantize_linears(model, ()) == 1
    assert list(quantized_layers(model)) == ["3"]
    assert quantize_linears(model, (model[3],)) == 0


def sizes(rank: int, attempt: AttemptDir) -> None:
    """Train, and measure the memory of the weights at the end."""
    trainer = make_trainer(rank, attempt, keep_labels=True)
    [module] = trainer.built.model_parts
    layers = quantized_layers(module.model)
    assert len(layers) == 4 * 7
    before = {name: layer.packed.clone() for name, layer in layers.items()}
    trainer.train()
    assert all(torch.equal(layer.packed, before[name]) for name, layer in layers.items())
    num_weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    # A weight takes half a byte, with a one-byte scale per 64 weights and 1 KiB of codes per layer.
    tensors = [item for layer in layers.values() for item in layer.buffers()]
    num_bytes = sum(item.nbytes for item in tensors) - 1024 * len(layers)
    assert 0.5 < num_bytes / num_weights < 0.53
    linears = [item for item in module.model.modules() if type(item) is nn.Linear]
    assert {item.weight.requires_grad for item in linears} == {True, False}
    assert sum(not item.weight.requires_grad for item in linears) == 1, "the head alone has all its bits"
    close(trainer)


def test_training(tmp_path):
    folder = save_model(tmp_path / "model")
    own = of(folder, NF4)
    cases = [
        Case("one", 1, {}, own),
        Case("bf16", 1, {}, (*own, "precision.dtype=bf16")),
        Case("offload", 1, {"offload": True}, own),
        Case("recompute", 1, {"activation_checkpointing": "full"}, own),
        Case("pointwise", 1, {"activation_checkpointing": "pointwise"}, own),
        Case("ddp", 2, {"dp_replicate": 2}, own),
        Case("fsdp", 2, {"dp_shard": 2}, own),
        Case("cut", 2, {"dp_replicate": 2}, (*own, "train.stop_at_step=3")),
        Case("cut", 2, {"dp_replicate": 2}, own),
    ]
    run_cases(tmp_path, cases, COMMON, function=sizes)
    run_cases(tmp_path, [Case("lora", 1, {}, of(folder))], COMMON, keep_labels=True)

    one = tmp_path / "one"
    assert losses(one)[-1] < losses(one)[0]
    for name in ("offload", "recompute", "pointwise"):
        assert curve(tmp_path / name) == curve(one), name
    assert curve(tmp_path / "cut") == curve(tmp_path / "ddp")
    for name in ("ddp", "fsdp"):
        assert worst_difference(tmp_path / name, one) < 1e-5
    assert worst_difference(tmp_path / "bf16", one) < 0.1
    assert 0 < worst_difference(one, tmp_path / "lora") < 0.1

    saved = saved_tensors(one)
    assert saved
    assert all(".lora_" in name for name in saved)

    tokens = torch.arange(24).view(1, -1) * 7 % 257
    for name in ("adapters", "merged"):
        export_run(one, tmp_path / name, merge=name == "merged")
    config = load_config(
        None, overrides=[*own, "data.tokenizer=bytes", "data.seq_len=32"], layers=False
    ).config
    model = UserTask(config, None, opens_data=False).build_whole_model().eval()
    import peft

    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(tmp_path / "adapters"), device="cpu"))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    assert (logits_of(tmp_path / "merged", tokens) - expected).abs().max() < 1e-5
    assert (logits_of(folder, tokens) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    "lora", ["{r: 4, target_modules: [q_proj], use_dora: true}", "{r: 4, modules_to_save: [lm_head]}"]
)
def test_adapters_that_need_the_weights_are_refused(tmp_path, lora):
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    options = [*of(folder, NF4), f"model.lora={lora}", "data.tokenizer=bytes", "data.seq_len=32"]
    config = load_config(None, overrides=[item for item in options if item != LORA], layers=False).config
    with pytest.raises(TrainkitError, match=r"model\.quantize is nf4, which .* does not support: "):
        UserTask(config, None, opens_data=False).build_model()
    problem = definite_problem(config)
    assert problem.key == "model.quantize"
