"""The parts of a sequence that context-parallel ranks have."""

from __future__ import annotations

import pytest
import torch

from trainkit.trainer.parallel.context import positions_of, seen_by


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ranks_share_a_sequence_and_its_work(cp: int) -> None:
    parts = [positions_of(rank, cp, 32) for rank in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == list(range(32))
    work = {int((part + 1).sum()) for part in parts}
    assert len(work) == 1, "keys that each rank's queries look at"


def test_tensor_parallel_ranks_hold_parts_of_the_stream() -> None:
    seen = [seen_by(1, 2, tp_rank, 2, 32) for tp_rank in (0, 1)]
    assert torch.equal(seen[0].attention, seen[1].attention)
    assert torch.equal(torch.cat([one.stream for one in seen]), seen[0].attention)
