"""Tests the optimizer of the docs, groups of parameters, and optimizers that are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import ALONE
from tests.support.own_code import write_lion
from tests.support.parity import Case, run_cases, saved_tensors, worst_difference
from tests.support.runs import log_text, train
from tests.support.said import said
from trainkit.config import load_config
from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir
from trainkit.task import ParameterOptions
from trainkit.trainer.file_optimizer import FileOptimizer, load_optimizer_class, refuse_optimizer
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers import make_optimizer
from trainkit.trainer.optimizers.interface import groups_of
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_code import TaskError


@pytest.mark.slow
def test_one_process_keeps_weights_in_float32(tmp_path):
    """With an optimizer of trainkit, the weights of one process in bf16 would be split in two halves."""
    options = [f"optimizer.name={write_lion(tmp_path)}", "precision.dtype=bf16", "train.steps=2"]
    assert "my_lion.py:Lion needs float32 parameters" in log_text(train(tmp_path / "run", options, 1))


def test_the_example_of_the_docs_is_lion(tmp_path):
    """The example computes the update of trainkit's own Lion."""
    config = OptimizerConfig(name="lion", lr=0.01, betas=(0.8, 0.98), weight_decay=0.1)
    torch.manual_seed(0)
    model, other = nn.Linear(64, 32), nn.Linear(64, 32)
    other.load_state_dict(model.state_dict())
    theirs = make_optimizer([Weight(*item) for item in model.named_parameters()], config, ALONE)
    kind = load_optimizer_class(OptimizerConfig(name=write_lion(tmp_path)))
    make: Any = kind
    groups = [{"params": [other.weight]}, {"params": [other.bias], "weight_decay": 0.0}]
    own = make(groups, lr=0.01, weight_decay=0.1, betas=(0.8, 0.98))
    for _ in range(5):
        for param, twin in zip(model.parameters(), other.parameters(), strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        theirs.collect_gradients()
        theirs.step(0.01, torch.ones(()), torch.zeros(()))
        own.step()
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=1e-6)


def file_optimizer(folder: Path, **options: Any) -> tuple[FileOptimizer, nn.Module]:
    torch.manual_seed(0)
    config = load_config("quickstart", environ={}).config
    optimizer = OptimizerConfig(name=write_lion(folder), lr=0.5, weight_decay=0.1, options=options)
    config = config.model_copy(update={"optimizer": optimizer})
    model = nn.Linear(3, 2)
    weights = [Weight(*item) for item in model.named_parameters()]
    return FileOptimizer(config, load_optimizer_class(optimizer), weights, Layout()), model


def test_options_decay_schedule_and_skipped_steps(tmp_path):
    optimizer, model = file_optimizer(tmp_path, betas=[0.0, 0.0])
    before = model.weight.detach().clone(), model.bias.detach().clone()
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    optimizer.collect_gradients()
    optimizer.step(0.0, torch.ones(()), torch.ones(()))
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.collect_state()[1] == {}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert optimizer.begin_step(0.25) == 0.25  # half of optimizer.lr
    optimizer.collect_gradients()
    optimizer.step(0.25, torch.ones(()), torch.zeros(()))
    torch.testing.assert_close(model.weight.detach(), before[0] * (1 - 0.25 * 0.1) - 0.25)
    torch.testing.assert_close(model.bias.detach(), before[1] - 0.25)
    assert set(optimizer.collect_state()[1]) == {"optimizer.weight.exp_avg", "optimizer.bias.exp_avg"}


GROUPS = [
    {"match": "blocks.1.*norm*", "lr_scale": 0.5, "weight_decay": 0.3},
    {"match": "*norm*", "lr_scale": 0.0},
    {"match": "head.*", "weight_decay": 0.0},
]


def test_the_first_matching_group_applies():
    names = ["head.weight", "blocks.0.norm.weight", "blocks.1.norm.weight", "rest", "vector"]
    weights = [Weight(name, nn.Parameter(torch.ones(2, 2))) for name in names[:-1]]
    options = ParameterOptions(lr_scale=7.0, weight_decay=0.7)
    weights[0] = replace(weights[0], options=options)
    weights.append(Weight("vector", nn.Parameter(torch.ones(2)), options=replace(options, weight_decay=None)))
    found = groups_of(weights, names, OptimizerConfig(weight_decay=0.1, groups=GROUPS))  # type: ignore[arg-type]
    assert {(*group.shards, group.lr_scale, group.weight_decay) for group in found} == {
        ("head.weight", 1.0, 0.0),
        ("blocks.0.norm.weight", 0.0, 0.1),
        ("blocks.1.norm.weight", 0.5, 0.3),
        ("rest", 1.0, 0.1),
        ("vector", 7.0, 0.0),
    }


