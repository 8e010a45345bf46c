"""Tests that a step has only the collectives of its layout and one more, with any logging and clipping."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.parity import ACCUMULATION, GLOBAL_BATCH, Case, close, make_trainer, run_cases
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.torch_private import DispatchMode, collective_kind

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collectives")]

LAYERS, PASSES = 4, ACCUMULATION
OTHER_KINDS = re.compile(r"(?:c10d|_c10d_functional)::(send|recv|broadcast|barrier)")
AGREED = {"all_reduce": 1}
"""Loss, tokens, gradient norm, stop and save share one small collective."""


class _Count(DispatchMode):
    """Counts collectives, also inside operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # the operation consists of other operations
        other = OTHER_KINDS.match(func.name())
        self.found.update(filter(None, [collective_kind(func), other and other[1]]))
        return func(*args, **(kwargs or {}))


def count(rank: int, attempt: AttemptDir) -> None:
    """Record the collectives of a rank's second step, which logs, clips and checks for a stop."""
    trainer = make_trainer(rank, attempt)
    trainer.step()
    with _Count() as counting:
        trainer.step()
    (attempt.path / f"found-{rank}.json").write_text(json.dumps(counting.found))
    close(trainer)


def plus(*counts: dict[str, int]) -> dict[str, int]:
    return dict(sum((Counter(one) for one in counts), Counter()))


# The splits are the embedding, two in each block, and the head. Each has a reduction in one pass and, in the
# other pass, a reduction of the gradient of its input.
SPLITS = 2 * LAYERS + 1
SHARDED = {"all_gather": PASSES, "reduce_scatter": PASSES}
"""All parameters are one unit: gathered for each forward pass, reduced after each backward pass."""
MICROBATCHES = GLOBAL_BATCH // 2
"""The number of microbatches, which have two samples each."""


CASES = [
    (Case("replicate", 2, {"dp_replicate": 2}), plus(AGREED, {"all_reduce": 1})),
    (Case("shard", 2, {"dp_shard": 2}), plus(AGREED, SHARDED)),
    # The parameters are gathered once for all microbatches.
    (Case("zero-2", 2, {"dp_shard": 2, "zero": 2}), plus(AGREED, SHARDED, {"all_gather": 1 - PASSES})),
    (
        Case("tp", 2, {"tp": 2}),
        plus(
            AGREED,
            {"all_gather": 2 * SPLITS * PASSES, "reduce_scatter": 2 * SPLITS * PASSES},
            # The loss reduces the maximum, the sum of exponentials, and the label's logit.
            {"all_reduce": 3 * PASSES},
            # The gradients of the norms' weights are reduced, because each rank has only its positions.
            {"all_reduce": 2 * LAYERS + 1},
        ),
    ),
    *(
        (
            Case(f"tp-{mode}", 2, {"tp": 2, "activation_checkpointing": mode}),
            plus(
                AGREED,
                # Recomputation gathers the inputs of attention and feed-forward again, but reduces nothing
                # again.
                {"all_gather": 2 * (SPLITS + LAYERS) * PASSES, "reduce_scatter": 2 * SPLITS * PASSES},
                {"all_reduce": 3 * PASSES + 2 * LAYERS + 1},
            ),
        )
        for mode in ("pointwise", "selective")
    ),
    (
        Case("tp-full", 2, {"tp": 2, "activation_checkpointing": "full"}),
        plus(
            AGREED,
            # The output of a block is not needed again, so the output of its feed-forward is not reduced
            # again.
            {"all_gather": 2 * (SPLITS + LAYERS) * PASSES, "reduce_scatter": (2 * SPLITS + LAYERS) * PASSES},
            {"all_reduce": 3 * PASSES + 2 * LAYERS + 1},
        ),
    ),
    (
        Case("tp-of-matrices-only", 2, {"tp": 2, "sequence_parallel": False, "loss_parallel": False}),
        plus(AGREED, {"all_reduce": 2 * SPLITS * PASSES, "all_gather": PASSES}),
    ),
    (
        Case("cp", 2, {"cp": 2}),
        plus(AGREED, SHARDED, {"all_gather": LAYERS * PASSES, "reduce_scatter": LAYERS * PASSES}),
    ),
    (Case("pp", 2, {"pp": 2}), plus(AGREED, {"send": MICROBATCHES, "recv": MICROBATCHES})),
    (
        Case("pp-with-a-tied-head", 2, {"pp": 2}, ("model.tie_embeddings=true",)),
        plus(AGREED, {"send": MICROBATCHES + 1, "recv": MICROBATCHES + 1}),
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_cases(folder, [case for case, _ in CASES], ["train.steps=2", "train.eval_every=null"], function=count)
    return folder


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[case.name for case, _ in CASES])
def test_collectives_of_a_step(runs, case, expected):
    attempt = RunDir(runs / case.name).attempt(1)
    for rank in range(case.num_procs):
        assert json.loads((attempt.path / f"found-{rank}.json").read_text()) == expected
