"""A task that says how its model is split trains with tensor parallelism as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import split_tasks
from tests.support.parity import Case, curve, run_cases, worst_difference
from trainkit.rundir import RunDir, read_metrics

FILE = Path(split_tasks.__file__)
COMMON = (
    *(f"task={FILE}:Speak", "train.steps=6", "train.eval_every=3", "train.grad_clip=0.5"),
    "optimizer.lr=0.01",
)
CASES = [
    Case("tp", 2, {"tp": 2}),
    Case("tp-full", 2, {"tp": 2, "activation_checkpointing": "full"}),
    Case("tp-selective", 2, {"tp": 2, "activation_checkpointing": "selective"}),
    Case("tp-sequence", 2, {"tp": 2}, (f"task={FILE}:SpeakInSequence",)),
    Case("tp-fsdp", 4, {"tp": 2, "dp_shard": 2}),
    Case("tp-fsdp-sequence", 4, {"tp": 2, "dp_shard": 2}, (f"task={FILE}:SpeakInSequence",)),
    Case("tp-zero2", 4, {"tp": 2, "dp_shard": 2, "zero": 2}),
    Case("tp-offload", 4, {"tp": 2, "dp_shard": 2, "offload": True}),
    Case("tp-ddp", 4, {"tp": 2, "dp_replicate": 2}),
    Case("tp4", 4, {"tp": 4}),
]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    names = ("tokens", "accuracy", "samples", "val_loss", "val_accuracy", "val_samples")
    return [
        {name: record[name] for name in names if name in record} for record in read_metrics(RunDir(folder))
    ]


@pytest.mark.slow
@pytest.mark.smoke
def test_every_layout_has_the_same_curve(tmp_path: Path) -> None:
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], COMMON)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in CASES}
    assert max(found.values()) < 1e-5, found
