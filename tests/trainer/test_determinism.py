"""Tests which kernels are used, and the record of everything that affects the bits of a result."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.support.programs import run_program
from tests.support.runs import launch_plan
from trainkit.capabilities.replay.compare import FACTS
from trainkit.capabilities.replay.steps import Start
from trainkit.trainer import starting_state
from trainkit.trainer.starting_state import computed_on
from trainkit.trainer.worker import fix_kernels

INDUCTOR = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
RING = {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("device", "num_ranks", "deterministic", "before", "expected"),
    [
        ("cpu", 2, False, {}, {}),
        ("cuda", 2, False, {}, INDUCTOR),
        ("cuda", 1, True, {}, {**INDUCTOR, **CUBLAS}),
        ("cuda", 2, True, {}, {**INDUCTOR, **CUBLAS, **RING}),
        ("cuda", 2, True, {"NCCL_ALGO": "Tree"}, {**INDUCTOR, **CUBLAS, "NCCL_ALGO": "Tree"}),
    ],
)
def test_kernels_are_chosen_by_what_they_compute(
    monkeypatch, device, num_ranks, deterministic, before, expected
):
    monkeypatch.setattr(os, "environ", environ := dict(before))
    memory = torch.utils.deterministic
    monkeypatch.setattr(memory, "fill_uninitialized_memory", True)
    try:
        fix_kernels(launch_plan(num_nodes=num_ranks, workers_per_node=1, device=device), deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert memory.fill_uninitialized_memory != deterministic, "it would write every gathered buffer"
    finally:
        torch.use_deterministic_algorithms(False)
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets this variable
    assert environ == expected


START = """
import os, sys, trainkit.trainer.worker
slow = {"distributed.pipelining", "distributed._tools.mem_tracker", "_dynamo", "_inductor"}
assert not {f"torch.{name}" for name in slow} & {*sys.modules}
os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
from torch._inductor import config
assert config.deterministic is True
"""


def test_a_rank_imports_slow_modules_only_when_it_needs_them_and_inductor_knows_its_variable():
    """The imports would add a quarter to each start, and fix the variables of Inductor too early."""
    import torch._inductor.config as inductor

    assert inductor.deterministic is False
    run_program(sys.executable, "-c", START, check=True, cwd=Path(__file__).parents[2])


def test_replay_compares_what_an_attempt_records(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(starting_state.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(starting_state, "driver_version", lambda: "580.159.04")
    monkeypatch.setattr(starting_state, "version", lambda name: "3.6.0")
    on_gpu = computed_on(torch.device("cuda", 0))
    versions = {"cudnn": 91501, "nccl": "2.28.9", "triton": "3.6.0", "driver": "580.159.04"}
    assert versions.items() <= on_gpu.items()
    assert {"trainkit", *on_gpu} == set(FACTS) <= {field.name for field in fields(Start)}
    assert on_gpu.keys() - versions == computed_on(torch.device("cpu")).keys()
