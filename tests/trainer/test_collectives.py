"""A step talks as often as its layout needs, and once more, whatever is logged and clipped."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.parity import ACCUMULATION, GLOBAL_BATCH, Case, close, make_trainer, run_cases
from trainkit.rundir import AttemptDir

pytestmark = pytest.mark.slow

LAYERS, PASSES = 8, ACCUMULATION
KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::broadcast_": "broadcast",
    "c10d::barrier": "barrier",
}
AGREED = {"all_reduce": 1}
"""Loss, tokens, gradient norm, stop and save: one small collective."""


def count(rank: int, attempt: AttemptDir) -> None:
    """Write down what the second step of a rank does: it logs, clips and looks for a stop."""
    from torch.profiler import ProfilerActivity, profile

    trainer = make_trainer(rank, attempt)
    trainer.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step()
    found = Counter(KINDS[event.name] for event in profiler.events() if event.name in KINDS)
    (attempt.path / f"found-{rank}.json").write_text(json.dumps(found))
    close(trainer)


def plus(*counts: dict[str, int]) -> dict[str, int]:
    return dict(sum((Counter(one) for one in counts), Counter()))


# A split embedding, two splits in each block, a split head: each has a reduction in one pass and, in the
# other, one for the gradient of its input.
SPLITS = 2 * LAYERS + 1
SHARDED = {"all_gather": PASSES, "reduce_scatter": PASSES}
"""All parameters are one unit: gathered for each forward pass, reduced after each backward pass."""
MICROBATCHES = GLOBAL_BATCH
"""Of one sample."""


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(
            Case("replicate", 2, {"dp_replicate": 2}), plus(AGREED, {"all_reduce": 1}), id="replicate"
        ),
        pytest.param(Case("shard", 2, {"dp_shard": 2}), plus(AGREED, SHARDED), id="shard"),
        pytest.param(
            Case("tp", 2, {"tp": 2}),
            plus(
                AGREED,
                {"all_gather": 2 * SPLITS * PASSES, "reduce_scatter": 2 * SPLITS * PASSES},
                # The loss: maximum, sum of exponentials, the label's logit.
                {"all_reduce": 3 * PASSES},
                # The gradients of the norms' weights, of which each rank has its positions' part.
                {"all_reduce": 2 * LAYERS + 1},
            ),
            id="tp",
        ),
        pytest.param(
            Case("plain-tp", 2, {"tp": 2, "sequence_parallel": False, "loss_parallel": False}),
            plus(AGREED, {"all_reduce": 2 * SPLITS * PASSES, "all_gather": PASSES}),
            id="tp of matrices only",
        ),
        pytest.param(
            Case("cp", 2, {"cp": 2}),
            plus(AGREED, SHARDED, {"all_gather": LAYERS * PASSES, "reduce_scatter": LAYERS * PASSES}),
            id="cp",
        ),
        pytest.param(
            Case("pp", 2, {"pp": 2}), plus(AGREED, {"send": MICROBATCHES, "recv": MICROBATCHES}), id="pp"
        ),
        pytest.param(
            Case("pp-tied", 2, {"pp": 2}, ("model.tie_embeddings=true",)),
            plus(AGREED, {"send": MICROBATCHES + 1, "recv": MICROBATCHES + 1}),
            id="pp with a tied head",
        ),
    ],
)
def test_collectives_of_a_step(tmp_path: Path, case: Case, expected: dict[str, int]) -> None:
    run_cases(tmp_path, [case], ["train.steps=2", "train.eval_every=null"], function=count)
    for rank in range(case.num_procs):
        assert (
            json.loads((tmp_path / case.name / "attempts/001" / f"found-{rank}.json").read_text()) == expected
        )
