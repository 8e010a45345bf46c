"""Tests that models with experts have the curve of one process in every layout, and after a layout change."""

from pathlib import Path

import pytest

from tests.support.parity import Case, run_cases, worst_difference
from trainkit.run.events import read_metrics
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("moe")]

MOE = "{num_experts: 8, top_k: 2, expert_ffn_dim: 32, num_shared: 1, first_dense: 1}"
COMMON = [f"model.moe={MOE}", "train.steps=4", "train.eval_every=2", "model.dropout=0.1"]
DATA_PARALLEL = [
    Case("full", 1, {"activation_checkpointing": "full"}),
    Case("pointwise", 1, {"activation_checkpointing": "pointwise"}),
    Case("selective", 1, {"activation_checkpointing": "selective"}),
    Case("shard", 2, {"dp_shard": 2, "activation_checkpointing": "full"}),
    Case("replicate", 2, {"dp_replicate": 2}),
    Case("ep", 2, {"dp_shard": 2, "ep": 2}),
    Case("ep-selective", 2, {"dp_shard": 2, "ep": 2, "activation_checkpointing": "selective"}),
    Case("ep-offload", 2, {"dp_shard": 2, "ep": 2, "offload": True, "activation_checkpointing": "full"}),
    Case("cp-ep", 2, {"cp": 2, "ep": 2, "activation_checkpointing": "pointwise"}),
    Case("shard-ep", 4, {"dp_shard": 4, "ep": 2, "zero": 2}),
    Case("replicate-ep", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    Case("ep-4", 4, {"dp_shard": 4, "ep": 4, "activation_checkpointing": "full"}),
    Case("pp-ep", 4, {"pp": 2, "dp_shard": 2, "ep": 2}),
    Case("tp-ep", 4, {"dp_shard": 2, "tp": 2, "ep": 2, "activation_checkpointing": "full"}),
    Case("tp-ep-4", 4, {"dp_shard": 2, "tp": 2, "ep": 4, "activation_checkpointing": "selective"}),
    Case("replicate-tp-ep", 4, {"dp_replicate": 2, "tp": 2, "ep": 2}),
]
CASES = [
    *DATA_PARALLEL,
    Case("compiled", 1, {"compile": True, "activation_checkpointing": "pointwise"}),
    Case("tp", 2, {"tp": 2}),
    Case("plain-tp", 2, {"tp": 2, "sequence_parallel": False, "loss_parallel": False}),
    Case("cp", 2, {"cp": 2, "activation_checkpointing": "pointwise"}),
    Case("pp", 2, {"pp": 2}),
    Case("zero-bubble", 2, {"pp": 2, "pp_schedule": "zbv", "activation_checkpointing": "full"}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_cases(folder, [Case("alone", 1, {}), *CASES], COMMON)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_curve(runs: Path, case: Case) -> None:
    found = worst_difference(runs / case.name, runs / "alone")
    print(case.name, found, [m["load_imbalance"] for m in read_metrics(RunDir(runs / case.name))])
    assert found < 1e-5