def test_a_pattern_without_a_parameter_is_refused_before_anything_starts():
    override = "optimizer.groups=[{match: '*norm*'}, {match: 'blocks.7.*'}]"
    problem = definite_problem(load_config("quickstart", overrides=[override], environ={}).config)
    assert problem is not None
    said(f"{problem.key}: {problem.message}\n  hint: {problem.hint}")


@pytest.mark.slow
def test_groups_on_the_stages_of_a_pipeline(tmp_path):
    """Each rank has only some of the parameters that the patterns match."""
    groups = "[{match: 'blocks.0.*', lr_scale: 0.0}, {match: 'head.*', lr_scale: 0.25}]"
    common = ["train.steps=3", f"optimizer.groups={groups}"]
    cases = [Case("pp", 2, {"pp": 2}), Case("alone", 1, {})]
    run_cases(tmp_path, cases, common)
    assert worst_difference(tmp_path / "pp", tmp_path / "alone") < 1e-5
    run_cases(tmp_path, [Case("start", 1, {}, ("train.stop_at_step=1",))], common)
    first, last = saved_tensors(tmp_path / "start"), saved_tensors(tmp_path / "pp")
    changed = {
        name for name in first if name.startswith("model.") and not torch.equal(first[name], last[name])
    }
    assert changed
    assert {name for name in changed if name.startswith("model.blocks.0.")} == set()


CODE = """\
from torch.optim import SGD, Optimizer
class Plain(SGD): ...
class NoDecay(SGD):
    def __init__(self, params, lr): super().__init__(params, lr)
class Wrong(SGD):
    def __init__(self, params, lr, weight_decay, *, alpha=1.0): raise ValueError("alpha is too large")
class NoOptimizer: ...
class Closure(SGD):
    def step(self, closure): ...
class ByElement(Closure):
    by_element = True
"""
REFUSED = {
    "class": ["optimizer.name=mine.py:Nothing"],
    "kind": ["optimizer.name=mine.py:NoOptimizer"],
    "keyword": ["optimizer.name=mine.py:Wrong", "optimizer.options={beta: 1}"],
    "rate": ["optimizer.name=mine.py:Plain", "optimizer.options={lr: 1}"],
    "decay": ["optimizer.name=mine.py:NoDecay"],
    "constructor": ["optimizer.name=mine.py:Wrong", "optimizer.options={alpha: 2}"],
    "shards": ["optimizer.name=mine.py:Plain", "parallel.dp_shard=2"],
    "file": ["optimizer.name=nowhere.py:Plain"],
    "syntax": ["optimizer.name=broken.py:Plain"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_starts(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    Path("broken.py").write_text("class Plain(\n")
    config = load_config("quickstart", overrides=REFUSED[case], environ={}).config
    with pytest.raises(TaskError) as caught:
        refuse_optimizer(config)
    problem = caught.value.problem
    said(f"{problem.key}: {problem.message}\n  hint: {problem.hint}")


def test_an_optimizer_by_element_may_be_sharded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    overrides = ["optimizer.name=mine.py:ByElement", "parallel.dp_shard=2"]
    refuse_optimizer(load_config("quickstart", overrides=overrides, environ={}).config)


def test_a_step_that_takes_arguments_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    config = load_config("quickstart", overrides=["optimizer.name=mine.py:Closure"], environ={}).config
    kind, weights = load_optimizer_class(config.optimizer), [Weight("w", nn.Parameter(torch.zeros(2)))]
    with pytest.raises(TaskError) as caught:
        FileOptimizer(config, kind, weights, Layout())
    said(f"{caught.value.message}\n  hint: {caught.value.hint}")


def test_a_run_has_the_code_that_it_was_submitted_with(tmp_path, monkeypatch):
    run, code = RunDir(tmp_path / "run"), tmp_path / "run" / "code"
    code.mkdir(parents=True)
    write_lion(code)
    write_json(run.job_file, {"code": {"code": str(code), "workdir": str(code)}, "attempts": []})
    monkeypatch.chdir(tmp_path)
    shutil.copy(code / "my_lion.py", "my_lion.py")
    Path("my_lion.py").write_text("")  # the file was edited after the submission
    optimizer = OptimizerConfig(name="my_lion.py:Lion")
    assert load_optimizer_class(optimizer, run).__name__ == "Lion"
    with pytest.raises(TaskError, match="does not define Lion"):
        load_optimizer_class(optimizer)
