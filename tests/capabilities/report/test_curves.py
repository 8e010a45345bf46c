"""Tests of `trainkit.curves` and its figures on made-up run folders."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from numpy import asarray

from tests.support.sweeps import made_up_sweep, stamp
from trainkit.capabilities.report.curves import curves
from trainkit.capabilities.report.plot import (
    COLORS,
    DrawnRun,
    Series,
    _num_columns,
    draw,
    labels_of,
    save,
    smoothed,
)
from trainkit.cli.main import main
from trainkit.errors import UsageError
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir

LR = "optimizer.lr"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunGroup:
    """Create a sweep of two learning rates with three seeds each."""
    monkeypatch.chdir(tmp_path)
    group = made_up_sweep(tmp_path / "mine", {LR: [1e-4, 1e-2], "seed": [0, 1, 2]})
    for index, trial in group.trials.items():
        config = group.run(index).config_file
        text = config.read_text().replace("seed: 0\n", f"seed: {trial.values['seed']}\n")
        config.write_text(text.replace("lr: 0.0003\n", f"lr: {trial.values[LR]}\n"))
    return group


def log(run: RunDir, records: Sequence[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(one) + "\n" for one in records)
    run.metrics_file.write_text(text.replace("Infinity", "1e999"))


def losses(*values: object) -> list[Mapping[str, object]]:
    """Return a record per value, of the steps from 1."""
    return [step(n, n, loss=value) for n, value in enumerate(values, start=1)]


def xs(line: Line2D) -> list[float]:
    found: list[float] = asarray(line.get_xdata()).tolist()
    return found


def step(number: int, seconds: float, attempt: int = 1, **values: object) -> Mapping[str, object]:
    return {"step": number, "time": stamp(seconds), "attempt": attempt, **values}


def test_a_table_has_a_row_per_step_and_the_keys_that_differ(sweep: RunGroup) -> None:
    table = curves("mine", metrics=["loss", "grad_norm"])
    assert list(table) == [*("run", LR, "seed", "step", "tokens", "time_s", "gpu_hours", "loss", "grad_norm")]
    assert table.num_rows == 6 * 20
    last = [row for row in table.rows() if row["run"] == "4"][-1]
    assert (last[LR], last["seed"], last["step"], last["time_s"]) == (1e-2, 1, 20, 40.0)
    assert last["gpu_hours"] is None  # neither a plan nor an event has the number of ranks
    assert last["loss"] == pytest.approx(2.0 + 0.05 + 3 * math.exp(-4))


def test_runs_are_named_by_name_folder_or_object(sweep: RunGroup) -> None:
    class Started:
        path = sweep.run(1).path

    table = curves("mine/0", sweep.run(0).path, Started())
    assert dict.fromkeys(table["run"]) == dict.fromkeys(["0", "1"])
    assert table.keys_that_differ == ("seed",)


def test_a_step_that_was_computed_again_is_one_row_and_takes_time_twice(sweep: RunGroup) -> None:
    run = sweep.run(0)
    events = [
        {"time": stamp(0), "attempt": 1, "event": "started", "world_size": 2},
        {"time": stamp(10), "attempt": 1, "event": "training", "step": 0},
        {"time": stamp(100), "attempt": 2, "event": "started", "world_size": 4},
        {"time": stamp(110), "attempt": 2, "event": "training", "step": 2},
    ]
    run.events_file.write_text("".join(json.dumps(one) + "\n" for one in events))
    first = [step(number, 10 + 10 * number, loss=float(number)) for number in (1, 2, 3, 4)]
    log(run, [*first, *(step(number, 110 + 5 * number, 2, loss=10.0 * number) for number in (3,))])
    table = curves("mine/0")
    assert table["step"] == [1, 2, 3]  # the run lost the fourth step
    assert table["loss"] == [1.0, 2.0, 30.0]
    assert table["time_s"] == [10.0, 20.0, 40.0 + 15.0]
    assert table["gpu_hours"][-1] == pytest.approx((40 * 2 + 15 * 4) / 3600)


def test_what_was_not_logged_differs_from_what_is_not_finite(sweep: RunGroup) -> None:
    log(sweep.run(0), [step(1, 20, loss=1.0, val_loss=None), step(2, 30, loss=None)])
    table = curves("mine/0", metrics=["loss", "val_loss"])
    assert table["loss"][0] == 1.0
    assert math.isnan(table["loss"][1])
    assert math.isnan(table["val_loss"][0])
    assert table["val_loss"][1] is None


def test_a_metric_of_ones_own_is_a_column(sweep: RunGroup) -> None:
    log(sweep.run(0), [step(1, 20, d_loss=0.5)])
    assert curves("mine/0", metrics=["d_loss"])["d_loss"] == [0.5]


@pytest.mark.parametrize(
    ("metrics", "keys", "message", "hint"),
    [
        (["los"], None, "no run has logged los", "loss"),
        (["loss"], ["optimizer.l"], "no run has the key optimizer.l", LR),
    ],
)
def test_what_no_run_has_is_refused(
    sweep: RunGroup, metrics: list[str], keys: list[str] | None, message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        curves("mine", metrics=metrics, keys=keys)
    assert refused.value.message == message
    assert hint in str(refused.value.hint)


def test_a_csv_reads_back(sweep: RunGroup) -> None:
    table = curves("mine")
    stream = io.StringIO()
    table.write_csv(stream)
    found = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert len(found) == table.num_rows
    assert [float(row["loss"]) for row in found] == table["loss"]
    assert {row[LR] for row in found} == {"0.0001", "0.01"}


def test_a_line_per_value_is_the_mean_over_seeds(sweep: RunGroup) -> None:
    table = curves("mine")
    (axes,) = table.plot().axes
    assert len(axes.lines) == 2
    assert len(axes.collections) == 2  # their spread
    found = zip(table["step"], table[LR], table["loss"], strict=True)
    at_end = [loss for step, lr, loss in found if (step, lr) == (20, 1e-4)]
    assert asarray(axes.lines[0].get_ydata()).tolist()[-1] == pytest.approx(sum(at_end) / 3)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "training loss")
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["lr=0.0001", "lr=0.01"]


def test_a_user_saves_the_file_of_the_command(sweep: RunGroup, tmp_path: Path) -> None:
    for kind in ("pdf", "svg", "png"):
        file = tmp_path / f"a.{kind}"
        assert main(["compare", "mine", "--plot", str(file)]) == 0
        curves("mine").plot().savefig(tmp_path / f"b.{kind}")
        assert file.read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
        with pytest.raises(FileExistsError):
            save(curves("mine").plot(), file)
    content = (tmp_path / "b.pdf").read_bytes()
    assert b"/CIDFontType2" in content  # TrueType
    assert b"/Type3" not in content
    curves("mine").plot().savefig(tmp_path / "c.pdf", metadata={"Title": "mine"}, dpi=100)
    content = (tmp_path / "c.pdf").read_bytes()
    assert b"/Title (mine)" in content
    assert b"CreationDate" not in content


def test_what_a_user_adds_has_the_size_of_the_figure(sweep: RunGroup) -> None:
    figure = curves("mine").plot(smooth=0.5)
    (axes,) = figure.axes
    sizes = [text.get_fontsize() for text in (axes.set_title("mine"), figure.suptitle("mine"))]
    assert sizes == [axes.xaxis.label.get_fontsize()] * 2 == [8.0, 8.0]
    assert figure.legends[0].get_title().get_fontsize() == 7.0
    figure.draw_without_rendering()  # creates the ticks
    assert {text.get_fontsize() for text in (*axes.get_xticklabels(), *axes.get_yticklabels())} == {7.0}
    for legend in (axes.legend(), figure.legend()):
        assert [text.get_text() for text in legend.get_texts()] == ["lr=0.0001", "lr=0.01"]
        assert {text.get_fontsize() for text in legend.get_texts()} == {7.0}
        assert [one.get_linewidth() for one in legend.get_lines()] == [1.2, 1.2]  # not the original values
    only = axes.legend(handles=axes.lines[:1], loc="upper right")
    assert [text.get_text() for text in only.get_texts()] == ["lr=0.0001"]


def test_a_line_its_band_and_its_legend_entry_are_found_by_their_name(sweep: RunGroup) -> None:
    log(sweep.run(0), losses(1.0, 1.0, 1.0, None))
    figure = curves("mine", metrics=["loss", "grad_norm"]).plot(smooth=0.5)
    for artist in figure.findobj(lambda artist: artist.get_label() == "lr=0.0001"):
        artist.set_color("crimson")  # type: ignore[attr-defined]
    recolored, kept = figure.legends[0].get_lines()
    assert recolored.get_color() == "crimson" != kept.get_color()
    for axes, num_lines in zip(figure.axes, (3, 2), strict=True):  # the first chart has a cross
        assert [line.get_color() for line in axes.lines].count("crimson") == num_lines
        bands = [tuple(asarray(band.get_facecolor())[0, :3]) for band in axes.collections]
        assert bands.count(to_rgb("crimson")) == 1


def test_a_mean_over_seeds_alone_has_a_note(sweep: RunGroup) -> None:
    (legend,) = curves("mine/0", "mine/1").plot().legends
    assert legend.get_title().get_text() == "mean and standard deviation over 2 runs"
    assert legend.get_texts() == []
    assert curves("mine/0").plot().legends == []
    (legend,) = curves("mine/0").plot(smooth=0.9).legends
    assert legend.get_title().get_text() == "smoothed (0.9)"


def test_names_have_colors_of_the_palette_and_numbers_of_viridis(sweep: RunGroup) -> None:
    table = curves("mine")
    assert {line.get_color() for line in table.plot().axes[0].lines}.isdisjoint(COLORS)
    kinds = [DrawnRun(kind, {"kind": kind}, {"loss": {1: (1.0, 2.0)}}) for kind in ("a", "b")]
    figure = draw(kinds, ["kind"], ["loss"], "step", 0.0, None, on_gpu=False)
    assert [line.get_color() for line in figure.axes[0].lines] == [*COLORS[:2]]


def test_a_wide_range_is_logarithmic(sweep: RunGroup) -> None:
    log(sweep.run(0), [step(number, number, loss=10.0**-number) for number in (0, 1, 2)])
    assert curves("mine/0").plot().axes[0].get_yscale() == "log"
    assert curves("mine/1").plot().axes[0].get_yscale() == "linear"


CROSSES: dict[str, tuple[list[float | None], list[float], float, int]] = {
    "diverged": ([1.0, 1.0, None, None], [1, 2], 3, 1),
    "diverged up": ([1.0, 1.0, 1e999], [1, 2], 3, 1),
    "diverged down": ([1.0, 1.0, -1e999], [1, 2], 3, 0),
    "high": ([2.1, 2.2, 2.3, 1e32, 2.5, 2.6, 2.7, 2.8], [1, 2, 3, 5, 6, 7, 8], 4, 1),
    "low": ([2.1, 2.2, 2.3, -1e32, 2.5, 2.6, 2.7, 2.8], [1, 2, 3, 5, 6, 7, 8], 4, 0),
    "very high": ([2.1, 2.2, 2.3, 1e301, 2.5, 2.6, 2.7, 2.8], [1, 2, 3, 5, 6, 7, 8], 4, 1),
    "very low": ([2.1, 2.2, 2.3, -1e301, 2.5, 2.6, 2.7, 2.8], [1, 2, 3, 5, 6, 7, 8], 4, 0),
}
"""Maps a kind of losses to the losses, the steps on the line, and the step and the edge of the cross."""


@pytest.mark.parametrize("kind", CROSSES)
def test_a_loss_beyond_the_others_is_a_cross_at_the_edge(sweep: RunGroup, kind: str) -> None:
    logged, on_line, at, edge = CROSSES[kind]
    log(sweep.run(0), losses(*logged))
    (axes,) = curves("mine/0").plot().axes
    line, cross = axes.lines
    values = asarray(line.get_ydata()).tolist()
    assert [x for x, y in zip(xs(line), values, strict=True) if not math.isnan(y)] == on_line
    assert axes.get_yscale() == "linear"
    assert max(values[0], values[-1]) < axes.get_ylim()[1] < 3
    assert (cross.get_marker(), xs(cross)) == ("x", [at])
    assert asarray(cross.get_ydata()).tolist() == [axes.get_ylim()[edge]]


def test_a_metric_that_is_named_twice_is_drawn_once(sweep: RunGroup) -> None:
    table = curves("mine/0", metrics=["loss", "loss"])
    assert table.metrics == ("loss",)
    assert len(table.plot().axes) == 1


def test_points_between_gaps_are_dots(sweep: RunGroup) -> None:
    log(sweep.run(0), losses(0.5, None, 0.4, None, 0.3, 0.2, 0.1))
    line = curves("mine/0").plot().axes[0].lines[0]
    assert (line.get_marker(), line.get_markevery()) == ("o", [0, 2])


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    drawn = {
        **{"$a_$": "$a_$", "$HOME/$USER": "$HOME/$USER", "tab\tstop": "tab\ufffdstop"},
        **{"bell\x07": "bell\ufffd", "not UTF-8: \udcff": "not UTF-8: \ufffd"},
    }
    curve = {text: {1: (1.0, 2.0), 2: (2.0, 3.0)} for text in drawn}
    runs = [DrawnRun(text, {"k": text}, curve) for text in drawn]
    figure = draw(runs, ["k"], [*drawn], "step", 0.0, None, on_gpu=False)
    for kind in ("svg", "pdf", "png"):
        save(figure, tmp_path / f"a.{kind}")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = {one.text for one in root.iter("{http://www.w3.org/2000/svg}text")}
    assert texts > {f"k={text}" for text in drawn.values()}
    assert texts > {text.replace("_", " ") for text in drawn.values()}


def test_a_band_on_a_logarithmic_axis_ends_at_the_smallest_value(sweep: RunGroup) -> None:
    log(sweep.run(0), losses(100.0, 10.0, 0.2))
    log(sweep.run(1), losses(100.0, 10.0, 3.0))
    (axes,) = curves("mine/0", "mine/1").plot().axes
    assert axes.get_yscale() == "log"
    ends = asarray(axes.collections[0].get_paths()[0].vertices)[:, 1]
    assert ends.min() == pytest.approx(1.6)  # the mean of the last step, whose band reaches below 0


@pytest.mark.parametrize(
    ("labels", "num_columns"),
    [(["a", "b"], 2), (["a", "b", "c"], 3), (["a", "b", "c" * 20], 1), (["a"] * 4, 2), (["a" * 30] * 4, 1)],
)
def test_a_legend_has_no_gap(labels: list[str], num_columns: int) -> None:
    assert _num_columns(labels) == num_columns


def test_smoothing_has_no_bias_to_zero() -> None:
    assert smoothed([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.5 * 0.5 * 1 + 0.5 * 3) / 0.75])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "epoch"}, "unknown axis epoch"),
        ({"smooth": 1.0}, "smooth must be at least 0 and less than 1: 1.0"),
        ({"by": "seed"}, "runs that differ only in their seeds are drawn as one line"),
        ({"by": "model"}, "the runs do not differ in model"),
        ({"x": "tokens"}, "no run has values of loss over tokens"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(
    sweep: RunGroup, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        curves("mine").plot(**options)  # type: ignore[arg-type]
    assert refused.value.message == message


def test_keys_are_columns_as_asked_and_lines_by_all_that_differ(sweep: RunGroup) -> None:
    table = curves(sweep, [[sweep]], metrics="loss", keys=["seed"])  # also lists, and a single name
    assert list(table)[:3] == ["run", "seed", "step"]
    (axes,) = table.plot().axes
    assert len(axes.lines) == 2
    assert axes.get_title() == ""
    assert axes.figure.legends[0].get_title().get_text() == "mean and standard deviation over 3 runs"


def test_a_seed_that_is_behind_cuts_no_line(sweep: RunGroup) -> None:
    log(sweep.run(0), losses(1.0, 1.0))
    log(sweep.run(1), [])
    assert xs(curves("mine/0", "mine/1", "mine/2").plot().axes[0].lines[0]) == [*range(1, 21)]


def test_the_mean_ends_where_a_run_has_diverged(sweep: RunGroup) -> None:
    log(sweep.run(0), losses(1.0, 1.0, 1.0, None))
    line, cross = curves("mine/0", "mine/1").plot().axes[0].lines
    assert (xs(line), xs(cross)) == ([1, 2, 3], [4])


def test_a_key_that_is_named_as_a_column_stays_one(sweep: RunGroup) -> None:
    sweep_json = json.loads((sweep.path / "sweep.json").read_text())
    for trial in sweep_json["points"]:
        trial["values"] = {"grad_norm": f"m{trial['index'] % 2}", "step": 10 * trial["index"]}
    (sweep.path / "sweep.json").write_text(json.dumps(sweep_json))
    table = curves("mine/0", "mine/1", metrics=["grad_norm"])
    assert {"config.grad_norm", "config.step", "grad_norm", "step"} < set(table)
    assert dict.fromkeys(table["config.step"]) == {0: None, 10: None}
    assert table["step"][:3] == [1, 2, 3]


def test_runs_that_differ_in_a_secret_are_two_lines_that_do_not_show_it(sweep: RunGroup) -> None:
    for index in (0, 1):
        config = sweep.run(index).config_file
        text = config.read_text().replace("seed: 1\n", "seed: 0\n")
        config.write_text(text + f"launch:\n  env:\n    API_KEY: hunter2{index}\n")
    table = curves("mine/0", "mine/1")
    stream = io.StringIO()
    table.write_csv(stream)
    assert "hunter2" not in stream.getvalue()
    axes = table.plot().axes[0]
    assert len(axes.lines) == 2
    assert all("hunter2" not in text.get_text() for text in axes.figure.legends[0].get_texts())


def test_long_labels_are_cut_in_the_middle_and_equal_ones_are_numbered() -> None:
    folder = f"/scratch/{'x' * 60}"
    texts = [f"{folder}/a-train", f"{folder}/b-train", f"{'x' * 60}1{'x' * 60}", f"{'x' * 60}2{'x' * 60}"]
    series = [Series({"data.corpus": text}, ()) for text in texts]
    first, second, *equal = labels_of(series, ["data.corpus"])
    assert first.startswith("corpus=")
    assert (first[-8:], second[-8:]) == ("/a-train", "/b-train")
    assert [label[-4:] for label in equal] == [" (1)", " (2)"]
    assert len({label[:-4] for label in equal}) == 1


def test_a_run_without_a_readable_config_is_a_line_of_its_own(sweep: RunGroup) -> None:
    for index in (3, 4):
        sweep.run(index).config_file.write_text("steps: [")
    table = curves("mine")
    assert table.unreadable == ("3", "4")
    assert len(table.plot().axes[0].lines) == 4


def test_a_command_that_was_restarted_has_no_steps_of_its_earlier_attempt(sweep: RunGroup) -> None:
    first = [step(n, 10 * n, loss=1.0 * n) for n in range(1, 9)]
    log(sweep.run(0), [*first, *(step(n, 100 + 10 * n, 2, loss=10.0 * n) for n in (5, 6))])
    sweep.run(0).events_file.write_text("")
    table = curves("mine/0")
    assert table["step"] == [1, 2, 3, 4, 5, 6]
    assert table["time_s"] == sorted(table["time_s"])


def test_validations_of_a_command_are_on_its_curve(sweep: RunGroup) -> None:
    log(sweep.run(0), [step(1, 1, loss=1.0), step(2, 2, loss=0.5), step(2, 2, acc=0.9)])
    event = {"time": stamp(2), "attempt": 1, "event": "evaluated", "step": 2, "val_loss": 0.7}
    sweep.run(0).events_file.write_text(json.dumps(event) + "\n")
    table = curves("mine/0", metrics=["loss", "val_loss", "acc"])
    assert (table["loss"], table["val_loss"], table["acc"]) == ([1.0, 0.5], [None, 0.7], [None, 0.9])


def test_what_is_no_number_is_not_drawn(sweep: RunGroup) -> None:
    odd = [step(n, n, loss=1.7e308, mfu=None, ok=True, name="x", tokens=5) for n in (1, 2)]
    log(sweep.run(0), [*odd, {"step": 10**400, "loss": 1.0}, {"step": 3, "loss": 2.0}])
    table = curves("mine/0", metrics=["loss", "mfu", "ok", "name"])
    assert table["step"] == [1, 2, 3]
    assert table["mfu"] == table["ok"] == table["name"] == [None, None, None]
    assert [math.isnan(value) for value in table["loss"]] == [True, True, False]


def test_hours_are_ticks_of_hours(sweep: RunGroup) -> None:
    log(sweep.run(0), [step(n, 3600.0 * n, loss=1.0) for n in (0, 1, 2, 3)])
    axes = curves("mine/0").plot(x="time").axes[0]
    assert axes.get_xlabel() == "training time (h)"
    assert curves("mine/1").plot(x="time").axes[0].get_xlabel() == "training time (s)"
    assert max(asarray(axes.lines[0].get_xdata())) == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(("device", "label"), [("cuda", "GPU-hours"), ("cpu", "worker-hours")])
def test_hours_are_of_what_the_run_has(sweep: RunGroup, device: str, label: str) -> None:
    sweep.run(0).plan_file.write_text(json.dumps({"device": device, "world_size": 8}))
    table = curves("mine/0")
    assert table["gpu_hours"][-1] == pytest.approx(40.0 * 8 / 3600)
    assert table.plot(x="gpu_hours").axes[0].get_xlabel() == label
