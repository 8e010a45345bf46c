"""Training with running averages in 8 bits: exact resume, a change of layout, and what it costs in loss."""

from pathlib import Path

import pytest
import torch

from tests.support import tasks
from tests.support.parity import Case, close, make_trainer, run_cases, saved_state, worst_difference
from tests.support.runs import log_text, losses, train
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.models.model import local_tensor

pytestmark = pytest.mark.slow

EIGHT_BIT = "optimizer.name=adamw_8bit"
STEPS = 3
CHAIN: list[tuple[int, dict[str, object]]] = [
    (4, {"tp": 2, "dp_shard": 2}),
    (2, {"mesh_of_one": True, "offload": True, "dp_shard": 2}),
    (4, {"pp": 2, "dp_replicate": 2}),
    (1, {}),
    (4, {"dp_replicate": 2, "dp_shard": 2}),
]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("num_procs", "options"),
    [
        pytest.param(1, [], id="1"),
        pytest.param(2, ["parallel.dp_shard=2"], id="fsdp 2"),
        pytest.param(1, ["precision.dtype=fp16", "precision.init_loss_scale=4e6"], id="fp16 that overflows"),
    ],
)
def test_resumes_bit_for_bit(tmp_path: Path, num_procs: int, options: list[str]) -> None:
    options = [EIGHT_BIT, *options, "model.dropout=0.1", "train.steps=8"]
    attempt = train(tmp_path / "whole", options, num_procs)
    assert ("skipped" in log_text(attempt)) == ("precision.dtype=fp16" in options)
    train(tmp_path / "cut", [*options, "train.stop_at_step=4"], num_procs, expect=75)
    train(tmp_path / "cut", options, num_procs)
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def check_loaded(rank: int, attempt: AttemptDir) -> None:
    """Compare this rank's shards after loading with the rows of the checkpoint, bit for bit."""
    trainer = make_trainer(rank, attempt)
    expected = saved_state(attempt.run.path)
    assert set(trainer.saver.tensors) == set(expected)
    num_codes = 0
    for name, tensor in trainer.saver.tensors.items():
        whole = expected[name]
        if tensor is not local_tensor(tensor):
            rows = -(-len(whole) // 4)
            whole = whole[rows * rank : rows * (rank + 1)]
        assert torch.equal(local_tensor(tensor), whole), name
        num_codes += name.endswith(".codes")
    assert num_codes > 2
    close(trainer)


def test_from_2_processes_to_4(tmp_path: Path) -> None:
    """A checkpoint of 2 is loaded bit for bit by 4, which continue as 2 do."""
    common = [EIGHT_BIT, "train.steps=12"]
    two, four = {"dp_shard": 2}, {"dp_shard": 4}
    run_cases(tmp_path, [Case("two", 2, two, ("train.stop_at_step=6",))], common)
    run_cases(tmp_path, [Case("loaded", 4, four)], common, seed=tmp_path / "two", function=check_loaded)
    continued = [Case("on-2", 2, two), Case("on-4", 4, four)]
    run_cases(tmp_path, continued, common, seed=tmp_path / "two")
    found, expected = losses(tmp_path / "on-4"), losses(tmp_path / "on-2")
    assert list(found) == list(range(7, 13))
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_chain_of_layouts(tmp_path: Path) -> None:
    """Tensor parallelism shards columns, and both ends of a pipeline have the tied embedding."""
    last = STEPS * len(CHAIN)
    common = [EIGHT_BIT, "model.tie_embeddings=true", f"train.steps={last}"]
    for index, (num_procs, parallel) in enumerate(CHAIN, 1):
        run_cases(
            tmp_path, [Case("chain", num_procs, parallel, (f"train.stop_at_step={STEPS * index}",))], common
        )
    run_cases(tmp_path, [Case("alone", 1, {})], common)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    common = [EIGHT_BIT, f"task={tasks.__file__}:Tokens", "train.steps=6", "train.eval_every=null"]
    run_cases(tmp_path, [Case("alone", 1, {}), Case("fsdp", 2, {"dp_shard": 2})], common)
    assert worst_difference(tmp_path / "fsdp", tmp_path / "alone") < 1e-5
    assert any(name.endswith(".codes") for name in saved_state(tmp_path / "fsdp"))


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_learns_as_in_float32(tmp_path: Path, beta2: float) -> None:
    options = [f"optimizer.betas=[0.9, {beta2}]", "optimizer.lr=0.003", "train.steps=100"]
    train(tmp_path / "fp32", options)
    train(tmp_path / "8bit", [*options, EIGHT_BIT])
    expected, found = ([*losses(tmp_path / name).values()] for name in ("fp32", "8bit"))
    assert sum(expected[-20:]) / 20 < 0.7 * expected[0]
    assert sum(found[-20:]) == pytest.approx(sum(expected[-20:]), rel=0.01)


@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_another_optimizer_is_refused(tmp_path: Path, before: str, after: str) -> None:
    train(tmp_path / "run", ["train.steps=4", "train.stop_at_step=2", f"optimizer.name={before}"], expect=75)
    attempt = train(tmp_path / "run", ["train.steps=4", f"optimizer.name={after}"], expect=78)
    message = f"optimizer.name is {after}, was {before}: checkpoint step-00000002 cannot be resumed"
    assert message in log_text(attempt)
    assert "belongs to another model" not in log_text(attempt)
