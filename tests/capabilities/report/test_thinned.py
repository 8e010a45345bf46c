"""Tests that a curve has the right buckets of steps, whatever its file contains."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.capabilities.report import thinned
from trainkit.capabilities.report.thinned import (
    MAX_BUCKETS,
    MAX_METRICS,
    Thinned,
    Wanted,
    joined,
    read_all,
    read_thinned,
)

NAN = math.nan
FOLDER = Path("run")


def of(records: list[dict[str, Any]], most: int = MAX_BUCKETS) -> Thinned:
    found = Thinned(most)
    found.add(records)
    return found


def curve(values: list[Any]) -> list[dict[str, Any]]:
    return [{"step": step, "time": "2026-01-01T00:00:00Z", "x": value} for step, value in enumerate(values)]


HUGE = 10**400
CURVES: dict[str, tuple[list[Any], list[tuple[float, float]]]] = {
    "none": ([], []),
    "one": ([3.0], [(0, 3.0)]),
    "integers and floats": ([1, 2.5, -3], [(0, 1), (1, 2.5), (2, -3)]),
    "negative": ([-1.0, -2.0], [(0, -1.0), (1, -2.0)]),
    "null within": ([1.0, None, 2.0], [(0, 1.0), (1, NAN), (2, 2.0)]),
    "null at the end": ([1.0, None, None], [(0, 1.0), (1, NAN), (2, NAN)]),
    "infinite": ([1.0, math.inf, -math.inf], [(0, 1.0), (1, NAN), (2, -math.inf)]),
    "beyond a float": ([1.0, HUGE, -HUGE], [(0, 1.0), (1, NAN), (2, -math.inf)]),
    "beyond what is drawn": ([1.0, 1e305], [(0, 1.0), (1, NAN)]),
    "texts": (["a", "b"], []),
    "a text within": ([1.0, "a", 2.0], [(0, 1.0), (2, 2.0)]),
    "switches": ([True, False], []),
    "lists and objects": ([[1], {"a": 1}, 2.0], [(2, 2.0)]),
    "zeros": ([0.0, -0.0], [(0, 0.0), (1, -0.0)]),
    "tiny": ([5e-324, 1e-310], [(0, 5e-324), (1, 1e-310)]),
}
"""Maps a kind of values to the values and the points of their curve."""


@pytest.mark.parametrize("kind", CURVES)
def test_a_short_curve_has_all_of_its_points(kind: str) -> None:
    values, points = CURVES[kind]
    assert repr(of(curve(values)).points("x")) == repr(points)


@pytest.mark.parametrize(
    ("name", "values", "is_shown"),
    [
        ("mfu", [None, None], False),
        ("mfu", [None, 0.5], True),
        ("loss", [None, None], True),
        ("d_loss", [None], True),
        ("host", ["a"], False),
        ("tokens", [1, 2], False),
        ("epoch", [1, 2], False),
        ("épreuve/точность", [0.5], True),
        ("</script>", [0.5], True),
    ],
)
def test_what_was_never_measured_is_no_metric(name: str, values: list[Any], is_shown: bool) -> None:
    found = of([{"step": step, name: value} for step, value in enumerate(values)])
    assert (name in found.names) == is_shown


def test_a_spike_and_a_gap_stay_in_a_long_curve() -> None:
    values: list[Any] = [2.0 + step % 7 for step in range(50_000)]
    values[30_001], values[23_333] = 99.0, None
    found = of(curve(values))
    points = found.points("x")
    assert (30_001, 99.0) in points
    assert [step for step, value in points if math.isnan(value)] == [23_333]
    assert MAX_BUCKETS < len(points) <= 2 * MAX_BUCKETS + 1
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert found.width == 128


@pytest.mark.parametrize("parts", [1, 7, 100])
def test_the_buckets_do_not_depend_on_how_records_arrive(parts: int) -> None:
    records = curve([math.sin(step / 50) for step in range(5000)])
    found = Thinned(64)
    size = len(records) // parts + 1
    for begin in range(0, len(records), size):
        found.add(records[begin : begin + size])
    whole = of(records, 64)
    assert found.points("x") == whole.points("x")
    assert [value for _, value in found.means("x").values()] == pytest.approx(
        [value for _, value in whole.means("x").values()]
    )
    assert len(found.means("x")) <= 64


STEPS = {
    "backwards": [5, 4, 3, 2, 1],
    "negative": [-10, -5, 0, 5],
    "repeated": [1, 1, 1, 2],
    "far apart": [0, 2**52, 7],
    "seldom": [*range(0, 10**9, 10**6)],
    "computed again": [*range(1000), *range(500, 1500)],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_any_steps_give_a_curve_in_order(steps: list[int]) -> None:
    found = of([{"step": step, "x": 1.0 * step} for step in steps])
    points = found.points("x")
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert {min(steps), max(steps)} <= {int(step) for step, _ in points}
    assert len(points) <= 2 * MAX_BUCKETS


def test_of_a_step_that_is_logged_twice_the_newest_value_counts() -> None:
    found = of([{"step": 1, "x": 5.0}, {"step": 1, "y": 1.0}, {"step": 1, "x": 4.0}])
    assert found.points("x") == [(1, 4.0)]
    assert found.points("y") == [(1, 1.0)]


def test_of_a_thousand_metrics_some_are_kept() -> None:
    found = of([{"step": step, **{f"m{n}": 1.0 * n for n in range(1000)}} for step in range(3)])
    assert found.names == [f"m{n}" for n in range(MAX_METRICS)]


def write(run: Path, *lines: str, events: str = "") -> Wanted:
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(lines))
    if events:
        (run / "events.jsonl").write_text(events)
    return Wanted(str(run), {1: 2, 2: math.inf}, MAX_BUCKETS, 2**20)


def line(step: object, attempt: object = 1, **values: object) -> str:
    return json.dumps({"step": step, "attempt": attempt, **values}) + "\n"


FILES: dict[str, tuple[tuple[str, ...], list[tuple[float, float]]]] = {
    "empty": ((), []),
    "a step computed again": (
        (line(1, loss=3), line(2, loss=2), line(3, loss=9), line(3, 2, loss=1)),
        [(1, 3), (2, 2), (3, 1)],
    ),
    "an unfinished last line": ((line(1, loss=3), '{"step": 2, "loss": 7'), [(1, 3)]),
    "a damaged line": ((line(1, loss=3), "\x00\x00}{\n", line(2, loss=2)), [(1, 3), (2, 2)]),
    "no attempt": ((line(1, None, loss=3), '{"step": 9, "loss": 2}\n'), [(1, 3), (9, 2)]),
    "an attempt that is none": ((line(1, "x", loss=3), line(2, [1], loss=2)), [(1, 3), (2, 2)]),
    "a step that is none": (
        (line("1", loss=3), line(True, loss=3), line(1.5, loss=3), line(2, loss=2)),
        [(2, 2)],
    ),
    "a step beyond what a browser counts": ((line(2**53, loss=3), line(2, loss=2)), [(2, 2)]),
    "NaN as Python writes it": (('{"step": 1, "attempt": 1, "loss": NaN}\n',), [(1, NAN)]),
    "no object": (("[1, 2]\n", "3\n", line(1, loss=1)), [(1, 1)]),
    "half of a surrogate pair": (('{"step": 1, "attempt": 1, "loss": 1, "\\ud800": 2}\n',), [(1, 1)]),
    "records that share a line": (
        ('{"step": 1, "loss": 1}, {"step": 2, "loss": 2}\n', line(3, 2, loss=3)),
        [(3, 3)],
    ),
    "nested too deeply": (("[" * 100_000 + "\n", line(1, loss=1)), [(1, 1)]),
    "no metric": ((line(1), line(2)), []),
}


@pytest.mark.parametrize("kind", FILES)
def test_any_file_is_read(tmp_path: Path, kind: str) -> None:
    lines, points = FILES[kind]
    found = read_thinned(write(tmp_path / "run", *lines))
    assert repr(found.points("loss")) == repr(points)
    "".join(found.names).encode()


def test_a_run_without_a_file_and_one_with_a_pipe_have_no_metrics(tmp_path: Path) -> None:
    assert read_thinned(Wanted(str(tmp_path / "none"), {}, 9, 9)).names == []
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_thinned(Wanted(str(tmp_path), {}, 9, 9)).names == []


def test_the_validations_of_a_command_are_among_its_events(tmp_path: Path) -> None:
    events = '{"event": "evaluated", "attempt": 1, "step": 2, "val_loss": 4.0}\n'
    events += (
        '{"event": "evaluated", "attempt": 1, "step": 3, "val_loss": 5.0}\n{"event": "started", "step": 1}\n'
    )
    found = read_thinned(write(tmp_path / "script", line(1, loss=3), events=events))
    assert found.points("val_loss") == [(2, 4.0)]  # the other value was computed again
    trained = read_thinned(write(tmp_path / "trained", line(1, val_loss=1), events=events))
    assert trained.points("val_loss") == [(1, 1)]


def test_of_a_large_file_evenly_spaced_parts_are_read(tmp_path: Path) -> None:
    count = 20_000
    wanted = write(tmp_path / "run", *(line(step, 2, loss=1.0 * step) for step in range(count)))
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    part = read_thinned(Wanted(wanted.folder, {}, MAX_BUCKETS, size // 4))
    points = part.points("loss")
    assert (points[0][0], points[-1][0]) == (0, count - 1)
    assert max(b[0] - a[0] for a, b in itertools.pairwise(points)) < count / 100


def test_processes_read_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [write(tmp_path / str(index), line(1, loss=index)) for index in range(3)]
    alone = [one.points("loss") for one in read_all(wanted, 0)]
    monkeypatch.setattr(thinned.os, "sched_getaffinity", lambda _: {0, 1})
    assert [one.points("loss") for one in read_all(wanted, 2**30)] == alone == [[(1, 0)], [(1, 1)], [(1, 2)]]


def test_attempts_are_one_curve() -> None:
    first, second = of([{"step": 1, "x": 3}, {"step": 2, "x": 2}]), of([{"step": 3, "x": 1, "y": 0}])
    assert joined([first, second]) == {"x": [(1, 3), (2, 2), (3, 1)], "y": [(3, 0)]}
