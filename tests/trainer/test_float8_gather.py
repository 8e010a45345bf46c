"""Tests that weights gathered in float8 train bit for bit like bf16, with half of the bytes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parity import ACCUMULATION, Case, close, curve, make_trainer, run_cases, saved_tensors
from tests.support.ranks import preload
from trainkit.run.rundir import AttemptDir
from trainkit.trainer import build
from trainkit.trainer.precision import apply_float8
from trainkit.trainer.torch_private import DispatchMode, collective_kind

pytest.importorskip("torchao")
pytestmark = [pytest.mark.slow(seconds=3), pytest.mark.xdist_group("float8_gather")]

COMMON = [
    *("precision.dtype=bf16", "train.steps=3", "train.eval_every=2", "model.dropout=0.1"),
    "model.num_layers=2",
]
CASES = [
    Case(
        *("shard", 2, {"dp_shard": 2, "activation_checkpointing": "full"}),
        ("checkpoint.async=true", "checkpoint.every_steps=2"),
    ),
    Case(
        *("cp", 2, {"cp": 2, "zero": 2, "activation_checkpointing": "selective"}),
        ("optimizer.name=adamw_8bit",),
    ),
    Case("uneven", 3, {"dp_shard": 3}, ("train.global_batch_size=12",)),
    Case("pp", 4, {"pp": 2, "dp_shard": 2}),
]
NAMES = [case.name for case in CASES]
WAYS = ("bf16", "float8")
"""The types of gathered weights."""


class _CountTalk(DispatchMode):
    """Adds up the bytes that this rank gives to gathers, and counts all-reductions."""

    gathered = reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = collective_kind(func)
        if kind == "all_gather":
            self.gathered += (args[1] if isinstance(args[1], Tensor) else args[0]).nbytes
        self.reduced += kind == "all_reduce"
        return func(*args, **(kwargs or {}))


def train(rank: int, attempt: AttemptDir, way: str) -> None:
    """Train as one rank with an emulated float8 multiplication, and record the first step's collectives."""
    build.require_float8 = lambda device: None
    build.apply_float8 = partial(apply_float8, emulate=True)
    trainer = make_trainer(rank, attempt, float8="gather" if way == "float8" else True)
    with _CountTalk() as talk:
        trainer.step()
    (attempt.path / f"talk-{rank}").write_text(json.dumps([talk.gathered, talk.reduced]))
    trainer.train()
    close(trainer)


def train_as_named(rank: int, attempt: AttemptDir) -> None:
    train(rank, attempt, attempt.run.path.name.rpartition(".")[2])


def train_in_turns(rank: int, attempt: AttemptDir) -> None:
    train(rank, attempt, WAYS[int(attempt.path.name) % 2])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload("torchao.float8")
    folder = tmp_path_factory.mktemp("runs")
    cases = [replace(case, name=f"{case.name}.{way}") for case in CASES for way in WAYS]
    run_cases(folder, cases, COMMON, function=train_as_named)
    return folder


def assert_equal(run: Path, expected: Path) -> None:
    """Check that losses, gradient norms, validation, weights and running averages are equal bit for bit."""
    assert curve(run) == curve(expected)
    mine, other = saved_tensors(run), saved_tensors(expected)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("name", NAMES)
def test_one_curve(runs, name):
    assert_equal(runs / f"{name}.float8", runs / f"{name}.bf16")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_gathers(runs, name):
    """A number of a matrix in a block takes one byte instead of two, and there is one more all-reduce."""
    talks = (runs / f"{name}.{way}" / "attempts/001/talk-0" for way in WAYS)
    (gathered, reduced), (in_float8, reduced_now) = (json.loads(talk.read_text()) for talk in talks)
    assert in_float8 < 0.9 * gathered
    weights = {
        key: value for key, value in saved_tensors(runs / f"{name}.bf16").items() if key.endswith("weight")
    }
    matrices = sum(value.numel() for key, value in weights.items() if "blocks" in key and value.dim() == 2)
    whole = pytest.approx(ACCUMULATION * sum(map(torch.numel, weights.values())), rel=0.01)
    expected = whole, ACCUMULATION * matrices // 2
    assert name != "shard" or (gathered, gathered - in_float8) == expected
    assert reduced_now == reduced + 1


def test_a_run_may_change_between_both(runs):
    case = replace(CASES[0], name="switched")
    run_cases(runs, [case], [*COMMON, "train.stop_at_step=2"], function=train_in_turns)
    run_cases(runs, [case], COMMON, function=train_in_turns)
    assert_equal(runs / "switched", runs / "shard.bf16")
