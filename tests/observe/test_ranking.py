"""Tests that one metric ranks a set of runs, and that a run that has diverged is never the best."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timezone
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.groups import make_group
from tests.support.said import said
from trainkit.observe import ranking
from trainkit.observe.group import GroupFiles, GroupStatus, most_relevant
from trainkit.observe.ranking import (
    LESS,
    MAX_NAMED,
    MAX_NAMES,
    MORE,
    Ranking,
    UnknownMetricError,
    asked_metric,
    config_ranking,
    measure,
    mode_of,
    rank,
)
from trainkit.run.end import Best
from trainkit.run.events import (
    MAX_WITHOUT,
    best_result,
    diverged_since,
    first_steps,
    log_event,
    newest_step,
    read_events,
)
from trainkit.run.files import append_jsonl, to_json, write_json
from trainkit.run.group import RunGroup, create_task_run
from trainkit.run.record import claim_entry
from trainkit.run.rundir import RunDir

NOW = datetime(2026, 1, 1, 0, 0, 30, tzinfo=timezone.utc)
Curves = dict[str, str]
"""Maps a metric to its values from step 1 on, where ``.`` stands for a step without a value."""


def log(run: RunDir, curves: Curves, attempt: int = 1, first: int = 1) -> None:
    """Log curves as the trainer and a COMMAND do. A validation loss is logged as an event."""
    columns = {name: text.split() for name, text in curves.items()}
    for index in range(max(map(len, columns.values()), default=0)):
        found = {name: values[index] for name, values in columns.items() if len(values) > index}
        values = {name: float(text) for name, text in found.items() if text != "."}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        if "val_loss" in finite:
            log_event(run, attempt, "evaluated", step=first + index, val_loss=finite.pop("val_loss"))
        if finite:
            append_jsonl(run.metrics_file, {"step": first + index, "attempt": attempt, **finite})


def started(group: RunGroup, index: int, curves: Curves) -> RunDir:
    run = group.run(index)
    create_task_run(run)
    claim_entry(run, 1, 1)
    log(run, curves)
    return run


def ended(run: RunDir, state: str = "finished") -> None:
    end = {"state": state, "action": state, "reason": f"it {state}", "best": to_json(best_result(run))}
    write_json(run.attempt(1).end_file, end)


def group_of(folder: Path, runs: list[Curves | None], **checkpoint: object) -> RunGroup:
    """Return a group of finished runs with these curves; None stands for a run that has not started."""
    group = make_group(folder, {index: {"seed": index} for index in range(len(runs))})
    config = group.record.config
    group.update(config={**config, "checkpoint": {**config["checkpoint"], **checkpoint}})
    for index, curves in enumerate(runs):
        if curves is not None:
            ended(started(group, index, curves))
    return group


def status(group: RunGroup, metric: str | None = None) -> GroupStatus:
    return GroupFiles(group, metric).status({}, NOW)


FALLS = " ".join(f"{1 / step:.4f}" for step in range(1, 21))
TENTH = ". " * 9
MIX: list[Curves | None] = [  # printed by mix.py in a sweep with k=a,b
    {"loss": FALLS, "val_loss": f"{TENTH}0.05 {TENTH}0.025"},
    {"loss": " ".join(f"{0.001 * step:.4f}" for step in range(1, 21))},
]
NAN: list[Curves | None] = [  # printed by nan.py with lr=0.01,0.1,0.3
    {"loss": FALLS, "val_loss": f"{TENTH}0.05 {TENTH}0.025"},
    {"loss": FALLS, "val_loss": f"{TENTH}0.05 {TENTH}0.025"},
    {"loss": "60 " + "nan " * 19, "val_loss": f"{TENTH}nan {TENTH}nan"},
]


MAX_ACCURACY = ("accuracy", "BEST ACCURACY (max)")


@pytest.mark.parametrize(
    ("runs", "asked", "heading", "order", "results"),
    [
        (MIX, None, "BEST VAL_LOSS", "01", [0.025, None]),
        (MIX, "loss", "LAST LOSS", "10", [0.05, 0.02]),
        (NAN, None, "BEST VAL_LOSS", "012", [0.025, 0.025, None]),
        ([None, None], None, "LAST LOSS", "01", [None, None]),
        ([{}, {}], None, "LAST LOSS", "01", [None, None]),
        ([{"loss": "3"}, {"loss": "2"}], None, "LAST LOSS", "10", [3.0, 2.0]),  # each run has only one step
        ([{"loss": "-3 -1"}, {"loss": "-2 -2"}], None, "LAST LOSS", "10", [-1.0, -2.0]),
        ([None, {"val_loss": "2"}, {"loss": "1"}], None, "BEST VAL_LOSS", "102", [None, 2.0, None]),
        ([{"val_loss": "1 3"}, {"val_loss": "2 2"}], None, "BEST VAL_LOSS", "01", [1.0, 2.0]),
        ([{"loss": "nan"}, {"loss": "inf"}], None, "LAST LOSS", "01", [None, None]),
        ([{"loss": "1 nan"}, {"loss": "9 9"}], None, "LAST LOSS", "10", [None, 9.0]),
        ([{"loss": "1 nan 2"}, {"loss": "9 9"}], None, "LAST LOSS", "01", [2.0, 9.0]),  # it has recovered
        ([{"loss": "1", "val_loss": "1 nan"}, {"val_loss": "7"}], None, "BEST VAL_LOSS", "10", [None, 7.0]),
        ([{"loss": "1 nan", "val_loss": "1 ."}, {"val_loss": "7"}], None, "BEST VAL_LOSS", "10", [None, 7.0]),
        ([{"accuracy": ".5 .9 .8"}, {"accuracy": ".7 .7"}], *MAX_ACCURACY, "01", [0.9, 0.7]),
        ([{"accuracy": ".9"}, {"loss": "1"}, None], *MAX_ACCURACY, "012", [0.9, None, None]),
        ([{"accuracy": ".9 nan"}, {"accuracy": ".1"}], *MAX_ACCURACY, "10", [None, 0.1]),
        ([{"accuracy": ".9 .9", "loss": "1 nan"}, {"accuracy": ".1"}], *MAX_ACCURACY, "10", [None, 0.1]),
        ([{"val_ppl": "9 8"}, {"val_ppl": "7 9"}], "val_ppl", "BEST VAL_PPL", "10", [8.0, 7.0]),
        ([{"d_loss": "nan nan"}, {"d_loss": "1 2"}], "d_loss", "BEST D_LOSS", "10", [None, 1.0]),
        ([{"größe": "2"}, {"größe": "1"}], "größe", "BEST GRÖSSE", "10", [2.0, 1.0]),
        ([{'a"b': "2"}, {'a"b': "1"}], 'a"b', 'BEST A"B', "10", [2.0, 1.0]),
        ([{"mfu": "nan .2"}, {"mfu": "nan"}], "mfu", "BEST MFU (max)", "01", [0.2, None]),  # no value
        ([{"x": "1e308"}, {"x": "-1e308"}], "x", "BEST X", "10", [1e308, -1e308]),
    ],
)
def test_one_metric_ranks_a_group(tmp_path, runs, asked, heading, order, results):
    found = status(group_of(tmp_path, runs), asked)
    assert found.ranking.heading == heading
    assert [trial.score for trial in found.trials] == results
    ranked = sorted(found.trials, key=lambda trial: found.ranking.order(trial.score))
    assert "".join(str(trial.index) for trial in ranked) == order
    best = found.best
    assert (best and str(best.index)) == (order[0] if any(one is not None for one in results) else None)
    value = found.to_dict()
    assert (value["metric"], value["mode"]) == (found.ranking.metric, found.ranking.mode)
    json.dumps(value, allow_nan=False)


@pytest.mark.parametrize(
    ("curves", "asked", "since"),
    [
        ({"loss": "1 " * 14 + "nan " * 6}, None, 15),
        ({"loss": "1 " * 14 + "-inf " * 6}, None, 15),
        ({"loss": "nan"}, None, 1),
        ({"loss": "1 1 1", "val_loss": "1 nan inf"}, None, 2),
        ({"val_loss": ". 2 . nan"}, None, 4),
        ({"loss": "1 nan nan", "val_loss": ". . nan"}, None, 2),
        ({"loss": "1 1", "val_loss": "nan 1"}, None, None),
        ({"loss": "1 1", "accuracy": "1 nan"}, None, None),
        ({"loss": "1 1", "accuracy": "1 nan"}, "accuracy", 2),
        ({"loss": "1 nan", "accuracy": "1 1"}, "accuracy", 2),
    ],
)
def test_since_when_it_has_diverged(tmp_path, curves, asked, since):
    group = group_of(tmp_path, [curves, {"loss": "5", "accuracy": "0"}])
    trial = status(group, asked).trials[0]
    assert (trial.state, trial.diverged_since) == ("finished", since)
    said = "it finished" if since is None else f"diverged since step {since}; it finished"
    assert trial.reason == said
    assert trial.problem == ("" if since is None else said)


def test_a_run_that_still_runs_and_one_that_has_not_started(tmp_path):
    group = group_of(tmp_path, [{"loss": "3"}, None, None])
    started(group, 1, {"loss": "1 nan", "val_loss": "0.5"})
    found = [(trial.score, trial.diverged_since, trial.step) for trial in status(group).trials]
    assert found == [(3.0, None, None), (None, 2, 2), (None, None, None)]


def test_lines_that_are_cut_off_and_other_types(tmp_path):
    group = group_of(tmp_path, [{"loss": "3"}, {"loss": "2"}])
    with group.run(0).metrics_file.open("a") as stream:
        stream.write(
            '{"step": 2, "f1": "0.9"}\n{"step": 3, "f1": true}\n[1]\n{"step": "4", "f1": 7}\n{"f1": 8}\n'
        )
        stream.write('{"step": 5, "f1": 0.25}\n{"step": 6, "f1": 0.5')
    found = status(group, "f1")
    assert [trial.best for trial in found.trials] == [Best("f1", 0.25, 5), None]


def test_steps_that_a_later_attempt_computed_again(tmp_path):
    run = RunDir(tmp_path)
    log(run, {"f1": ".1 .2 .9 .9"})
    log(run, {"f1": ".3"}, attempt=2, first=3)
    assert measure(run, Ranking("f1", "max")).result == Best("f1", 0.3, 3)
    log(run, {"val_loss": "4 3 1"})
    log(run, {"val_loss": "2"}, attempt=2, first=3)
    assert measure(run, Ranking("val_loss")).result == Best("val_loss", 2.0, 3)


def test_a_resumed_attempt_that_has_not_logged_the_metric_yet(tmp_path):
    trained, command = RunDir(tmp_path / "trained"), RunDir(tmp_path / "command")
    for run in (trained, command):
        run.path.mkdir()
        log(run, {"f1": ".1 .2 .9 .9", "loss": "4 3 2 1", "val_loss": "4 3 2 1"})
    log_event(trained, 2, "training", step=2)
    log(command, {"loss": "2.5"}, attempt=2, first=3)
    for run, loss in ((trained, Best("loss", 3.0, 2)), (command, Best("loss", 2.5, 3))):
        assert measure(run, Ranking("f1", "max")).result == Best("f1", 0.2, 2)
        assert measure(run, Ranking("val_loss")).result == Best("val_loss", 3.0, 2)
        assert measure(run, Ranking("loss")).result == loss
        assert best_result(run) == Best("val_loss", 3.0, 2)
    assert newest_step(trained, first_steps(trained, read_events(trained))) == 2


@pytest.mark.parametrize("lost", ["loss", "val_loss"])
def test_a_run_that_was_resumed_from_before_it_diverged_has_a_result(tmp_path, lost):
    group = make_group(tmp_path, {0: {"seed": 0}})
    run = started(group, 0, {"loss": "4 3 2 1", "val_loss": "4 3 2 1", lost: "4 3 nan nan"})
    assert (best_result(run), diverged_since(run)) == (None, 3)
    claim_entry(run, 2, 1)
    log_event(run, 2, "training", step=2)
    for step in (2, 3):
        assert (best_result(run), diverged_since(run)) == (Best("val_loss", 3.0, 2), None)
        assert measure(run, Ranking("val_loss")).result == Best("val_loss", 3.0, 2)
        (trial,) = status(group, "val_loss").trials
        assert (trial.best, trial.step, trial.diverged_since) == (Best("val_loss", 3.0, 2), step, None)
        log(run, {"loss": "2.5"}, attempt=2, first=3)


def test_the_best_metric_of_the_config_ranks(tmp_path):
    runs: list[Curves | None] = [
        {"loss": "1", "val_loss": "1", "val_accuracy": ".1"},
        {"loss": "2", "val_loss": "2", "val_accuracy": ".9"},
        {"loss": "3", "val_loss": ".5"},
    ]
    found = status(group_of(tmp_path, runs, best_metric="val_accuracy", best_mode="max"))
    assert (found.ranking, found.best and found.best.index) == (Ranking("val_accuracy", "max"), 1)
    assert [trial.index for trial in most_relevant(found, 3)] == [1, 0, 2]
    assert status(RunGroup(found.run_dir), "val_loss").ranking == Ranking("val_loss")
    (tmp_path / "other").mkdir()
    without = group_of(tmp_path / "other", [{"loss": "1"}, {"loss": "2"}], best_metric="val_f1")
    assert status(without).ranking == Ranking("loss"), "no run has the metric yet"


def test_the_metric_of_an_ended_run_is_read_once(tmp_path, monkeypatch):
    group = group_of(tmp_path, [{"f1": ".1 .9"}, {"f1": ".2"}], best_metric="f1", best_mode="max")
    counted = Mock(wraps=measure)
    monkeypatch.setattr(ranking, "measure", counted)
    for _ in range(3):
        assert [trial.best for trial in status(group).trials] == [Best("f1", 0.9, 2), Best("f1", 0.2, 1)]
    read = sorted(call.args[0].path for call in counted.call_args_list)
    assert read == [group.run(index).path for index in (0, 1)]
    with group.run(1).metrics_file.open("a") as stream:
        stream.write('{"step": 2, "f1": 0.95}\n')
    assert status(group).trials[1].best == Best("f1", 0.95, 2)


@pytest.mark.parametrize(
    ("configs", "ranking"),
    [
        ([("f1", "max"), ("f1", "max")], Ranking("f1", "max")),
        ([("f1", "max"), ("f1", "min")], None),
        ([("f1", "max"), ("val_loss", "min")], None),
        ([("f1", "max"), (None, "min")], None),
        ([(None, "max")], None),
        ([], None),
        ([(3, "max")], None),
    ],
)
def test_configs_that_differ_choose_nothing(configs, ranking):
    keys = ("checkpoint.best_metric", "checkpoint.best_mode")
    assert config_ranking([dict(zip(keys, values, strict=True)) for values in configs] + [{}]) == ranking


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("accuracy acc val_accuracy acc1 top5 train/acc valAcc Accuracy eval.f1 F1 F1_macro macro-f1", "max"),
        ("auc roc_auc auroc mAP bleu BLEU rouge_l val_iou psnr r2 reward mfu tokens_per_s", "max"),
        ("loss val_loss d_loss ppl perplexity error accuracy_loss f1_error wer lr grad_norm mae", "min"),
        ("samples_per_s", "max"),
        ("accelerate mapping scored x größe 1 _ step_s", "min"),
        ("IoU mIoU val/mIoU F1Score f1score rouge1 rouge2 rougeL mAP50 mAP50-95 bleu4 top-1", "max"),
        ("exact_match val_exact-match mrr ndcg ndcg@10 success_rate spearman pearson mcc recall@5", "max"),
        ("RMSE valLoss loss1 top1_error mse2", "min"),
    ],
)
def test_names_of_which_more_is_better(names, mode):
    assert {name: mode_of(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_a_validation_loss_that_diverged_is_found_behind_many_saves(tmp_path):
    run = started(make_group(tmp_path, {0: {"seed": 0}}), 0, {"val_loss": "1 nan"})
    for step in range(3, 3 + 2 * MAX_WITHOUT):
        log_event(run, 1, "checkpoint_commit", step=step)
    assert diverged_since(run) == 2
    log_event(run, 1, "evaluated", step=1000, val_loss=1.0)
    assert diverged_since(run) is None


def test_the_best_result_is_that_of_the_newest_computation_of_a_step(tmp_path):
    run = started(make_group(tmp_path, {0: {"seed": 0}}), 0, {"loss": "1 1", "val_loss": ". 0.1"})
    log(run, {"val_loss": "0.2 0.3"}, attempt=2, first=2)
    assert best_result(run) == measure(run, Ranking("val_loss")).result == Best("val_loss", 0.2, 2)


def test_the_docs_have_the_names_of_which_more_is_better():
    text = (Path(__file__).parents[2] / "docs/slurm.md").read_text()
    sentence = text.partition("name contains one of the words")[2].partition("\n\n")[0]
    more, less = sentence.split("none of the words")
    names = [re.findall(r"`(\w+)`", words) for words in (more, less)]
    assert " ".join(names[0]) == f"{MORE} val_top5 tokens_per_s"
    assert " ".join(names[1]) == LESS


def test_a_metric_that_no_run_has_is_refused_with_those_that_they_have(tmp_path):
    group = group_of(tmp_path, [{"loss": "1", "val_loss": "1", "accuracy": "nan"}, {"lr": "1"}, None])
    for asked in ("acuracy", "step", "attempt", "time", ""):
        with pytest.raises(UnknownMetricError, match=f"no run has logged {asked}") as error:
            GroupFiles(group, asked)
        said(str(error.value.hint))
    (tmp_path / "empty").mkdir()
    empty = group_of(tmp_path / "empty", [None])
    with pytest.raises(UnknownMetricError) as error:
        GroupFiles(empty, "loss")
    said(error.value.hint)


def test_the_hint_shows_some_names_without_what_moves_a_cursor_and_secrets(tmp_path):
    names = {f"m{index:04}": "1" for index in range(1000)}
    group = group_of(tmp_path, [{"\x1b[31mred": "1", "api_key=sk-abcdefghijklmnop1234": "1", **names}])
    with pytest.raises(UnknownMetricError) as error:
        GroupFiles(group, "zzz")
    hint = str(error.value.hint)
    assert hint.startswith("the runs logged ")
    assert hint.endswith(f" and {1002 - MAX_NAMES:,} more")
    assert "\x1b" not in hint
    assert "sk-abc" not in hint
    assert "m0001, m0002" in hint


def test_the_hint_of_an_unknown_metric_reads_no_thousand_runs(tmp_path, monkeypatch):
    read = Mock(return_value=())
    monkeypatch.setattr("trainkit.observe.ranking.read_steps", read)
    with pytest.raises(UnknownMetricError):
        rank([RunDir(tmp_path / str(index)) for index in range(100)], "f1", None)
    assert read.call_count == MAX_NAMED


def test_sort_may_be_the_metric_and_no_other_one():
    assert asked_metric(None, None, ()) is None
    assert {asked_metric(*both, ()) for both in (("f1", None), (None, "f1"), ("f1", "f1"))} == {"f1"}
    with pytest.raises(Exception, match="--sort acc is not a column of runs that are ranked by f1") as error:
        asked_metric("f1", "acc", ("step",))
    said(error.value.hint)
