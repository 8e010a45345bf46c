"""The report of a sweep, from run folders that are made up."""

from __future__ import annotations

import itertools
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.sweeps import made_up_sweep
from trainkit.capabilities.report import sweep_report
from trainkit.capabilities.report.page import dot_chart
from trainkit.capabilities.report.sweep_report import (
    NUM_SAMPLES,
    SweepReport,
    read_sweep,
    render_sweep,
    sample_records,
)
from trainkit.observe.group import GroupFiles
from trainkit.run.files import to_json, write_json
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
AXES: dict[str, list[Any]] = {"optimizer.lr": [1e-4, 3e-4, 1e-3], "seed": [1, 2, 3]}


def report_of(group: RunGroup) -> SweepReport:
    status = GroupFiles(group).status({}, NOW)
    return read_sweep(group, status, NOW.timestamp())


def test_points_that_have_not_started_are_pending_not_failed(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"seed": [1, 2]})
    record = json.loads(group.sweep_file.read_text())
    record["points"].append({"index": 2, "values": {"seed": 3}})
    record["job_id"] = None
    write_json(group.sweep_file, record)
    report = report_of(RunGroup(group.path))
    assert next((point.index, point.state, point.step) for point in report.points) == (2, "unknown", None)
    text = render_sweep(report)
    assert text.count('<tr><td class="n">') == 3


def test_the_page_names_the_best_and_is_escaped(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"data.source": ["<script>alert(1)</script>", "b.txt"]})
    text = render_sweep(report_of(group))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "trainkit submit mine.yaml --sweep &#39;a b=1,2&#39;" in text
    assert "2 runs, 2 finished. Best validation loss: 2.05" in text


def test_numbers_that_are_written_as_text_are_in_their_order(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"lr": ["0.1", "0.01", "1e-3"]})
    report = report_of(group)
    values = {point.index: (point.values["lr"], point.texts(["lr"])) for point in report.points}
    assert values == {0: (0.1, ["0.1"]), 1: (0.01, ["0.01"]), 2: (0.001, ["1e-3"])}
    assert {point["values"]["lr"] for point in to_json(report)["points"]} == {0.1, 0.01, 0.001}
    text = render_sweep(report)
    assert "<td>1e-3<td>" in text
    chart = dot_chart("Loss by lr", "lr", [point.values["lr"] for point in report.points], [1.0, 2.0, 3.0])
    assert chart is not None
    assert [label for _, label in chart.x_labels] == ["0.001", "0.01", "0.1"]


def test_a_failure_comes_with_the_next_command(tmp_path: Path) -> None:
    report = report_of(made_up_sweep(tmp_path / "mine", {"seed": [1, 2]}, failed=0))
    assert f"trainkit diagnose {report.points[0].run_dir}</code>" in render_sweep(report)
    assert "curves" not in to_json(report)["best"]


def test_many_curves_are_thinned_out_and_rows_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(made_up_sweep(tmp_path / "mine", {"seed": list(range(60))}, num_steps=5))
    assert render_sweep(report).count('class="thin"') == 2 * 39 + 2 + 1  # curves, their key and the medians
    monkeypatch.setattr(sweep_report, "MAX_ROWS", 10)
    monkeypatch.setattr(sweep_report, "OPEN_ROWS", 4)
    text = render_sweep(report)
    assert text.count('<td class="n">5<td') == 10
    assert "<summary>6 more runs</summary>" in text
    assert "50 more runs, with worse results" in text


def test_of_a_long_curve_records_from_all_parts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 100_001)) + '{"step": 9'
    )
    steps = [record.step for record in sample_records(file)]
    assert steps[0] == 1
    assert steps[-1] == 100_000
    assert len(steps) == NUM_SAMPLES
    assert steps == sorted(steps)
    assert max(after - before for before, after in itertools.pairwise(steps)) < 2000
    assert sample_records(tmp_path / "missing") == []
    os.mkfifo(tmp_path / "pipe")
    assert sample_records(tmp_path / "pipe") == []  # instead of waiting for a writer


def test_what_is_read_of_a_point_does_not_grow_with_its_curve(tmp_path: Path) -> None:
    whole = report_of(made_up_sweep(tmp_path / "short", {"seed": [1]}, num_steps=200))
    sampled = report_of(made_up_sweep(tmp_path / "long", {"seed": [1]}, num_steps=20_000))
    assert RunDir(sampled.points[0].run_dir).metrics_file.stat().st_size > 2_000_000
    assert len(sampled.points[0].curves["loss"]) <= 2 * NUM_SAMPLES
    assert sampled.points[0].step == 20_000
    assert len(whole.points[0].curves["loss"]) >= NUM_SAMPLES


def test_values_are_at_equal_distances_and_numbers_in_their_order() -> None:
    chart = dot_chart("by lr", "lr", [1e-3, 1e-4, 1e-2], [2.0, 3.0, 4.0], best=0)
    assert chart is not None
    assert [text for _, text in chart.x_labels] == ["0.0001", "0.001", "0.01"]
    assert [round(place) for place, _ in chart.x_labels] == [2, 50, 98]
    assert [color for color, _ in chart.paths] == ["thin", "c0 dot", "c0 dot", "c1 dot"]
    (place, text), *_ = dot_chart("by lr", "lr", [0.1 + 0.2], [3.0]).x_labels
    assert (place, text) == (50, "0.3")
    chart = dot_chart("by name", "name", ["sgd", True, "sgd"], [3.0, 2.0, 4.0], best=0)
    assert chart is not None
    assert chart.x_labels == [(2.0, "sgd"), (98.0, "true")]
    assert [color for color, _ in chart.paths] == ["c0 dot", "c0 dot", "c1 dot"]
    assert dot_chart("nothing", "lr", [], []) is None
