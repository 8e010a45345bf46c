"""Tests sgd, lion and the optimizer of the docs in training: kills, layouts, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.parity import Case, close, curve, make_trainer, run_cases, saved_tensors, worst_difference
from tests.support.runs import fork_workers, log_text, make_attempt, train, wait_for, wait_until
from tests.support.said import said
from trainkit.config import load_config
from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.run.files import write_json
from trainkit.run.manifest import published
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.task import ParameterOptions
from trainkit.trainer.file_optimizer import FileOptimizer, load_optimizer_class, refuse_optimizer
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.interface import groups_of
from trainkit.trainer.split_master import SplitMaster
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_code import TaskError

DOCS = Path(__file__).parents[2] / "docs" / "optimizers.md"


def write_signum(folder: Path) -> str:
    """Write the optimizer that the docs show, and return its name in a config."""
    section = DOCS.read_text().split("\n## Your own optimizer in 30 lines\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 30
    (folder / "signum.py").write_text(code)
    return f"{folder}/signum.py:Signum"


def options_of(name: str, folder: Path) -> list[str]:
    return {
        "sgd": ["optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.lr=0.1"],
        "lion": ["optimizer.name=lion", "optimizer.lr=3e-4"],
        "own": [
            f"optimizer.name={write_signum(folder)}",
            "optimizer.options={momentum: 0.8}",
            "optimizer.lr=3e-4",
        ],
    }[name]


def assert_same(one: Path, other: Path) -> None:
    first, second = saved_tensors(one), saved_tensors(other)
    assert curve(one) == curve(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "lion", "own"])
def test_killed_after_a_save(tmp_path, name):
    """The run gets SIGKILL right after a checkpoint was published by an asynchronous save."""
    common = [*options_of(name, tmp_path), "train.steps=8", "checkpoint.every_steps=1", "model.dropout=0.1"]
    num_procs = 1 if name == "own" else 2
    common += ["precision.dtype=bf16", f"parallel.dp_shard={num_procs}"]
    attempt = train(tmp_path / "whole", common, num_procs)
    assert ("signum.py:Signum needs float32 parameters" in log_text(attempt)) == (name == "own")
    run = RunDir(tmp_path / "killed")
    workers = fork_workers(make_attempt(run.path, common, num_procs), num_procs)
    wait_until(lambda: any(item.step >= 3 for item in published(run.checkpoints_dir)))
    for worker in workers:
        worker.kill()
    wait_for(workers)
    train(run.path, common, num_procs)
    assert_same(tmp_path / "whole", run.path)


def load_and_train(rank: int, attempt: AttemptDir) -> None:
    """Check that the loaded weights and optimizer state equal the newest checkpoint, then train."""
    saved = saved_tensors(attempt.run.path) if published(attempt.run.checkpoints_dir) else {}
    trainer = make_trainer(rank, attempt)
    tensors: dict[str, Any] = dict(trainer._whole_state)
    if trainer._own is not None:
        tensors |= {key: item for key, item in trainer._own.collect()[1].items() if "optimizer." in key}
    state = {key for key in tensors if key.endswith((".momentum_buffer", ".exp_avg", ".average"))}
    assert not saved or state
    for key, expected in saved.items():
        found = tensors[key]
        whole = found.join() if isinstance(found, SplitMaster) else found
        assert torch.equal(whole.full_tensor() if isinstance(whole, DTensor) else whole, expected), key
    trainer.train()
    close(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "lion", "own"])
def test_from_four_ranks_to_one_and_to_two(tmp_path, name):
    """Each layout loads every bit of the state, and trains as one process does, apart from rounding."""
    layouts = [(4, {"dp_shard": 2, "tp": 2}), (1, {}), (2, {"dp_shard": 2})]
    for index, (num_procs, parallel) in enumerate(layouts, 1):
        stop = () if index == len(layouts) else (f"train.stop_at_step={2 * index}",)
        case = Case("chain", num_procs, parallel, stop)
        folder = tmp_path / f"code-{index}"  # the file of an optimizer may move
        folder.mkdir()
        common = [*options_of(name, folder), "train.steps=6"]
        run_cases(tmp_path, [case], common, function=load_and_train)
    run_cases(tmp_path, [Case("alone", 1, {})], common)
    # The sign of an average near 0 depends on rounding.
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < (1e-5 if name == "sgd" else 1e-3)


def file_optimizer(folder: Path, **options: Any) -> tuple[FileOptimizer, nn.Module]:
    torch.manual_seed(0)
    config = load_config("quickstart", environ={}).config
    optimizer = OptimizerConfig(name=write_signum(folder), lr=0.5, weight_decay=0.1, options=options)
    config = config.model_copy(update={"optimizer": optimizer})
    model = nn.Linear(3, 2)
    weights = [Weight(*item) for item in model.named_parameters()]
    return FileOptimizer(config, load_optimizer_class(optimizer), weights, Layout()), model


def test_options_decay_schedule_and_skipped_steps(tmp_path):
    optimizer, model = file_optimizer(tmp_path, momentum=0.0)
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
    assert set(optimizer.collect_state()[1]) == {"optimizer.weight.average", "optimizer.bias.average"}


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
    write_signum(code)
    write_json(run.job_file, {"code": {"code": str(code), "workdir": str(code)}, "attempts": []})
    monkeypatch.chdir(tmp_path)
    shutil.copy(code / "signum.py", "signum.py")
    Path("signum.py").write_text("")  # the file was edited after the submission
    optimizer = OptimizerConfig(name="signum.py:Signum")
    assert load_optimizer_class(optimizer, run).__name__ == "Signum"
    with pytest.raises(TaskError, match="does not define Signum"):
        load_optimizer_class(optimizer)
