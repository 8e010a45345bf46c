"""Tests of the metrics that an agent finds in the output of a COMMAND and writes to metrics.jsonl."""

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.capabilities.curves import log_curve
from trainkit.capabilities.curves.log_curve import LogCurve
from trainkit.plan.workload import Workload
from trainkit.run.events import best_result, log_event, read_events, training_curve
from trainkit.run.files import append_jsonl, read_jsonl
from trainkit.run.history import RunHistory

PLAN = launch_plan(num_nodes=1, workload=Workload(("train",)))


def prints(attempt, text: str) -> None:
    log = attempt.rank_log(0)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as stream:
        stream.write(text)


def curve(run) -> dict[int, float | None]:
    return {record.step: record.values.get("loss") for record in training_curve(run)}


def reasons(run) -> list[str | None]:
    return [event.reason for event in read_events(run, "curve")]


def test_records_are_those_of_a_curve_and_it_is_said_once(attempt):
    run = attempt.run
    prints(attempt, "loading\nstep 1 loss 3.0 lr 1e-3\nstep 2 loss nan")
    follower = LogCurve(attempt, PLAN, "auto")
    follower.poll()
    assert not run.metrics_file.exists()  # the step has not grown, and the last line may be incomplete
    prints(attempt, " lr 1e-3\nstep 3 loss 2.0 lr 1e-3, val_loss 2.5\n")
    follower.poll()
    prints(attempt, "step 4 loss 1.0 lr 1e-3")
    follower.poll()
    follower.end(is_finished=True)
    assert curve(run) == {1: 3.0, 2: None, 3: 2.0, 4: 1.0}
    first = next(read_jsonl(run.metrics_file))
    own = {"step": 1, "attempt": 1, "loss": 3.0, "lr": 1e-3, "source": "log"}
    assert first == {**own, "time": first["time"]}
    said("\n".join(reasons(run)))
    best = best_result(run)
    assert (best.metric, best.value, best.step) == ("val_loss", 2.5, 3)
    history = RunHistory(run)
    history.update()
    assert history.metrics.curve("loss")[-1] == (4, 1.0)


def test_a_script_that_writes_metrics_itself_has_precedence(attempt):
    follower, own = LogCurve(attempt, PLAN, "auto"), {"attempt": 1, "loss": 9.0}
    prints(attempt, "step 1 loss 3\nstep 2 loss 2\n")
    append_jsonl(attempt.run.metrics_file, {"step": 1, **own})
    follower.poll()
    prints(attempt, "step 3 loss 2\n")
    follower.poll()
    assert (curve(attempt.run), reasons(attempt.run)) == ({1: 9.0}, [])
    again = LogCurve(attempt.run.attempt(1), PLAN, "auto")
    again.end(is_finished=True)
    assert curve(attempt.run) == {1: 9.0}


def test_an_attempt_that_resumes_computes_steps_again_and_counts_epochs_on(attempt):
    run = attempt.run
    for number, batches in ((1, [(0, 5), (0, 9), (1, 5)]), (2, [(1, 5), (1, 9)])):
        at = run.attempt(number)
        prints(at, "".join(f"epoch {epoch} batch {n}/10 loss {number}\n" for epoch, n in batches))
        LogCurve(at, PLAN, "auto").end(is_finished=True)
    assert curve(run) == {5: 1.0, 9: 1.0, 15: 2.0, 19: 2.0}
    assert len(list(read_jsonl(run.metrics_file))) == 5


def test_the_last_line_is_a_validation_loss(attempt):
    bar = "train:  10%|█  | {0}/3 [00:01<00:09, 5it/s, loss=1.5]\r"
    prints(attempt, "".join(map(bar.format, (1, 2, 3))) + "\nval_loss: 0.5\n")
    LogCurve(attempt, PLAN, "auto").end(is_finished=True)
    assert [event.values["val_loss"] for event in read_events(attempt.run, "evaluated")] == [0.5]


def test_work_is_bounded(attempt, monkeypatch):
    monkeypatch.setattr(log_curve, "READ_BYTES", 40_000)
    prints(attempt, "".join(f"step {n} loss 1\n" for n in range(100_000)))
    LogCurve(attempt, PLAN, "auto").poll()
    steps = list(curve(attempt.run))
    assert len(steps) == log_curve.MAX_RECORDS
    assert (steps[0] > 97_000, steps[-1]) == (True, 99_999)


def test_a_pattern_of_the_user(attempt):
    pattern = r"at (?P<step>\d+): (?P<loss>[\d.]+|-)(, val (?P<val_loss>\S+))?( acc (?P<accuracy>\S+))?"
    prints(attempt, "step 1 loss 3\nat 7: 2.5 acc 0.5\nat 8: -\nat 9: 2.25, val 2.0\n")
    LogCurve(attempt, PLAN, pattern).poll()
    records = list(read_jsonl(attempt.run.metrics_file))
    values = [(record["step"], record.get("loss"), record.get("accuracy")) for record in records]
    assert values == [(7, 2.5, 0.5), (9, 2.25, None)]
    assert [event.values["val_loss"] for event in read_events(attempt.run, "evaluated")] == [2.0]
    said("\n".join(reasons(attempt.run)))


def test_a_pattern_that_never_ends_is_given_up(attempt, monkeypatch, capfd):
    monkeypatch.setattr(log_curve, "MATCH_S", 0.05)
    prints(attempt, "a" * 60 + "\n")
    follower = LogCurve(attempt, PLAN, r"(?P<step>(a+)+)$b")
    follower.poll()
    prints(attempt, "a" * 60 + "\n")
    follower.end(is_finished=True)
    [problem] = reasons(attempt.run)
    said(problem)
    assert capfd.readouterr().out == f"warning: {problem}\n"


@pytest.mark.parametrize("line", ["loss {0}.5, epoch 0.{0}\n", "d_loss 1 g_loss {0}\n"])
def test_it_says_why_there_is_no_curve(attempt, line):
    follower = LogCurve(attempt, PLAN, "auto")
    prints(attempt, "".join(map(line.format, range(9))))
    follower.poll()
    assert reasons(attempt.run) == []
    follower.end(is_finished=True)
    [reason] = reasons(attempt.run)
    said(reason)


def test_progress_is_known_where_the_log_has_a_total(attempt):
    log_event(attempt.run, 1, "started")
    prints(attempt, "step 1/50 loss 2\nstep 2/50 loss 1\n")
    LogCurve(attempt, PLAN, "auto").poll()
    history = RunHistory(attempt.run)
    history.update()
    assert history.events.total_steps == 50
