"""Tests a task's optimizers, turns, EMA and state on every layout, bit for bit after any end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tests.support import own_steps
from tests.support.parity import Case, curve, run_cases, run_chain, saved_tensors, worst_difference
from tests.support.runs import fork_workers, log_text, make_attempt, run_ranks, train, wait_for, wait_until
from tests.support.said import said
from tests.support.tasks import write_tutorial
from trainkit.errors import FatalError
from trainkit.plan.launch import Layout
from trainkit.run.events import read_metrics
from trainkit.run.files import read_jsonl, read_record
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.state import encode
from trainkit.trainer.distributed import ONE_PROCESS, World
from trainkit.trainer.models.model import Weight
from trainkit.trainer.own_optimizers import OwnOptimizers, SavedOptimizer
from trainkit.trainer.user_code import TaskError

TASK = f"task={Path(own_steps.__file__)}:Adversaries"
COMMON = (TASK, "train.steps=6", "train.eval_every=3", "checkpoint.every_steps=2", "train.grad_clip=0.5")
LAYOUTS = [Case("alone", 1, {}), Case("ddp", 2, {"dp_replicate": 2}), Case("fsdp", 2, {"dp_shard": 2})]
Parameters = Mapping[str, nn.Parameter]
Made = Optimizer | LRScheduler | Mapping[str, Optimizer | LRScheduler]


def logged(run: Path) -> list[dict[str, Any]]:
    names = {"d_loss", "g_loss", "real", "spread"}
    return [{name: record[name] for name in names & record.keys()} for record in read_metrics(RunDir(run))]


def same_everywhere(one: Path, other: Path) -> None:
    """Check that the curves, metrics and all tensors of the last checkpoint are equal to the last bit."""
    assert curve(one) == curve(other)
    assert logged(one) == logged(other)
    first, second = saved_tensors(one), saved_tensors(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    states = [published(RunDir(run).checkpoints_dir)[-1].manifest().state for run in (one, other)]
    assert states[0] == states[1]


def whole_and_cut(case: Case, step: int) -> list[Case]:
    """Return a case, and the same case with the name ``cut-NAME`` in two attempts."""
    again = replace(case, name=f"cut-{case.name}")
    return [case, replace(again, overrides=(*case.overrides, f"train.stop_at_step={step}")), again]


@pytest.mark.slow
def test_turns_on_every_layout_and_after_every_stop(tmp_path):
    run_cases(tmp_path, [run for case in LAYOUTS for run in whole_and_cut(case, 4)], COMMON)
    for case in LAYOUTS:
        same_everywhere(tmp_path / case.name, tmp_path / f"cut-{case.name}")
    found = logged(tmp_path / "alone")
    assert all(item.keys() == {"d_loss", "g_loss", "real", "spread"} for item in found)
    losses = [loss for _, loss, *_ in curve(tmp_path / "alone")]
    assert losses == pytest.approx([item["d_loss"] + item["g_loss"] for item in found])
    assert len({*losses}) == 6
    saved = saved_tensors(tmp_path / "fsdp")
    assert {"optimizer.d.0.weight.exp_avg", "optimizer.g.0.weight.momentum_buffer", "task.history"} <= {
        *saved
    }
    assert not torch.equal(saved["model.average.0.weight"], saved["model.g.0.weight"])
    assert saved["model.d.0.weight"].abs().max() <= 0.3


@pytest.mark.slow
def test_a_chain_of_layouts_and_a_step_without_all_turns(tmp_path):
    common = (*COMMON, "task_args.every=2", "precision.dtype=bf16", "checkpoint.best_metric=g_loss")
    run_chain(tmp_path, [(2, {"dp_shard": 2}), (1, {}), (2, {"dp_replicate": 2})], common)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 2e-2
    records = read_jsonl(RunDir(tmp_path / "alone").attempt(1).rank_record(0))
    turns = [(record["step"], record["turn"], record["optimizer"]) for record in records]
    assert turns == [*dict.fromkeys(turns)]
    assert turns[:4] == [(1, 1, "d"), (2, 1, "d"), (2, 2, "d"), (2, 3, "g")]
    assert "peak lr" not in log_text(RunDir(tmp_path / "alone").attempt(1))
    assert [("g_loss" in item) for item in logged(tmp_path / "chain")] == [False, True] * 3


@pytest.mark.slow
def test_killed_after_a_save(tmp_path):
    """The run gets SIGKILL right after a checkpoint was published by an asynchronous save."""
    options = [TASK, "train.steps=7", "checkpoint.every_steps=1", "data.num_workers=0", "parallel.dp_shard=2"]
    train(tmp_path / "whole", options, 2)
    run = RunDir(tmp_path / "killed")
    workers = fork_workers(make_attempt(run.path, options, 2), 2)
    wait_until(lambda: any(item.step >= 3 for item in published(run.checkpoints_dir)))
    for worker in workers:
        worker.kill()
    wait_for(workers)
    train(run.path, options, 2)
    same_everywhere(tmp_path / "whole", run.path)


DOCS = Path(__file__).parents[2] / "docs"
METHODS = """
import copy, math
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from curves import Frequency

