"""Tests that the growing files of a run are read incrementally."""

import json
import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import watched_runs
from tests.support.watched_runs import NOW, Watched, ago
from trainkit.capabilities.health.samples import health_file
from trainkit.capabilities.watch.run_view import read_view
from trainkit.observe.status import read_status
from trainkit.run import events as events_module
from trainkit.run import history as history_module
from trainkit.run.files import append_jsonl
from trainkit.run.history import MAX_POINTS, EventHistory, MetricsHistory, RunHistory, timestamp
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


def write_metrics(file: Path, first: int, last: int, attempt: int = 1) -> None:
    with file.open("a") as stream:
        for step in range(first, last + 1):
            record = {"step": step, "attempt": attempt, "loss": 1000.0 - step, "tokens_per_s": float(step)}
            stream.write(json.dumps(record) + "\n")


def test_only_whole_lines_are_read_and_each_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    history = MetricsHistory(file)
    history.update()
    assert history.curve("loss") == []
    write_metrics(file, 1, 3)
    with file.open("a") as stream:
        stream.write('{"step": 4, ')
        stream.flush()
        history.update()
        assert [step for step, _ in history.curve("loss")] == [1, 2, 3]
        stream.write('"loss": 7}\nnonsense\n')
    history.update()
    history.update()
    assert history.curve("loss")[-2:] == [(3, 997.0), (4, 7.0)]
    assert len(history.recent) == 4


def make_events(file: Path, num_attempts: int, num_evaluations: int) -> None:
    """Write attempts that each restart, with many evaluations and saves between the restarts."""
    begin = [{"event": "submitted"}, {"event": "started", "nodes": 1}, {"event": "training", "step": 0}]
    end = [{"event": "signal", "signal": "SIGTERM"}, {"event": "requeue_decision", "action": "requeue"}]
    end += [{"event": "stopped", "state": "stopped", "reason": "preempted"}]
    with file.open("w") as stream:
        for number in range(1, num_attempts + 1):
            middle = [{"event": "evaluated", "step": n, "val_loss": 2.0} for n in range(num_evaluations)]
            middle.append({"event": "checkpoint_commit", "step": num_evaluations})
            for second, event in enumerate([*begin, *middle, *end]):
                time = f"2026-01-01T{number:02}:{second // 60 % 60:02}:{second % 60:02}.000Z"
                stream.write(json.dumps({"time": time, "attempt": number, **event}) + "\n")


def test_a_large_file_of_events_is_read_where_attempts_begin_and_end(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    make_events(file, 7, 2000)
    whole, part = EventHistory(file), EventHistory(file)
    whole.update()
    for module in (history_module, events_module):
        monkeypatch.setattr(module, "WHOLE_BYTES", 50_000)
    monkeypatch.setattr(events_module, "EDGE_BYTES", 2_000)
    monkeypatch.setattr(events_module, "LAST_BYTES", 8_000)
    with file.open("rb") as stream:
        size = file.stat().st_size
        lines = list(events_module.event_lines(stream, 0, size))
        assert (stream.tell(), sum(map(len, lines)) < size / 20) == (size, True)
        assert sorted(set(lines), key=lines.index) == lines
    part.update()
    found, expected = (
        [replace(attempt, evaluations=[]) for attempt in one.attempts.values()] for one in (part, whole)
    )
    assert found == expected
    assert (part.val_loss, part.saved, part.total_steps) == (whole.val_loss, whole.saved, whole.total_steps)
    append_jsonl(file, {"attempt": 8, "event": "started", "time": "2026-01-01T23:00:00.000Z"})
    part.update()
    assert (part.attempts[8].started, len(part.attempts)) == (timestamp("2026-01-01T23:00:00.000Z"), 8)


def test_a_long_line_is_not_in_memory(tmp_path):
    history = RunHistory(RunDir(tmp_path))
    assert history.newest_steps() == []
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("w") as stream:
            stream.write('{"step": 1, "attempt": 1, "event": "started"}\n' + "x" * 40 * 2**20)
            stream.write('\n{"step": 2, "attempt": 1, "event": "training"}\n' + "y" * 20 * 2**20)
    tracemalloc.start()
    history.update()
    assert [record.step for record in history.newest_steps()] == [1, 2]
    assert history.events.attempt(1).start_step == 2
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


def test_steps_that_are_computed_again_and_another_file_replace_the_others(tmp_path):
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsHistory(file)
    for first, last, is_new, steps in ((1, 10, False, 10), (6, 7, False, 7), (1, 2, True, 2)):
        if is_new:
            file.unlink()
        write_metrics(file, first, last)
        metrics.update()
        assert [step for step, _ in metrics.curve("loss")] == list(range(1, steps + 1))


def test_of_a_large_file_a_sample_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "SAMPLED_BYTES", 50_000)
    file = tmp_path / "metrics.jsonl"
    write_metrics(file, 1, 20_000)
    history = MetricsHistory(file)
    history.update()
    curve = history.curve("loss")
    assert MAX_POINTS <= len(curve) <= 2 * MAX_POINTS
    assert curve[0][0] <= 20_000 / MAX_POINTS
    assert curve[-1] == (20_000, -19_000.0)
    assert [step for step, _ in curve] == sorted({step for step, _ in curve})
    assert max(b - a for (a, _), (b, _) in pairwise(curve)) <= 3 * 20_000 / MAX_POINTS
    assert history.median("tokens_per_s") == pytest.approx(10_000, rel=0.05)
    write_metrics(file, 20_001, 20_003)
    history.update()
    assert history.curve("loss")[-1][0] == 20_003


