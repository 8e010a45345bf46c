"""The profiler's window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.models import ALONE
from trainkit.config.running import ProfilerConfig
from trainkit.trainer.profiler import ProfileWindow


def run(folder: Path, config: ProfilerConfig, steps: int = 6) -> list[str]:
    """Pretend to train; the names of the trace's marks, in which each step marks itself."""
    window = ProfileWindow(config, folder, ALONE)
    for step in range(1, steps + 1):
        window.before(step)
        with torch.profiler.record_function(f"step-{step}"):
            torch.ones(4).sum()
        window.after(step)
    window.close()
    window.close()
    if not folder.exists():
        return []
    (trace,) = folder.iterdir()
    assert trace.name == "rank-0000.json"
    names = {str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(name for name in names if name.startswith("step-"))


@pytest.mark.parametrize(
    ("start_step", "num_steps", "expected"),
    [(2, 3, ["step-2", "step-3", "step-4"]), (1, 1, ["step-1"]), (5, 10, ["step-5", "step-6"])],
)
def test_records_the_window(tmp_path: Path, start_step: int, num_steps: int, expected: list[str]) -> None:
    config = ProfilerConfig(start_step=start_step, num_steps=num_steps)
    assert run(tmp_path / "profile", config) == expected


def test_records_nothing_when_not_asked_to(tmp_path: Path) -> None:
    for config in (
        ProfilerConfig(),
        ProfilerConfig(start_step=2, ranks=(1,)),
        ProfilerConfig(start_step=100),
    ):
        assert run(tmp_path / "profile", config) == []
