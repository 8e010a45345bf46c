"""A plan on its way through plan.json."""

from __future__ import annotations

import json

import pytest

from trainkit.errors import UsageError
from trainkit.plan.launch import Batch, LaunchPlan, Layout


def make(command: tuple[str, ...] | None) -> LaunchPlan:
    return LaunchPlan(
        backend="local",
        num_nodes=2,
        workers_per_node=2,
        device="cpu",
        layout=Layout(2, 2),
        batch=Batch(8, 1, 32, 8192),
        lr=3e-4,
        threads_per_worker=1,
        grace_s=120.0,
        reasons={"device": "cpu: because"},
        command=command,
    )


@pytest.mark.parametrize("command", [None, ("python", "train.py", "--lr", "1")])
def test_round_trip(command: tuple[str, ...] | None) -> None:
    plan = make(command)
    written = json.loads(json.dumps(plan.to_dict()))
    assert written["world_size"] == 4
    assert written["command"] == (None if command is None else list(command))
    assert LaunchPlan.from_dict(written) == plan


def test_newer_plan() -> None:
    with pytest.raises(UsageError, match=r"plan\.json has version 2; this trainkit supports version 1"):
        LaunchPlan.from_dict({**make(None).to_dict(), "version": 2})
