"""Tests that a user's task trains on every data-parallel layout as on one process."""

from pathlib import Path

import pytest
import torch

from tests.support import tasks
from tests.support.parity import (
    Case,
    assert_same_curves,
    curve,
    metrics_of,
    run_cases,
    run_chain,
    saved_tensors,
    worst_difference,
)

FILE = Path(tasks.__file__)
COMMON = (f"task={FILE}:Classify", "train.steps=6", "train.eval_every=3", "optimizer.lr=0.01")
COMMON += ("train.grad_clip=0.5",)
CASES = [
    Case("ddp", 2, {"dp_replicate": 2, "activation_checkpointing": "pointwise"}),
    Case("fsdp", 2, {"dp_shard": 2, "activation_checkpointing": "full"}, ("data.num_workers=1",)),
    Case("zero2", 2, {"dp_shard": 2, "zero": 2, "activation_checkpointing": "selective"}),
    Case("hsdp", 4, {"dp_shard": 2, "dp_replicate": 2}),
]


@pytest.mark.slow
@pytest.mark.smoke
def test_every_layout_has_the_same_curve(tmp_path):
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], COMMON)
    assert_same_curves(tmp_path, CASES)
    losses = [loss for _, loss, *_ in curve(tmp_path / "alone")]
    assert losses[-1] < losses[0]
    alone = metrics_of(tmp_path / "alone")
    assert set(alone[0]) == {"tokens", "accuracy", "right"}
    assert set(alone[2]) > {"val_accuracy", "val_right"}
    for case in CASES:
        for mine, expected in zip(metrics_of(tmp_path / case.name), alone, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_built_in_task_written_as_a_users(tmp_path):
    own = Case("own", 1, {}, (f"task={FILE}:Tokens",))
    run_cases(tmp_path, [Case("built-in", 1, {}), own], ["train.steps=3"], keep_labels=True)
    assert_same_curves(tmp_path, [own], "built-in")


def losses(folder: Path) -> list[float]:
    return [loss for _, loss, *_ in curve(folder)]


@pytest.mark.slow
def test_a_resume_continues_the_same_curve(tmp_path):
    """The curve is equal to the last bit on the same layout with dropout, and to 1e-5 on other layouts."""
    dropout = (*COMMON, "task_args.dropout=0.2", "task_args.batch_norm=true")
    shard: dict[str, object] = {"dp_shard": 2}
    cut = Case("cut", 2, shard, ("train.stop_at_step=4",))
    run_cases(tmp_path, [cut, Case("cut", 2, shard), Case("same", 2, shard)], dropout)
    assert curve(tmp_path / "cut") == curve(tmp_path / "same")
    first, second = (saved_tensors(tmp_path / name)["buffer.blocks.0.average"] for name in ("cut", "same"))
    assert torch.equal(first, second)
    assert first.abs().max() > 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "same")
    run_chain(tmp_path, [(1, {}), (2, {"dp_shard": 2}), (2, {"dp_replicate": 2})], COMMON)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5


@pytest.mark.slow
def test_the_last_batch_of_the_epochs_is_smaller(tmp_path):
    """One rank has no sample in the last step with 17 samples and 16 per step."""
    epochs = [*COMMON, "task_args.samples=17", "train.steps=null", "train.epochs=2"]
    cases = [Case("fsdp", 2, {"dp_shard": 2}), Case("ddp", 2, {"dp_replicate": 2})]
    run_cases(tmp_path, [Case("alone", 1, {}), *cases], epochs)
    assert [seen for *_, seen in curve(tmp_path / "alone")] == [16, 32, 34]
    assert_same_curves(tmp_path, cases)


@pytest.mark.slow
def test_bf16_and_frozen_parts(tmp_path):
    """One process and shards have the same types, and batch norms stay in float32."""
    common = [*COMMON, "precision.dtype=bf16", "task_args.frozen=true", "task_args.batch_norm=true"]
    cases = [Case("fsdp", 2, {"dp_shard": 2}), Case("ddp", 2, {"dp_replicate": 2})]
    run_cases(tmp_path, [Case("alone", 1, {}), Case("one", 1, {"mesh_of_one": True}), *cases], common)
    assert losses(tmp_path / "one") == losses(tmp_path / "alone")
    assert worst_difference(tmp_path / "fsdp", tmp_path / "ddp") < 1e-2
    assert losses(tmp_path / "alone")[-1] < losses(tmp_path / "alone")[0]
    saved = saved_tensors(tmp_path / "fsdp")
    buffers = {"buffer.blocks.0.norm.running_mean", "buffer.blocks.0.average"}
    assert {"model.embed.weight", *buffers} <= saved.keys()
    assert "optimizer.embed.weight.exp_avg" not in saved
    assert "optimizer.head.weight.exp_avg" in saved