class Own(Frequency):
"""
EXAMPLES = {
    "The optimizer of a task": "cosine.py:Own",
    "Which optimizers work": "muon.py:Own",
    "Losses by turns: a GAN": "gan.py:GAN",
    "A moving average of the weights": "average.py:Own",
    "An image each hundred steps": "image.py:Own",
}


@pytest.mark.slow
def test_the_examples_of_the_docs_are_resumed_to_the_last_bit(tmp_path):
    write_tutorial(tmp_path)
    cases = []
    for section in (DOCS / "optimizers.md").read_text().split("\n## ")[1:]:
        task = EXAMPLES.get(section.partition("\n")[0])
        if task is None:
            continue
        code = section.partition("```python\n")[2].partition("```")[0].replace("100", "2")
        file, _, name = task.partition(":")
        (tmp_path / file).write_text(code if name == "GAN" else METHODS + indent(code, "    "))
        cases.append(Case(Path(file).stem, 1, {}, (f"task={tmp_path / task}",)))
    assert len(cases) == len(EXAMPLES)
    common = ("train.steps=4", "train.eval_every=2", "optimizer.lr=1e-3")
    run_cases(tmp_path, [run for case in cases for run in whole_and_cut(case, 2)], common)
    for case in cases:
        same_everywhere(tmp_path / case.name, tmp_path / f"cut-{case.name}")
        assert len({loss for _, loss, *_ in curve(tmp_path / case.name)}) == 4
    images = read_jsonl(tmp_path / "image" / "media.jsonl")
    assert {(item["name"], item["step"]) for item in images} >= {("curve", 2), ("curve", 4), ("val_curve", 4)}


def refuse_shards(world: World) -> None:
    whole = torch.arange(8.0).view(4, 2)
    matrix = nn.Parameter(distribute_tensor(whole, world.mesh["dp_shard"], [Shard(0)]))
    layout = Layout(dp_shard=2)

    def made(make: Callable[[Parameters], Any]) -> OwnOptimizers:
        task: Any = SimpleNamespace(task=SimpleNamespace(optimizers=make), config=CONFIG)
        return OwnOptimizers(task, [Weight("w", matrix)], layout)

    with pytest.raises(TaskError) as raised:
        made(one(optim.Muon, lr=0.1))
    assert "Muon" in raised.value.message
    assert "dp_replicate" in raised.value.hint
    with pytest.raises(TaskError, match="Counted"):
        made(one(Counted, lr=0.1))
    optimizers = made(one(ByElement, lr=0.1))
    matrix.grad = distribute_tensor(torch.ones(4, 2), world.mesh["dp_shard"], [Shard(0)])
    optimizers.collect_gradients()
    optimizers.step(0.1, torch.ones(()), torch.zeros(()))
    assert torch.equal(matrix.to_local(), whole.chunk(2)[world.rank] - 0.1)
    with pytest.raises(TaskError, match=r"optimizer\.w\.rows has shape \[7\]"):
        optimizers.collect_state()


@pytest.mark.slow(seconds=4)
def test_what_cannot_be_sharded_is_refused():
    run_ranks(refuse_shards, 2)


CONFIG = SimpleNamespace(
    task="mine.py:Mine",
    uses_transformers=False,
    model=SimpleNamespace(hf=None),
    optimizer=SimpleNamespace(lr=0.01),
)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x).relu())
        return found


def tiny() -> Tiny:
    torch.manual_seed(3)
    return Tiny()


def own(model: nn.Module, make: Callable[[Parameters], Any], turns: tuple[str, ...] = ()) -> OwnOptimizers:
    task: Any = SimpleNamespace(task=SimpleNamespace(optimizers=make, turns=lambda: turns), config=CONFIG)
    return OwnOptimizers(task, [Weight(*item) for item in model.named_parameters()], ONE_PROCESS)


def step_of(
    optimizers: OwnOptimizers, model: nn.Module, step: int, lr: float = 0.01, skip: float = 0.0
) -> float:
    shown = optimizers.begin_step(lr)
    torch.manual_seed(step)
    model(torch.randn(5, 3)).square().mean().backward()
    optimizers.collect_gradients()
    optimizers.step(lr, torch.tensor(2.0), torch.tensor(skip))
    optimizers.zero_grad()
    optimizers.end_step()
    return shown


def through_a_checkpoint(optimizers: OwnOptimizers, other: OwnOptimizers) -> None:
    """Load the state into another object, as JSON and copied tensors."""
    saved, tensors = optimizers.collect_state()
    text = json.dumps({name: vars(item) for name, item in saved.items()})
    values = {name: read_record(SavedOptimizer, item) for name, item in json.loads(text).items()}
    other.load(values, {name: tensor.clone() for name, tensor in tensors.items()})


class Counted(optim.SGD):
    """Keeps numbers in a group and in a state without a parameter, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        self.state["all"] = {"sum": self.state.get("all", {"sum": 0.0})["sum"] + group["k"] / 3}
        group["lr"] /= 1.0 + self.state["all"]["sum"]
        super().step()