def test_the_points_of_a_curve_are_bounded(tmp_path):
    file = tmp_path / "metrics.jsonl"
    history = MetricsHistory(file)
    for first in range(1, 5001, 500):
        write_metrics(file, first, first + 499)
        history.update()
    curve = history.curve("loss")
    assert MAX_POINTS / 2 <= len(curve) <= 2 * MAX_POINTS
    assert curve[-1][0] == 5000
    assert len(history.recent) == history_module.RECENT_RECORDS


def test_events_of_a_run_are_read_once(tmp_path):
    made = Watched(tmp_path / "run").job()
    made.event(90, "evaluated", step=1, val_loss=3.0).event(80, "evaluated", step=2, val_loss=2.5)
    history = EventHistory(made.run.events_file)
    history.update()
    assert (history.first_val_loss, history.val_loss) == (3.0, 2.5)
    made.saved(2, 70).event(60, "evaluated", step=3, val_loss=2.25)
    history.update()
    assert (history.first_val_loss, history.val_loss) == (3.0, 2.25)
    assert (history.saved.step, history.save_began) == (2, ago(74))
    assert history.attempts[1].started == timestamp(ago(1400))


@pytest.mark.parametrize(
    "begins", [{"event": "training", "step": 2}, {"event": "evaluated", "step": 3, "val_loss": 9.0}]
)
def test_validations_of_steps_that_are_computed_again_are_left_out(tmp_path, begins):
    """The trainer logs the beginning of an attempt; a COMMAND may log only its validations."""
    file = tmp_path / "events.jsonl"
    for step, loss in ((2, 3.0), (4, 1.0), (6, 0.5)):
        append_jsonl(file, {"event": "evaluated", "attempt": 1, "step": step, "val_loss": loss})
    append_jsonl(file, {"attempt": 2, **begins})
    append_jsonl(file, {"event": "evaluated", "attempt": 2, "step": 5, "val_loss": 2.5})
    history = EventHistory(file)
    history.update()
    assert {step: loss for step, loss in history.val_losses.items() if step != 3} == {2: 3.0, 5: 2.5}


def test_damaged_events_are_skipped(tmp_path):
    made = Watched(tmp_path / "run").job().event(90, "evaluated", step=1, val_loss=3.0)
    broken = ({"event": []}, {"event": "checkpoint_begin", "step": [1]}, {"event": "started", "attempt": {}})
    for damaged in broken:
        append_jsonl(made.run.events_file, damaged)
    history = EventHistory(made.run.events_file)
    history.update()
    assert history.recent[-1].name == "evaluated"


def test_a_refresh_of_1024_ranks_takes_little_time(tmp_path):
    """A refresh of 100 ms every 2 s takes 5 % of a core. Most of this time is for the terminal."""
    run = watched_runs.large(tmp_path / "large")
    history = RunHistory(run)
    spent = []
    for step in range(641, 648):
        append_jsonl(run.metrics_file, {"step": step, "attempt": 1, "loss": 2.0, "time": ago(1)})
        for node in range(26):  # these nodes write a sample within 2 s
            sample = json.loads(health_file(run, f"node{node + 1:03d}").read_text().splitlines()[-1])
            append_jsonl(health_file(run, f"node{node + 1:03d}"), sample)
        began_s = time.process_time()
        history.update()
        view = read_view(history, read_status(history, read_job(run), True, NOW), NOW)
        spent.append(time.process_time() - began_s)
    assert view.status.progress.step == 647
    assert len(view.nodes) == 128
    assert sorted(spent)[len(spent) // 2] < 0.05


def test_the_names_of_the_curves_are_bounded(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        append_jsonl(file, {"step": step, **{f"m{index}": index for index in range(500)}, "loss": 2.0})
    history = MetricsHistory(file)
    history.update()
    curves = history.curves()
    assert len(curves) == history_module.MAX_CURVES
    assert curves["m0"] == [(1, 0.0), (2, 0.0)]
    assert curves["loss"] == [(1, 2.0), (2, 2.0)]
    assert len(history.points[0].values) <= history_module.MAX_CURVES + 1
