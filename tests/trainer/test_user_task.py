"""A task of the user's own trains on every data-parallel layout as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tasks
from tests.support.parity import Case, curve, run_cases, worst_difference
from trainkit.rundir import RunDir, read_metrics

FILE = Path(tasks.__file__)
COMMON = (
    *(f"task={FILE}:Classify", "train.steps=6", "train.eval_every=3", "train.grad_clip=0.5"),
    "optimizer.lr=0.01",
)
CASES = [
    Case("ddp", 2, {"dp_replicate": 2}),
    Case("fsdp", 2, {"dp_shard": 2, "activation_checkpointing": "full"}, ("data.num_workers=1",)),
    Case("zero2", 2, {"dp_shard": 2, "zero": 2, "activation_checkpointing": "selective"}),
    Case("hsdp", 4, {"dp_shard": 2, "dp_replicate": 2}),
]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    names = ("accuracy", "right", "val_loss", "val_accuracy", "val_right")
    return [{name: record[name] for name in names if name in record} for record in read_metrics(RunDir(folder))]


@pytest.mark.slow
@pytest.mark.smoke
def test_every_layout_has_the_same_curve(tmp_path: Path) -> None:
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], COMMON)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in CASES}
    assert max(found.values()) < 1e-5, found
    losses = [loss for _, loss, *_ in curve(tmp_path / "alone")]
    assert losses[-1] < losses[0]
    alone = metrics_of(tmp_path / "alone")
    assert set(alone[0]) == {"accuracy", "right"} and set(alone[2]) > {"val_accuracy", "val_right"}
    for case in CASES:
        for mine, expected in zip(metrics_of(tmp_path / case.name), alone, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_built_in_task_written_as_a_users(tmp_path: Path) -> None:
    common = ["train.steps=6", "train.eval_every=null"]
    own = (f"task={FILE}:Tokens",)
    cases = [
        Case("built-in", 1, {}),
        Case("own", 1, {}, own),
        Case("own-ddp", 2, {"dp_replicate": 2}, own),
        Case("own-hsdp", 4, {"dp_replicate": 2, "dp_shard": 2}, own),
    ]
    run_cases(tmp_path, cases, common, keep_labels=True)
    for case in cases[1:]:
        assert worst_difference(tmp_path / case.name, tmp_path / "built-in") < 1e-5, case.name
