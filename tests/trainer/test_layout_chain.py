"""A run moves from layout to layout and continues as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parity import Case, curve, run_cases, worst_difference

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

STEPS = 3
CHAIN: list[tuple[int, dict[str, object]]] = [
    (4, {"pp": 2, "dp_shard": 2}),
    (4, {"tp": 2, "dp_replicate": 2}),
    (1, {}),
    (2, {"pp": 2, "pp_schedule": "zbv"}),
    (4, {"dp_shard": 2, "cp": 2}),
]


def test_a_chain_of_five_layouts(tmp_path: Path) -> None:
    """With dropout and tied embeddings, which the two ends of a pipeline both hold."""
    last = STEPS * len(CHAIN)
    common = ["model.tie_embeddings=true", "model.dropout=0.1", f"train.steps={last}"]
    for index, (num_procs, parallel) in enumerate(CHAIN, 1):
        link = Case("chain", num_procs, parallel, (f"train.stop_at_step={STEPS * index}",))
        run_cases(tmp_path, [link], common)
    run_cases(tmp_path, [Case("alone", 1, {})], common)
    assert [step for step, *_ in curve(tmp_path / "chain")] == list(range(1, last + 1))
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5
