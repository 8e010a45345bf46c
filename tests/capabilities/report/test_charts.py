"""Tests of the charts of a report: axes, paths, colours and the data for the script."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence

import pytest

from trainkit.capabilities.report.charts import (
    PALETTE,
    Chart,
    Dot,
    Label,
    Line,
    base_of,
    colors_of,
    csv_command,
    dot_chart,
    line_chart,
    metric_order,
    run_charts,
    scale_of,
    viridis,
)
from trainkit.capabilities.report.plot import LIGHT_END, MAX_CROSSES, band_floor, number_places, typical

NAN = math.nan


def drawn(*curves: Sequence[tuple[float, float]], spread: Sequence[float] = ()) -> Chart:
    lines = [Line(points, PALETTE[0], f"line {n}", list(spread) or None) for n, points in enumerate(curves)]
    chart = line_chart("x", lines)
    assert chart is not None
    return chart


def texts_of(labels: Iterable[Label]) -> list[str]:
    return [label.text for label in labels]


SCALES: dict[str, tuple[list[float], list[str]]] = {
    "a decade": ([1.0, 9.6], ["0", "5", "10"]),
    "log from 50": ([1.0, 51.0], ["1", "10", "100"]),
    "not yet log": ([1.0, 49.0], ["0", "20", "40", "60"]),
    "zero is not log": ([0.0, 0.001], ["0", "0.0005", "0.0010"]),
    "negative": ([-3.0, -1.0], ["-3.0", "-2.5", "-2.0", "-1.5", "-1.0"]),
    "many decades": ([1e-08, 1.0], ["1e-8", "1e-6", "1e-4", "0.01", "1"]),
    "learning rates": ([1e-05, 0.0003], ["0", "1e-4", "2e-4", "3e-4"]),
    "thousands": ([12000.0, 19000.0], ["12k", "14k", "16k", "18k", "20k"]),
    "half thousands": ([11_000.0, 13_000.0], ["11.0k", "11.5k", "12.0k", "12.5k", "13.0k"]),
    "below 10,000": ([2000.0, 4500.0], ["2000", "3000", "4000", "5000"]),
    "millions": ([0.0, 3000000.0], ["0", "1M", "2M", "3M"]),
    "half millions": ([0.0, 1.6e6], ["0", "0.5M", "1.0M", "1.5M", "2.0M"]),
    "trillions": ([0.0, 2e12], ["0", "5e11", "1e12", "1.5e12", "2e12"]),
    "close together": ([2.30001, 2.30003], ["2.30001", "2.30002", "2.30003", "2.30004"]),
    "equal": ([2.0, 2.0], ["1.8", "2.0", "2.2"]),
    "zeros": ([0.0, 0.0], ["0", "0.5", "1.0"]),
    "huge": ([-1e300, 1e300], ["-1e300", "-5e299", "0", "5e299", "1e300"]),
    "the whole range": ([1e-299, 1e299], ["1e-200", "1e-100", "1", "1e100", "1e200"]),
    "below the range": ([1e-320, 1.0, 1e299], ["0", "5e298", "1e299"]),
    "tiny": ([0.0, 5e-324], ["0", "0.5", "1.0"]),
    "nothing": ([], ["0", "0.5", "1.0"]),
    "one": ([7.0], ["6.0", "6.5", "7.0", "7.5", "8.0"]),
}
"""Maps a kind of values to the values and the labels of their axis."""


@pytest.mark.parametrize("kind", SCALES)
def test_an_axis_has_round_numbers_around_its_values(kind: str) -> None:
    values, texts = SCALES[kind]
    scale = scale_of(values)
    labels = list(scale.labels())
    rounding = 1e-9 * (scale.high - scale.low)
    assert all(scale.low - rounding <= value <= scale.high + rounding for value in values)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in labels)
    assert 2 <= len(labels) <= 8
    assert [text for _, text in labels] == texts


def test_without_points_there_is_no_chart() -> None:
    assert line_chart("empty", []) is None
    assert line_chart("empty", [Line([], PALETTE[0])]) is None
    assert dot_chart("by key", "key", []) is None
    assert dot_chart("by key", "key", [Dot(1, None, "point"), Dot(2, None, "point")]) is None


PATHS: dict[str, tuple[list[tuple[float, float]], str, list[float]]] = {
    "a line": ([(0, 0.0), (10, 10.0)], "M0 500l2000-500", []),
    "a point": ([(5, 1.0)], "M0 250h0", []),
    "a gap": ([(0, 0.0), (5, NAN), (10, 10.0)], "M0 500h0M2000 0h0", [50.0]),
    "diverged": ([(0, 0.0), (1, 10.0), (2, NAN)], "M0 500l1000-500", [100.0]),
    "never finite": ([(0, NAN), (4, NAN)], "", [0.0]),
    "points on each other": ([(0, 0.0), (0, 0.0), (10, 10.0)], "M0 500l2000-500", []),
}


@pytest.mark.parametrize("kind", PATHS)
def test_a_line_ends_where_it_is_not_finite(kind: str) -> None:
    points, path, crosses = PATHS[kind]
    chart = drawn(points)
    assert chart.paths[0].line == path
    assert [label.place for label in chart.crosses] == crosses
    assert chart.names == []


def test_crosses_are_named_and_limited() -> None:
    points = [(step, NAN if step % 2 else 1.0) for step in range(200)]
    chart = drawn(points)
    assert len(chart.crosses) == MAX_CROSSES
    assert chart.crosses[0].text == "line 0: not finite from 1"
    assert chart.crosses[-1].place == 100.0


def test_a_spread_is_an_area_within_the_axis() -> None:
    chart = drawn([(0, 1.0), (1, 100.0), (2, NAN)], spread=[3.0, 0.0, NAN])
    assert texts_of(chart.y_labels) == ["1", "10", "100"]
    assert chart.paths[0].band == "M0 349l1000-349 0 0-1000 500z".replace(" 0 0", "")
    assert texts_of(drawn([(0, 1.0), (1, 2.0)], spread=[3.0, 0.0]).y_labels) == ["-2", "0", "2", "4"]


@pytest.mark.parametrize("kind", [int, float])
def test_the_steps_of_a_long_run_stay_exact(kind: type[float]) -> None:
    chart = drawn([(kind(1_234_567), 1.0), (kind(2_469_137), 0.5)])
    (line,) = json.loads(json.dumps(chart.data["lines"]))
    assert line["x"] == [1_234_567, 1_234_570]


def test_data_are_short_and_complete() -> None:
    chart = line_chart(
        "x",
        [Line([(10, 1.23456789), (30, NAN), (35, 2.0)], PALETTE[0], "</script>", [0.123456789, NAN, NAN])],
        [(30, "2"), (99, "3")],
    )
    assert chart is not None
    line = {
        **{"name": "</script>", "style": "--l:#0072B2;--d:#4BA3DC", "x": [10, 20, 5]},
        **{"y": [1.23457, None, 2], "spread": [0.123457, None, None]},
    }
    assert chart.data == {"title": "x", "over": "step", "marks": [[30, "2"]], "lines": [line]}
    json.dumps(chart.data, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("loss", "loss"),
        ("val_loss", "loss"),
        ("train/loss", "loss"),
        ("eval_accuracy", "accuracy"),
        ("valid.f1", "f1"),
        ("validity", "validity"),
        ("val_", "val_"),
        ("d_loss", "d_loss"),
        ("test_time_s", "time_s"),
    ],
)
def test_training_and_validation_share_a_chart(name: str, base: str) -> None:
    assert base_of(name) == base


def test_charts_of_a_run_begin_with_its_losses_and_end_with_its_memory() -> None:
    names = ["mem_gib_peak", "lr", "val_loss", "d_loss", "grad_norm", "loss"]
    names += ["acc", "val_acc", "tokens_per_s"]
    assert metric_order(names)[:4] == ["loss", "val_loss", "d_loss", "acc"]
    charts = run_charts({name: [(1, 1.0), (2, 2.0)] for name in names}, [])
    assert [chart.title for chart in charts] == [
        *("Loss", "d_loss", "acc", "Tokens per second", "Learning rate", "Gradient norm", "Peak memory (GiB)")
    ]
    assert [item.line for item in charts[0].names] == ["loss", "val_loss"]
    assert [item.line for item in charts[2].names] == ["acc", "val_acc"]


def test_many_lines_of_a_chart_differ_in_color_or_dash() -> None:
    names = [f"{part}{sign}loss" for part in ("train", "val", "eval", "test", "valid") for sign in "_/"]
    [chart] = run_charts({name: [(1, 1.0)] for name in names}, [])
    assert len({(item.style, item.kind) for item in chart.names}) == len(names)


def test_numbers_have_the_colors_of_viridis() -> None:
    import matplotlib

    for place in (0.0, 0.33, 0.5, 0.9, 1.0):
        for shown, at in zip(viridis(place), (LIGHT_END * place, 0.25 + 0.75 * place), strict=True):
            wanted = matplotlib.colormaps["viridis"](at)[:3]
            found = [int(shown[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            assert found == pytest.approx(wanted, abs=0.04)  # the table has every tenth colour


COLORS: dict[str, tuple[list[object], bool]] = {
    "numbers": ([1, 2.5, 4], True),
    "numbers as text": (["1e-4", "0.01", "1"], True),
    "names": (["adamw", "sgd", "adamw"], False),
    "mixed": ([0.1, "auto"], False),
    "nan": (["nan", 1.0], False),
    "switches": ([True, False], False),
    "nothing": ([None, 1], False),
    "lists": ([[0.9, 0.95], [0.9, 0.99]], False),
    "beyond a float": ([10**400, 1], False),
    "negative": ([-1, 0, 1], True),
}


@pytest.mark.parametrize("kind", COLORS)
def test_colors_follow_the_values(kind: str) -> None:
    values, are_numbers = COLORS[kind]
    colors = colors_of(values)
    assert len(colors) == len(values)
    assert (colors[0] not in PALETTE) == are_numbers
    for (a, one), (b, other) in itertools.combinations(zip(values, colors, strict=True), 2):
        assert (one == other) == (a == b)


def dots(values: Sequence[object], results: Sequence[float | None], best: int = -1) -> Chart:
    pairs = enumerate(zip(values, results, strict=True))
    points = [Dot(value, result, f"point {n}", n == best) for n, (value, result) in pairs]
    chart = dot_chart("by key", "key", points)
    assert chart is not None
    return chart


def test_values_are_at_equal_distances_and_numbers_in_their_order() -> None:
    chart = dots([1e-3, 1e-4, 1e-2], [2.0, 3.0, 4.0], best=0)
    assert texts_of(chart.x_labels) == ["0.0001", "0.001", "0.01"]
    assert [round(label.place) for label in chart.x_labels] == [8, 50, 92]
    assert [item.kind for item in chart.paths] == ["median", "big dot", "big dot", "big dot"]
    assert chart.paths[-1].style != chart.paths[1].style  # the best dot covers the others
    long = dots([0.1 + 0.2], [3.0])
    assert [(label.place, label.text) for label in long.x_labels] == [(50, "0.3")]
    named = dots(["sgd", True, "sgd"], [3.0, 2.0, 4.0])
    assert [(label.place, label.text) for label in named.x_labels] == [(8.0, "sgd"), (92.0, "true")]


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (["0.1", "0.01", "1e-4"], ["1e-4", "0.01", "0.1"]),
        (["b", "a"], ["b", "a"]),
        (["auto", 3, "1"], ["1", "3", "auto"]),
        ([None, 2], ["2", "null"]),
        ([-1, -10, 0], ["-10", "-1", "0"]),
        (["10", "9"], ["9", "10"]),
    ],
)
def test_numbers_are_in_order_also_as_text(values: list[object], order: list[str]) -> None:
    chart = dots(values, [1.0 + index for index in range(len(values))])
    assert texts_of(chart.x_labels) == order


def test_a_run_that_diverged_is_a_cross_at_its_value() -> None:
    chart = dots([0.01, 0.1, 0.3], [1.0, 2.0, None])
    assert [(label.place, label.text) for label in chart.crosses] == [(92.0, "point 2: diverged")]
    assert texts_of(chart.x_labels) == ["0.01", "0.1", "0.3"]


MANY = [f"own_{number}" for number in range(30)]


@pytest.mark.parametrize(
    ("folder", "metrics", "command"),
    [
        ("/runs/a b", ["loss"], "trainkit compare '/runs/a b' --curves loss --csv curves.csv"),
        ("/r", ["x;rm -rf", "a,b"], "trainkit compare /r --curves 'x;rm -rf' --csv curves.csv"),
        ("/r", ["lr", "loss", "lr"], "trainkit compare /r --curves loss,lr --csv curves.csv"),
        ("/r", MANY, f"trainkit compare /r --curves {','.join(MANY)} --csv curves.csv"),
    ],
)
def test_the_command_for_all_points_can_be_pasted(folder: str, metrics: list[str], command: str) -> None:
    assert csv_command(folder, metrics) == command


OUTLIERS: dict[str, tuple[list[float], list[float]]] = {
    "one huge": ([2.0, 2.1, 1.9, 2.2, 1e32], [1.9, 2.0, 2.1, 2.2]),
    "one huge and negative": ([2.0, 2.1, 1.9, 2.2, -1e32], [1.9, 2.0, 2.1, 2.2]),
    "a first loss": ([900.0, 3.0, 2.5, 2.2, 2.1, 2.0], [2.0, 2.1, 2.2, 2.5, 3.0, 900.0]),
    "many decades": ([1e-8, 1e-6, 1e-4, 1e-2, 1.0], [1e-8, 1e-6, 1e-4, 1e-2, 1.0]),
    "zeros and a first loss": (
        [0.9, 1e-5, 0.0, 2e-5, 1e-5, 0.0, 1e-5],
        [0.0, 0.0, 1e-5, 1e-5, 1e-5, 2e-5, 0.9],
    ),
    "a likelihood": (
        [-1e7, -130.0, -121.0, -120.0, -119.0, -118.0],
        [-1e7, -130.0, -121.0, -120.0, -119.0, -118.0],
    ),
    "negative and one huge": ([-1e32, -2.0, -3.0, -2.5, -2.2, -2.1], [-3.0, -2.5, -2.2, -2.1, -2.0]),
    "both signs": ([-1.0, 1.0, 2.0, -2.0, 1e9, 0.5], [-2.0, -1.0, 0.5, 1.0, 2.0]),
    "few": ([1.0, 1e32], [1.0, 1e32]),
    "a rare count": ([0.0, 0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0, 5.0]),
    "not finite": ([NAN, math.inf, 1.0, -math.inf], [1.0]),
}
"""Maps a kind of values to the values, and to the subset that fits on the axis."""


@pytest.mark.parametrize("kind", OUTLIERS)
def test_an_axis_has_no_room_for_an_outlier(kind: str) -> None:
    values, shown = OUTLIERS[kind]
    assert typical(values) == shown


@pytest.mark.parametrize(
    ("outlier", "is_low", "text"),
    [
        (1e32, False, "line 0: 1e+32 at 3"),
        (-1e32, True, "line 0: -1e+32 at 3"),
        (math.inf, False, "line 0: not finite from 3"),
        (-math.inf, True, "line 0: not finite from 3"),
        (NAN, False, "line 0: not finite from 3"),
    ],
)
def test_an_outlier_is_a_cross_at_its_edge(outlier: float, is_low: bool, text: str) -> None:
    chart = drawn([(1, 2.0), (2, 2.1), (3, outlier), (4, 1.9), (5, 2.2), (6, 2.0), (7, 2.1)])
    assert [(label.text, label.is_low) for label in chart.crosses] == [(text, is_low)]
    assert {float(label.text) for label in chart.y_labels} <= {1.8, 1.9, 2.0, 2.1, 2.2}
    assert chart.paths[0].line.count("M") == 2
    json.dumps(chart.data, allow_nan=False)


def test_a_band_below_zero_ends_at_the_smallest_value_of_a_logarithmic_axis() -> None:
    chart = drawn([(0, 1.0), (1, 90.0), (2, 3.0)], spread=[0.5, 0.0, 4.0])
    assert [round(label.place) for label in chart.y_labels] == [87, 43, 0]  # the axis begins at 0.5
    assert band_floor(1.0, [0.5, 90.0, -1.0]) == 0.5
    assert band_floor(1.0, [0.05, -1.0]) == 1.0


def test_a_result_far_from_the_others_is_a_cross() -> None:
    chart = dots([1, 2, 3, 4, 5], [2.0, 2.1, -1e32, 2.2, 1.9])
    assert [(label.text, label.is_low) for label in chart.crosses] == [("point 2: -1e+32", True)]
    assert {float(label.text) for label in chart.y_labels} <= {1.8, 1.9, 2.0, 2.1, 2.2}


@pytest.mark.parametrize("values", [[1e-4, 1e-3, 1e-1], [1, 2, 10], ["1e-4", "0.01"]])
def test_a_report_has_the_colors_of_a_figure(values: list[object]) -> None:
    numbers = [float(str(value)) for value in values]
    places = number_places(numbers)
    assert places is not None
    assert colors_of(values) == [viridis(place) for place in places]


PLACES: dict[str, tuple[list[float], list[float]]] = {
    "few": ([1e-3, 3e-3, 1e-2], [0.0, 0.5, 1.0]),
    "few, repeated and unordered": ([4, 0, 4, -1], [1.0, 0.5, 1.0, 0.0]),
    "one": ([3, 3], [0.5, 0.5]),
    "many within a decade": ([1, *range(2, 9), 9.5], [0.0, *((n - 1) / 8.5 for n in range(2, 9)), 1.0]),
    "many over a decade": ([2**n for n in range(9)], [n / 8 for n in range(9)]),
    "many with zero": ([0, *(2**n for n in range(9))], [0.0, *(2**n / 256 for n in range(9))]),
}


@pytest.mark.parametrize("kind", PLACES)
def test_few_numbers_have_evenly_spaced_colors(kind: str) -> None:
    values, places = PLACES[kind]
    assert number_places(values) == pytest.approx(places)


def test_the_chart_of_a_metric_can_be_the_first() -> None:
    names = ["lr", "val_loss", "loss", "acc"]
    assert metric_order(names, "acc") == ["acc", "loss", "val_loss", "lr"]
    charts = run_charts({name: [(1, 1.0), (2, 2.0)] for name in names}, [], first="val_loss")
    assert [chart.title for chart in charts] == ["Loss", "acc", "Learning rate"]
