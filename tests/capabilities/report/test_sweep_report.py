"""Tests of the report of a sweep on made-up run folders."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.sweeps import made_up_sweep
from trainkit.capabilities.report import sweep_report
from trainkit.capabilities.report.charts import Chart
from trainkit.capabilities.report.page import result_figure
from trainkit.capabilities.report.sweep_report import (
    NUM_SAMPLES,
    SweepReport,
    _curve_charts,
    _key_charts,
    read_sweep,
    render_sweep,
    sample_records,
)
from trainkit.capabilities.report.thinned import MAX_BUCKETS
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
    assert next((trial.index, trial.state, trial.step) for trial in report.trials) == (2, "unknown", None)
    text = render_sweep(report)
    assert text.count('<tr><td class="n">') == 3


def test_the_page_names_the_best_and_is_escaped(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"data.source": ["<script>alert(1)</script>", "b.txt"]})
    text = render_sweep(report_of(group))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "\\u003cscript\\u003ealert(1)" in text  # in the data of a chart
    assert "trainkit submit mine.yaml --sweep &#39;a b=1,2&#39;" in text
    assert "Best validation loss: 2.05" in text


def test_numbers_that_are_written_as_text_are_in_their_order(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"lr": ["0.1", "0.01", "1e-3"]})
    report = report_of(group)
    values = {trial.index: (trial.values["lr"], trial.texts(["lr"])) for trial in report.trials}
    assert values == {0: (0.1, ["0.1"]), 1: (0.01, ["0.01"]), 2: (0.001, ["1e-3"])}
    assert {trial["values"]["lr"] for trial in report.to_dict()["points"]} == {0.1, 0.01, 0.001}
    text = render_sweep(report)
    assert "<td>1e-3<td>" in text
    [chart] = _key_charts(report, ["lr"])
    assert [label.text for label in chart.x_labels] == ["0.001", "0.01", "0.1"]


def test_the_speed_of_tasks_whose_losses_count_samples_is_in_samples(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"seed": [1, 2]})
    for index in (0, 1):
        file = group.run(index).metrics_file
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert "Tokens/s" in render_sweep(report_of(group))  # until every run counts samples
        counted = ({**record, "tokens": 4 * record["step"]} for record in records)
        file.write_text("".join(json.dumps({**one, "samples_seen": one["tokens"]}) + "\n" for one in counted))
    text = render_sweep(report_of(group))
    assert "Samples/s" in text
    assert "Samples per second" in text
    assert "okens" not in text.partition("<h2>Config")[0].replace("tokens_per_s", "")


def test_runs_of_a_script_without_a_speed_have_no_column_of_it(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"seed": [1, 2]})
    for index in (0, 1):
        group.run(index).metrics_file.write_text('{"step": 1, "loss": 2.0}\n')
    assert "okens/s" not in render_sweep(report_of(group))


@pytest.mark.parametrize(
    ("value", "text"), [(None, "unknown"), (2.10449, "2.1045"), (123456.7, "123,457"), (1e300, "1e+300")]
)
def test_a_result_has_its_digits(value: float | None, text: str) -> None:
    assert result_figure(value) == text


def test_a_secret_is_masked_before_its_text_is_shortened(tmp_path: Path) -> None:
    keys = ["sk-0123456789abcdefghijkl", "sk-abcdefghij0123456789"]
    text = render_sweep(report_of(made_up_sweep(tmp_path / "mine", {"api_key": keys})))
    assert "sk-0" not in text
    assert "sk-a" not in text


def test_a_secret_is_masked_by_the_name_of_its_key(tmp_path: Path) -> None:
    report = report_of(made_up_sweep(tmp_path / "mine", {"api_key": ["hunter2abc", "hunter2def"]}))
    text = render_sweep(replace(report, config={"launch.env.API_KEY": "hunter2ghi"}))
    assert "hunter2" not in text
    assert "<td>***<td>" in text
    assert "<td>launch.env.API_KEY<td>***" in text
    for trial in report.trials:
        assert trial.texts(["api_key"]) == ["***"]
        assert str(trial) == f"trial {trial.index} (api_key=***)"


def test_a_failure_comes_with_the_next_command(tmp_path: Path) -> None:
    report = report_of(made_up_sweep(tmp_path / "mine", {"seed": [1, 2]}, failed=0))
    assert f"trainkit diagnose {report.trials[0].run_dir}</code>" in render_sweep(report)
    assert "curves" not in to_json(report)["best"]


def test_many_curves_are_thinned_out_and_rows_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = {"optimizer.lr": [index / 1000 for index in range(1, 61)]}
    report = report_of(made_up_sweep(tmp_path / "mine", axes, num_steps=5))
    text = render_sweep(report)
    assert text.count('<button type="button" class="key') == len(report.curves) == 40
    assert "40 best of 60 lines" in text
    monkeypatch.setattr(sweep_report, "MAX_ROWS", 10)
    monkeypatch.setattr(sweep_report, "OPEN_ROWS", 4)
    text = render_sweep(report)
    assert text.count('<td class="n">5<td') == 10
    assert "<summary>6 more runs</summary>" in text
    assert "50 more runs" in text


def test_of_a_long_curve_records_from_all_parts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = (f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 20_001))
    file.write_text("".join(lines) + '{"step": 9')
    steps = [record.step for record in sample_records(file)]
    assert steps[0] == 1
    assert steps[-1] == 20_000
    assert len(steps) == NUM_SAMPLES
    assert steps == sorted(steps)
    assert max(after - before for before, after in itertools.pairwise(steps)) < 400
    assert sample_records(tmp_path / "missing") == []
    os.mkfifo(tmp_path / "pipe")
    assert sample_records(tmp_path / "pipe") == []  # instead of waiting for a writer


def test_what_is_read_of_a_point_does_not_grow_with_its_curve(tmp_path: Path) -> None:
    whole = report_of(made_up_sweep(tmp_path / "short", {"seed": [1]}, num_steps=200))
    sampled = report_of(made_up_sweep(tmp_path / "long", {"seed": [1]}, num_steps=20_000))
    assert RunDir(sampled.trials[0].run_dir).metrics_file.stat().st_size > 2_000_000
    assert len(sampled.curves[0].points("loss")) <= 2 * MAX_BUCKETS
    assert sampled.trials[0].step == 20_000
    assert len(whole.curves[0].points("loss")) == 200


def write_metrics(run: RunDir, values: dict[str, list[float | None]]) -> None:
    """Replace the metrics of a run with a value of each metric per step."""
    rows = zip(*values.values(), strict=True)
    records = [
        {"step": step, "attempt": 1, "time": "2026-01-01T00:00:20Z", **dict(zip(values, row, strict=True))}
        for step, row in enumerate(rows, 1)
    ]
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_runs_that_differ_in_their_seeds_are_one_line(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"optimizer.lr": [0.1, 0.01], "seed": [1, 2, 3]}, num_steps=3)
    for index in range(6):
        write_metrics(group.run(index), {"loss": [3.0, 2.0 + index % 3, 1.0], "d_loss": [1.0, -1.0, 0.5]})
    report = report_of(group)
    charts, names = _curve_charts(report)
    assert [chart.title for chart in charts] == ["Loss", "d_loss"]
    assert [item.line for item in names] == ["lr=0.01", "lr=0.1"]
    lines = data_of(charts[0])
    assert [line["y"] for line in lines] == [[3, 3, 1]] * 2
    assert [line["spread"] for line in lines] == [[0, 1, 0]] * 2
    assert "only in their seeds" in render_sweep(report)


def test_the_page_says_how_many_runs_have_diverged(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"seed": [1, 2]}, num_steps=2)
    write_metrics(group.run(0), {"loss": [1.0, None]})
    assert "finished, 1 of them diverged." in render_sweep(report_of(group))
    write_metrics(group.run(1), {"loss": [1.0, None]})
    assert "no results yet" in render_sweep(report_of(group))


def data_of(chart: Chart) -> list[dict[str, Any]]:
    lines: Any = chart.data["lines"]
    return list(lines)


LINES: dict[str, tuple[list[dict[str, list[float | None]]], list[list[float | None]]]] = {
    "one diverges": ([{"loss": [1, None]}, {"loss": [2, 1]}], [[1, None], [2, 1]]),
    "one has no metrics": ([{}, {"loss": [2, 1]}], [[2, 1]]),
    "one has another metric": ([{"acc": [0, 1]}, {"loss": [2, 1]}], [[2, 1]]),
    "one step only": ([{"loss": [5]}, {"loss": [4]}], [[5], [4]]),
    "never finite": ([{"loss": [None, None]}, {"loss": [2, 1]}], [[None, None], [2, 1]]),
    "negative": ([{"loss": [-5, -6]}, {"loss": [4, 3]}], [[-5, -6], [4, 3]]),
    "of other lengths": ([{"loss": [5, 4, 3]}, {"loss": [4]}], [[5, 4, 3], [4]]),
}
"""Maps a kind of sweep to the metrics of each run, and to the lines of the chart of the loss."""


@pytest.mark.parametrize("kind", LINES)
def test_any_runs_are_drawn_together(tmp_path: Path, kind: str) -> None:
    logged, wanted = LINES[kind]
    group = made_up_sweep(tmp_path / "mine", {"optimizer.lr": [0.1, 0.2]}, num_steps=2)
    for index, values in enumerate(logged):
        write_metrics(group.run(index), values)
    report = report_of(group)
    [chart] = [chart for chart in _curve_charts(report)[0] if chart.title == "Loss"]
    assert [line["y"] for line in data_of(chart)] == wanted
    assert render_sweep(report)


def test_a_seed_that_diverges_ends_the_mean_of_its_trial(tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"seed": [1, 2]}, num_steps=3)
    write_metrics(group.run(0), {"loss": [3.0, 2.0, 1.0]})
    write_metrics(group.run(1), {"loss": [3.0, None, None]})
    charts, names = _curve_charts(report_of(group))
    assert [line["y"] for line in data_of(charts[0])] == [[3, None]]
    assert len(charts[0].crosses) == 1
    assert names == []


@pytest.mark.parametrize(
    ("axes", "kinds"),
    [
        ({"optimizer.lr": [0.1, 0.2]}, ["", ""]),
        ({"optimizer.lr": [0.1, 0.2], "optimizer.name": ["adamw", "sgd"]}, ["", "d1", "", "d1"]),
        ({"optimizer.name": ["a", "b", "c"]}, ["", "", ""]),
    ],
)
def test_a_color_is_one_key_and_a_dash_the_others(
    tmp_path: Path, axes: dict[str, list[Any]], kinds: list[str]
) -> None:
    _, names = _curve_charts(report_of(made_up_sweep(tmp_path / "mine", axes, num_steps=2)))
    assert [item.kind.replace("best", "").strip() for item in names] == kinds
    assert sum("best" in item.kind for item in names) == 1
    assert len({item.style for item in names}) == len(next(iter(axes.values())))
