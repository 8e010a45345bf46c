"""Tests the window of the profiler."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.models import ALONE
from tests.support.said import said
from trainkit.config.running import ProfilerConfig
from trainkit.run.files import read_json
from trainkit.trainer.profiler import ProfileWindow, covered_s, summary_of


def run(folder: Path, config: ProfilerConfig, steps: int = 6) -> list[str]:
    """Pretend to train, and return the names of the trace's events. Each step has one."""
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
    summary = read_json(folder / "rank-0000.summary.json")
    assert summary["num_steps"] == min(config.num_steps, steps + 1 - int(config.start_step or 0))
    trace = folder / "rank-0000.json"
    names = {str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(name for name in names if name.startswith("step-"))


STEPS = [f"step-{step}" for step in range(1, 7)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"start_step": 2, "num_steps": 3}, STEPS[1:4]),
        ({"start_step": 1, "num_steps": 1}, STEPS[:1]),
        ({"start_step": 5, "num_steps": 10}, STEPS[4:]),
        ({}, []),
        ({"start_step": 2, "ranks": (1,)}, []),
        ({"start_step": 100}, []),
    ],
)
def test_records_the_window(tmp_path, config, expected):
    assert run(tmp_path / "profile", ProfilerConfig(**config)) == expected


def test_a_summary_tells_the_kinds_of_work_apart():
    matrix = torch.ones(512, 512)
    with torch.profiler.profile() as profile:
        for _ in range(8):
            matrix @ matrix
        matrix.sigmoid()
    found = summary_of(profile.events(), num_steps=2, wall_s=100.0, cuda=False)
    assert found["step_s"] == 50.0
    seconds = found["seconds_per_step"]
    assert seconds["gemm"] > seconds["elementwise"] > 0.0
    assert next(iter(found["largest_seconds_per_step"])) == "aten::mm"
    assert sum(found["share"].values()) == pytest.approx(1.0)
    assert found["share"]["idle"] > 0.9


def test_what_runs_at_the_same_time_is_covered_once():
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 4.0
    assert covered_s([]) == 0.0


def test_memory_is_recorded_on_gpus_only(tmp_path, caplog):
    config = ProfilerConfig(start_step=2, num_steps=1, memory=True)
    run(tmp_path / "profile", config)
    [message] = [message for message in caplog.messages if "profiler.memory" in message]
    said(message)
    assert sorted(item.name for item in (tmp_path / "profile").iterdir()) == [
        "rank-0000.json",
        "rank-0000.summary.json",
    ]
