"""Tests the view of a run: its numbers, nodes, warnings and text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support import watched_runs
from tests.support.said import said
from tests.support.watched_runs import NOW, Watched, ago, running_job
from trainkit.capabilities.watch.run_view import RunView, event_text, read_view
from trainkit.capabilities.watch.screen import joined
from trainkit.capabilities.watch.view_text import BLOCKS, Size, charted, resampled, sparkline, view_lines
from trainkit.observe.status import read_status
from trainkit.run.events import Event
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.history import RunHistory
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.slurm.jobs import SlurmJob

JOB = running_job(["4711"], print)["4711"]


def view_of(run: RunDir, job: SlurmJob | None = JOB) -> RunView:
    history = RunHistory(run)
    history.update()
    alive = None if job is None else True
    return read_view(history, read_status(history, read_job(run), alive, NOW, job), NOW, job)


def test_the_time_before_an_attempt_is_not_at_risk(tmp_path: Path) -> None:
    made = Watched(tmp_path / "run", attempts=2).job(100).saved(50, 5000, attempt=1)
    made.event(60, "training", step=50, total_steps=2000).metrics(51, 60)
    view = view_of(made.run)
    assert view.steps_at_risk == 10
    assert view.hours_at_risk == pytest.approx(60 * 8 / 3600)


def test_what_is_unknown_is_none(tmp_path: Path) -> None:
    made = Watched(tmp_path / "run").job(20)
    view = view_of(made.run)
    assert view.status.state == "starting"
    said(view.sentence)
    for name in ("progress", "eta_s", "grad_norm", "lr", "mfu", "median_tokens_per_s", "step_p50_s"):
        assert getattr(view, name) is None, name
    assert (view.steps_at_risk, view.hours_at_risk, view.nodes, view.notices) == (None, None, [], [])


def test_a_slow_rank_shows_without_samples_of_its_node(tmp_path: Path) -> None:
    made = Watched(tmp_path / "run").job().metrics(1, 10)
    slow = {"phase": "data", "ratio": 3.0, "own_s": 3.0, "usual_s": 1.0, "since_step": 5}
    made.event(9, "slow_rank", rank=7, host="node002", step=8, **slow)
    [node] = view_of(made.run).nodes
    assert (node.host, node.problems, node.slowest_rank) == ("node002", ["rank 7 3.0x slower (data)"], 7)
    assert node.cpu_percent is None
    made.event(1, "slow_rank_over", rank=7, host="node002", step=10, **slow)
    view = view_of(made.run)
    assert view.nodes == []
    said(view.notices[0].text)


def test_damaged_samples_and_ends_show_as_unknown(tmp_path: Path) -> None:
    run = watched_runs.failed(tmp_path / "run")
    for file in (run.path / "health").iterdir():
        with file.open("a") as stream:
            stream.write(
                '{"attempt": 2, "gpus": 3, "mem_used_gib": "1", "mem_total_gib": [], "cpu_percent": {}}\n'
            )
    write_json(run.attempt(2).end_file, {"state": "failed", "verdict": -1})
    view = view_of(run)
    assert [(node.cpu_percent, node.mem_used_gib, node.num_gpus) for node in view.nodes] == [
        (None, None, 0)
    ] * len(view.nodes)
    assert view.nodes
    assert view.failure is None
    assert view_lines(view, Size(80))


@pytest.mark.parametrize("name", ["job.json", "plan.json", "config.yaml", "attempts/001/end.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '{"attempts": 3}', "\x00\xff"])
def test_a_damaged_file_of_the_run(name: str, content: str, tmp_path: Path) -> None:
    run = watched_runs.finished(tmp_path / "run")
    (run.path / name).write_bytes(content.encode("latin-1"))
    assert view_lines(view_of(run), Size(80))


def test_samples_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    made = Watched(tmp_path / "run", attempts=2, nodes=1).job().metrics(1, 10).health()
    (made.run.path / "health" / "node009.jsonl").write_text(f'{{"time": "{ago(1)}", "attempt": 1}}\n')
    assert [node.host for node in view_of(made.run).nodes] == ["node001"]


MAKES = (
    *(watched_runs.running, watched_runs.finished, watched_runs.preempted, watched_runs.failed),
    *(watched_runs.command, watched_runs.large),
)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_lines_fit_any_terminal(make: Callable[[Path], RunDir], tmp_path: Path) -> None:
    view = view_of(make(tmp_path / "run"))
    for width in (20, 40, 79, 80, 119, 120, 200, 400):
        for height in (5, 23, 24, 49, 100):
            lines = view_lines(view, Size(width, height))
            assert len(lines) <= height
            assert max(len(line) for line in lines) <= width
    assert view_lines(view, Size(80))[-1].plain


def test_the_title_names_another_cluster(tmp_path: Path) -> None:
    view = view_of(watched_runs.running(tmp_path / "run"))
    there = replace(
        view, status=replace(view.status, job_id="7", place=replace(view.status.place, cluster="east"))
    )
    assert " · job 7 on east · " in view_lines(there, Size(200))[0].plain


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 7.0, 3.5], "▁█▅"),
        ([0.0, None, 1.0], "▁ █"),
        ([0.0, 1e-310], "▁█"),
        ([-1.7e308, 1.7e308], "▁█"),
    ],
)
def test_sparkline(values: Sequence[float | None], line: str) -> None:
    assert sparkline(values) == line


CURVES: dict[str, dict[str, list[tuple[int, float]]]] = {
    "none": {},
    "one step": {"loss": [(1, 1.0)]},
    "two steps": {"loss": [(1, 1.0), (2, 0.5)]},
    "constant": {"loss": [(step, 2.0) for step in range(50)]},
    "negative": {"reward": [(step, -step / 3) for step in range(900)]},
    "huge and tiny": {"a": [(1, 1.7e308), (9, -1.7e308)], "b": [(1, 1e-300), (10**9, 2e-300)]},
    "gaps": {"loss": [(1, 1.0), (10**6, 2.0), (10**6 + 1, 3.0)]},
    "hostile names": {
        "\x1b[31mred": [(1, 1.0), (2, 2.0)],
        "学習率" * 30: [(1, 1.0), (2, 2.0)],
        "a\nb": [(1, 1.0), (2, 2.0)],
    },
    "a thousand": {f"metric-{index}": [(1, 1.0), (2, float(index))] for index in range(1000)},
}


@pytest.mark.parametrize("name", CURVES)
def test_charts_fit_any_terminal(tmp_path: Path, name: str) -> None:
    usual = view_of(watched_runs.running(tmp_path / "run"))
    view = replace(usual, curves={**{key: [] for key in usual.curves}, **CURVES[name]})
    drawn = charted(view)
    assert drawn == [metric for metric, points in CURVES[name].items() if len(points) > 1]
    for width, height in ((20, 5), (60, 16), (80, 24), (80, 50), (120, 50), (200, 60), (400, 100)):
        for metric in (None, *drawn[:2], "of another run"):
            lines = joined(view_lines(view, Size(width, height), metric), width).plain.split("\n")
            assert len(lines) <= height
            assert max(map(cell_len, lines)) <= width
            if width == 200 and metric is None and 0 < len(drawn) < 9:
                assert sum(line.count(", steps ") for line in lines) == len(drawn)


def test_own_metrics_and_the_validation_loss_can_be_drawn(tmp_path: Path) -> None:
    run = watched_runs.running(tmp_path / "run")
    for step in (10_001, 10_002):
        more = {"acc": step / 20_000, "loss": 1.0, "note": "x", "done": True}
        append_jsonl(run.metrics_file, {"step": step, "time": ago(1), **more})
    for step in (500, 1000):
        evaluated = {"event": "evaluated", "step": step, "val_loss": 3.0 - step / 1000}
        append_jsonl(run.events_file, {"time": ago(9), **evaluated})
    view = view_of(run)
    drawn = charted(view)
    assert drawn[:5] == ["loss", "grad_norm", "lr", "tokens_per_s", "val_loss"]
    assert view.curves["val_loss"][-2:] == [(500, 2.5), (1000, 2.0)]
    assert view.curves["acc"] == [(10_001, 0.50005), (10_002, 0.5001)]
    assert not {"step", "tokens", "attempt", "note", "done"} & view.curves.keys()
    chart = "\n".join(line.plain for line in view_lines(view, Size(80, 24), "acc"))
    assert "── acc, steps 10,001 to 10,002" in chart


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_tall_screen_has_charts_of_all_metrics(tmp_path: Path, width: int) -> None:
    view = view_of(watched_runs.running(tmp_path / "run"))
    lines = [line.plain for line in view_lines(view, Size(width, 50))]
    shown = [
        metric
        for metric in ("loss", "grad norm", "lr", "tokens/s")
        if f"── {metric}, steps" in "".join(lines)
    ]
    assert shown == ["loss", "grad norm", "lr", "tokens/s"]
    assert len(lines) > 45
    # the view is printed once
    assert not any(", steps " in line.plain for line in view_lines(view, Size(width)))


def test_a_chart_shows_means_and_names_what_is_highest_and_lowest(tmp_path: Path) -> None:
    usual = view_of(watched_runs.running(tmp_path / "run"))
    # The chart has 100 steps in 32 columns. The gap without steps repeats the last value.
    points = [(step, -1.0 if step % 2 else 3.0) for step in range(100)] + [(200, 2.0)]
    lines = [line.plain for line in view_lines(replace(usual, curves={"loss": points}), Size(40, 24), "loss")]
    chart = lines[lines.index(next(line for line in lines if ", steps 0 to 200" in line)) + 1 :]
    assert [line.split()[0] for line in (chart[0], chart[-1])] == ["2", "0.7143"]
    assert all(set(line[8:]) <= {" ", *BLOCKS} for line in chart)
    assert " " not in chart[-1][8:]
    assert {len(line) for line in chart} == {40}


def test_resampled_is_the_mean_of_equal_ranges() -> None:
    points = [(step, float(step)) for step in range(100)]
    assert resampled(points, 4) == pytest.approx([12, 37, 62, 87], abs=1)
    assert resampled([(1, 1.0), (100, 2.0), (101, 3.0)], 2) == [1.0, 2.5]
    assert resampled(points[:3], 10) == [0.0, 1.0, 2.0]


def test_a_save_that_failed_says_why() -> None:
    event = {"event": "checkpoint_failed", "step": 5, "error": "No space left on device"}
    said(event_text(Event(event)))