def one(kind: Callable[..., Optimizer], **options: Any) -> Callable[[Parameters], Optimizer]:
    return lambda parameters: kind(parameters.values(), **options)


def scheduled(kind: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Parameters], LRScheduler]:
    return lambda parameters: kind(optim.SGD(parameters.values(), lr=0.1, momentum=0.9), *args, **options)


def in_sequence(parameters: Parameters) -> LRScheduler:
    adam = optim.Adam(parameters.values(), lr=0.02)
    parts = [lr_scheduler.LinearLR(adam, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(adam, 9)]
    return lr_scheduler.SequentialLR(adam, parts, milestones=[3])


def milestones_in_sequence(parameters: Parameters) -> LRScheduler:
    """SequentialLR asks MultiStepLR for its milestones when it begins, which may be after a resume."""
    sgd = optim.SGD(parameters.values(), lr=0.1)
    parts = [lr_scheduler.LinearLR(sgd, 0.1, total_iters=3), lr_scheduler.MultiStepLR(sgd, [1, 2])]
    return lr_scheduler.SequentialLR(sgd, parts, milestones=[3])


KINDS: dict[str, Callable[[Parameters], Any]] = {
    "sgd": one(optim.SGD, lr=0.1),
    "nesterov": one(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": one(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": one(optim.Adam, lr=0.01, amsgrad=True),
    "fused": one(optim.AdamW, lr=0.01, fused=True),
    "tensor lr": lambda parameters: optim.AdamW(parameters.values(), lr=torch.tensor(0.01)),
    "nadam": one(optim.NAdam, lr=0.01),
    "radam": one(optim.RAdam, lr=0.01),
    "rprop": one(optim.Rprop, lr=0.01),
    "asgd": one(optim.ASGD, lr=0.01),
    "adagrad": one(optim.Adagrad, lr=0.01),
    "rmsprop": one(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "muon": lambda parameters: {
        "matrices": optim.Muon([p for p in parameters.values() if p.ndim == 2], lr=0.01),
        "rest": optim.AdamW([p for p in parameters.values() if p.ndim != 2], lr=0.01),
    },
    "counted": one(Counted, lr=0.1),
    "lambda": scheduled(lr_scheduler.LambdaLR, lambda step: 1 / (step + 1)),
    "one cycle": scheduled(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20),
    "cosine": scheduled(lr_scheduler.CosineAnnealingLR, 7),
    "restarts": scheduled(lr_scheduler.CosineAnnealingWarmRestarts, 2),
    "multi": scheduled(lr_scheduler.MultiStepLR, [2, 4, 4]),
    "cyclic": scheduled(lr_scheduler.CyclicLR, 0.01, 0.1, step_size_up=2),
    "sequence": in_sequence,
    "multi in sequence": milestones_in_sequence,
}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_after_any_step(kind):
    whole = tiny()
    optimizers = own(whole, KINDS[kind])
    shown = []
    for step in range(1, 7):
        shown.append(step_of(optimizers, whole, step, lr=0.01 / step, skip=float(step == 3)))
        again = tiny()
        resumed = own(again, KINDS[kind])
        again.load_state_dict(whole.state_dict())
        through_a_checkpoint(optimizers, resumed)
        # Each step is then the first one after a resume.
        whole, optimizers = again, resumed
    expected = tiny()
    plain = own(expected, KINDS[kind])
    lrs = [step_of(plain, expected, n, lr=0.01 / n, skip=float(n == 3)) for n in range(1, 7)]
    assert shown == lrs
    assert [*map(torch.equal, whole.parameters(), expected.parameters())] == [True] * 4
    assert not torch.equal(tiny().a.weight, whole.a.weight)


def test_as_torch_does_it_and_with_the_schedule_of_the_config():
    mine, theirs = tiny(), tiny()
    optimizers = own(mine, one(optim.SGD, lr=0.3, momentum=0.9))
    expected = optim.SGD(theirs.parameters(), lr=0.3, momentum=0.9)
    for step, factor in enumerate((0.5, 1.0, 0.25), 1):
        assert step_of(optimizers, mine, step, lr=0.01 * factor) == pytest.approx(0.3 * factor)
        torch.manual_seed(step)
        theirs(torch.randn(5, 3)).square().mean().backward()
        expected.param_groups[0]["lr"] = 0.3 * factor
        for param in theirs.parameters():
            param.grad /= 2
        expected.step()
        expected.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_turn_updates_its_own_parameters_alone():
    def make(parameters: Parameters) -> Made:
        return {name: optim.SGD([parameters[f"{name}.weight"], parameters[f"{name}.bias"]]) for name in "ab"}

    model = tiny()
    optimizers = own(model, make, turns=("b", "a"))
    assert optimizers.turns() == ("b", "a")
    before = {name: param.clone() for name, param in model.named_parameters()}
    optimizers.begin_step(0.01)
    model(torch.ones(1, 3)).sum().backward()
    optimizers.collect_gradients("b")
    norm = torch.cat([p.grad.flatten() for p in model.b.parameters()]).norm()
    assert optimizers.square_sum().sqrt().item() == pytest.approx(norm.item())
    optimizers.step(0.01, torch.ones(()), torch.zeros(()))
    optimizers.zero_grad()
    changed = [name for name, param in model.named_parameters() if not torch.equal(param, before[name])]
    assert changed == ["b.weight", "b.bias"]
    assert all(param.grad is None for param in model.parameters())


def test_what_the_task_changes_between_attempts_counts():
    def make(lr: float, period: int, momentum: float) -> Callable[[Parameters], LRScheduler]:
        sgd = one(optim.SGD, lr=lr, momentum=momentum)
        return lambda parameters: lr_scheduler.CosineAnnealingLR(sgd(parameters), period)

    model = tiny()
    optimizers = own(model, make(0.1, 10, 0.9))
    for step in range(1, 6):
        step_of(optimizers, model, step)
    halved = own(tiny(), make(0.05, 10, 0.8))
    through_a_checkpoint(optimizers, halved)
    [values] = [item.values for item in halved.collect_state()[0].values()]
    text = json.dumps(values)
    assert '["momentum", 0.8]' in text
    assert halved.begin_step(0.01) == pytest.approx(0.5 * optimizers.begin_step(0.01))
    longer = own(tiny(), make(0.1, 100, 0.9))
    through_a_checkpoint(optimizers, longer)
    assert '["T_max", 100]' in json.dumps(longer.collect_state()[0][""].values)
    assert longer.begin_step(0.01) == optimizers.begin_step(0.01)


class ByElement(optim.SGD):
    """Declares `by_element`, but keeps a state of another shape."""

    by_element = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["rows"] = torch.zeros(7)


class Wanting(optim.SGD):
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        pass


REFUSED: dict[str, Callable[[Parameters], Any]] = {
    "nothing": lambda p: None,
    "empty": lambda p: {},
    "as lightning": lambda p: ([optim.SGD(p.values())], []),
    "class": lambda p: {"d": optim.SGD},
    "number": lambda p: {1: optim.SGD(p.values())},
    "space": lambda p: {"the d": optim.SGD(p.values())},
    "unicode dot": lambda p: {"d.é": optim.SGD(p.values())},
    "val": lambda p: {"val": optim.SGD(p.values())},
    "no name": lambda p: {"": optim.SGD([p["a.weight"]]), "b": optim.SGD([p["b.weight"]])},
    "forgotten": lambda p: optim.SGD([p["a.weight"], p["a.bias"]]),
    "twice": lambda p: {"a": optim.SGD(p.values()), "b": optim.SGD([p["b.bias"]])},
    "foreign": lambda p: optim.SGD([*p.values(), nn.Parameter(torch.ones(1))]),
    "lbfgs": lambda p: optim.LBFGS(p.values()),
    "step": lambda p: Wanting(p.values()),
    "sparse": lambda p: optim.SparseAdam(p.values()),
    "plateau": lambda p: lr_scheduler.ReduceLROnPlateau(optim.SGD(p.values())),
    "raises": lambda p: optim.SGD(p["c.weight"]),
    "negative": lambda p: optim.SGD(p.values(), lr=-1.0),
    "callable": lambda p: optim.SGD([{"params": [*p.values()], "wrap": print}]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_step(case):
    with pytest.raises(FatalError) as raised:
        own(tiny(), REFUSED[case])
    said(without_lines(f"{raised.value.message}\n{raised.value.hint}"))


def without_lines(text: str) -> str:
    return re.sub(r"(\.py:)\d+", r"\1N", text)


@pytest.mark.parametrize(
    "state", [{"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, {0: torch.zeros(1), "0": torch.ones(1)}]
)
def test_two_tensors_of_one_name_are_not_saved(state):
    with pytest.raises(FatalError) as raised:
        encode("task", state, {})
    said(str(raised.value))


def test_a_scheduler_with_a_start_factor_keeps_the_factor_that_it_has_reached(caplog):
    def make(lr: float, start: float) -> Callable[[Parameters], LRScheduler]:
        return lambda parameters: lr_scheduler.LinearLR(
            optim.SGD(parameters.values(), lr=lr), start, total_iters=10
        )

    model = tiny()
    optimizers = own(model, make(0.1, 0.1))
    for step in range(1, 11):
        step_of(optimizers, model, step)
    for lr, start, key in ((0.1, 0.5, "start_factor"), (0.2, 0.1, "initial_lr"), (0.2, 0.5, "initial_lr")):
        caplog.clear()
        resumed = own(tiny(), make(lr, start))
        through_a_checkpoint(optimizers, resumed)
        assert resumed.begin_step(0.01) == pytest.approx(lr)
        assert key in caplog.text
        assert "_last_lr" not in caplog.text


def steps_in_sequence(milestones: list[int]) -> Callable[[Parameters], LRScheduler]:
    def make(parameters: Parameters) -> LRScheduler:
        sgd = optim.SGD(parameters.values(), lr=0.1)
        parts = [lr_scheduler.ConstantLR(sgd, factor, 100) for factor in (1.0, 0.5, 0.1)]
        return lr_scheduler.SequentialLR(sgd, parts, milestones)

    return make


@pytest.mark.parametrize(
    "make", [partial(scheduled, lr_scheduler.MultiStepLR), steps_in_sequence], ids=["multi", "sequence"]
)
def test_milestones_that_the_task_changes_count_and_are_logged(make, caplog):
    model = tiny()
    optimizers = own(model, make([3, 6]))
    for step in range(1, 5):
        step_of(optimizers, model, step)
    same, changed, expected = (own(tiny(), make(milestones)) for milestones in ([3, 6], [3, 7], [3, 7]))
    through_a_checkpoint(optimizers, same)
    assert "milestones" not in caplog.text
    through_a_checkpoint(optimizers, changed)
    said("\n".join(message for message in caplog.messages if "milestones" in message))
    for step in range(1, 5):
        step_of(expected, model, step)
    lrs = [[step_of(one, model, step) for step in range(5, 10)] for one in (changed, expected)]
    assert lrs[0] == lrs[1]


def test_turns_name_optimizers():
    with pytest.raises(TaskError) as raised:
        own(tiny(), one(optim.SGD), turns=("g",)).turns()
    said(without_lines(str(raised.value)))
