"""Tests training with running averages in 8 bits: exact resume and a change of layout."""

import pytest

from tests.support.parity import run_chain, worst_difference
from tests.support.runs import log_text, losses, train
from trainkit.run.files import read_json

pytestmark = pytest.mark.slow

EIGHT_BIT = "optimizer.name=adamw_8bit"
FP16 = ["precision.dtype=fp16", "precision.init_loss_scale=4e6", "precision.loss_scale_growth_interval=3"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("num_procs", "options"),
    [
        pytest.param(2, ["parallel.dp_shard=2"], id="fsdp 2"),
        pytest.param(1, FP16, id="fp16 that overflows"),
    ],
)
def test_resumes_bit_for_bit(tmp_path, num_procs, options):
    options = [EIGHT_BIT, *options, "model.dropout=0.1", "train.steps=8"]
    attempt = train(tmp_path / "whole", options, num_procs)
    assert ("skipped" in log_text(attempt)) == ("precision.dtype=fp16" in options)
    train(tmp_path / "cut", [*options, "train.stop_at_step=4"], num_procs, expect=75)
    train(tmp_path / "cut", options, num_procs)
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_chain_of_layouts(tmp_path):
    """Tensor parallelism shards columns, and both ends of a pipeline have the tied embedding."""
    links: list[tuple[int, dict[str, object]]] = [
        (4, {"tp": 2, "dp_shard": 2}),
        (2, {"offload": True, "dp_shard": 2}),
        (2, {"pp": 2}),
        (1, {}),
    ]
    run_chain(tmp_path, links, [EIGHT_BIT, "model.tie_embeddings=true"])
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5


def test_another_optimizer_is_refused(tmp_path):
    train(tmp_path / "run", ["train.steps=2", "train.stop_at_step=1", EIGHT_BIT], expect=75)
    attempt = train(tmp_path / "run", ["train.steps=2", "optimizer.name=adamw"], expect=78)
    message = read_json(attempt.rank_error(0))["message"]
    assert "optimizer.name" in message
    assert "model" not in message
