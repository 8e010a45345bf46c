"""Tests that a run with each optimizer resumes exactly, after a SIGKILL and on other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.own_code import write_lion
from tests.support.parity import Case, close, curve, make_trainer, run_cases, saved_tensors, worst_difference
from tests.support.runs import fork_workers, make_attempt, train, wait_for, wait_until
from trainkit.run.manifest import published
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.split_master import SplitMaster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("optimizers")]

EXPERTS = "model.moe={num_experts: 6, top_k: 2, expert_ffn_dim: 32, num_shared: 1, first_dense: 1}"
OPTIMIZERS: dict[str, tuple[list[str], float]] = {
    "adamw": ([], 1e-5),
    "adamw with bf16 state": (["optimizer.state_dtype=bf16"], 1e-5),
    "adamw_8bit": (["optimizer.name=adamw_8bit"], 1e-5),
    "lion": (["optimizer.name=lion"], 1e-3),
    "muon": (["optimizer.name=muon"], 1e-5),
    "muon with experts": (["optimizer.name=muon", EXPERTS], 1e-5),
    "sgd": (["optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.lr=0.1"], 1e-5),
    "own": (["optimizer.options={betas: [0.8, 0.98]}"], 1e-3),
}
"""Options of each optimizer, and the largest difference between the curves of two layouts.

The sign of an average near 0 depends on rounding.
"""


def options_of(name: str, folder: Path) -> list[str]:
    """Return the options of an optimizer, whose own file is written to a folder."""
    own = [f"optimizer.name={write_lion(folder)}"] if name == "own" else []
    return [*own, *OPTIMIZERS[name][0]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_killed_after_a_save(tmp_path: Path, name: str) -> None:
    """The ranks get SIGKILL right after a checkpoint was published by an asynchronous save."""
    options = [*options_of(name, tmp_path), "parallel.dp_shard=2", "precision.dtype=bf16"]
    options += ["train.steps=8", "checkpoint.every_steps=1", "model.dropout=0.1"]
    train(tmp_path / "whole", options, 2)
    run = RunDir(tmp_path / "killed")
    workers = fork_workers(make_attempt(run.path, options, 2), 2)
    wait_until(lambda: any(item.step >= 3 for item in published(run.checkpoints_dir)))
    for worker in workers:
        worker.kill()
    wait_for(workers)
    train(run.path, options, 2)
    assert curve(run.path) == curve(tmp_path / "whole")
    found, expected = saved_tensors(run.path), saved_tensors(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def load_and_train(rank: int, attempt: AttemptDir) -> None:
    """Check that the loaded weights and optimizer state equal the newest checkpoint, then train."""
    saved = saved_tensors(attempt.run.path) if published(attempt.run.checkpoints_dir) else {}
    trainer = make_trainer(rank, attempt)
    tensors: dict[str, Any] = dict(trainer._whole_state)
    if trainer._own is not None:
        tensors |= {key: item for key, item in trainer._own.collect()[1].items() if "optimizer." in key}
    assert not saved or any(key.startswith("optimizer.") for key in saved)
    for key, expected in saved.items():
        found = tensors[key]
        whole = found.join() if isinstance(found, SplitMaster) else found
        assert torch.equal(whole.full_tensor() if isinstance(whole, DTensor) else whole, expected), key
    trainer.train()
    close(trainer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_from_four_ranks_to_one_and_to_two(tmp_path: Path, name: str) -> None:
    """Each layout loads every bit of the state, and trains as one process does, apart from rounding."""
    four: dict[str, object] = {"dp_shard": 2, "tp": 2}
    two: dict[str, object] = {"dp_shard": 2}
    if name.startswith("muon"):  # replicas divide the matrices, and each keeps the momentum of all
        four, two = {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2}
    if EXPERTS in OPTIMIZERS[name][0]:
        four, two = {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"dp_shard": 2, "ep": 2}
    for index, (num_procs, parallel) in enumerate([(4, four), (1, {}), (2, two)], 1):
        stop = () if index == 3 else (f"train.stop_at_step={2 * index}",)
        folder = tmp_path / f"code-{index}"  # the file of an optimizer may move
        folder.mkdir()
        common = [*options_of(name, folder), "train.steps=6"]
        run_cases(tmp_path, [Case("chain", num_procs, parallel, stop)], common, function=load_and_train)
    run_cases(tmp_path, [Case("alone", 1, {})], common)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < OPTIMIZERS[name][1]
    assert saved_tensors(tmp_path / "chain").keys() == saved_tensors(tmp_path / "alone").keys()
