"""Tests how the losses of a run are compared, and how the result of a scenario is decided."""

import json
from dataclasses import replace

import pytest

from tests.support.said import said
from trainkit.capabilities.drill.result import (
    RunOutcome,
    all_passed,
    compare,
    evaluate,
    num_recomputed,
    result_table,
    steps_while_saving,
    summary,
)
from trainkit.capabilities.drill.scenarios import SCENARIOS, Result
from trainkit.run.end import AttemptEnd
from trainkit.run.events import Event, StepRecord


def point(step: int, loss: str, samples_seen: int | None = None, attempt: int | None = None) -> StepRecord:
    values = {"step": step, "loss": json.loads(loss), "samples_seen": samples_seen, "attempt": attempt}
    return StepRecord(values)


BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
REFERENCE = [point(step, f"{1 / step}", 4 * step, 1) for step in range(1, 31)]
FINISHED = AttemptEnd("finished", reason="all workers finished")
EVERYTHING = ("preempted", "timeout", "node_fail", "crash", "hang")


def happened(event: str, attempt: int, step: int) -> Event:
    return Event({"event": event, "attempt": attempt, "step": step})


def run_of(first: int, resumed: int, **more) -> RunOutcome:
    """Return a run that computed the steps up to `first`, and resumed from step `resumed`."""
    again = [StepRecord({**one.values, "attempt": 2}) for one in REFERENCE[resumed:]]
    events = [happened("training", 1, 0), happened("training", 2, resumed)]
    ended = RunOutcome(FINISHED, [*REFERENCE[:first], *again], events, [], "runs/drill/x")
    return replace(ended, **more)


def judged(name: str, record: Result, outcome: RunOutcome, reference=REFERENCE, interval=5, on=EVERYTHING):
    return evaluate(BY_NAME[name], replace(record, scenario=name), outcome, reference, interval, on)


def record(**more) -> Result:
    """Return the result of a scenario before its run is evaluated."""
    return Result("", **more)


def with_event(outcome: RunOutcome, event: str, attempt: int, step: int) -> RunOutcome:
    return replace(outcome, events=[happened(event, attempt, step), *outcome.events])


def test_a_graceful_stop_costs_no_step():
    found = Result("", "passed", "", "SIGUSR2", 12, 3.0, "requeue")
    assert judged("signal", found, run_of(12, 12)) == Result(
        *("signal", "passed", "", "SIGUSR2", 12, 3.0, "requeue", 0, "equal", "runs/drill/x")
    )
    result = judged("signal", found, run_of(12, 11))
    assert (result.state, result.num_recomputed) == ("failed", 1)
    said(result.message)


def rejected(first: int, resumed: int, step: int) -> RunOutcome:
    return with_event(run_of(first, resumed), "checkpoint_rejected", 2, step)


NOT_BACK, AGAIN = record(no_restart="no nodes"), "steps were recomputed; the maximum is"
ALONE = "the run did not restart automatically: no nodes"
FAILED_END, NO_END = AttemptEnd("failed", reason="exit code 3"), AttemptEnd()
RESUMED = "passed: the drill resumed the run, which had not restarted automatically: no nodes"
ONLY_END = (
    "passed: only the final state of the run was checked, because the COMMAND wrote no steps to metrics.jsonl"
)
UNNOTICED = "failed: the damage to the checkpoint of step 10 was not detected"


@pytest.mark.parametrize(
    ("name", "found", "outcome", "more", "expected"),
    [
        # A kill costs at most the interval between two saves, and the steps that are computed during a save.
        ("rank", record(), run_of(14, 9), {}, "passed: "),
        ("rank", record(), run_of(14, 8), {}, f"failed: 6 {AGAIN} 5"),
        ("rank", record(), run_of(25, 0), {"interval": None}, "passed: "),
        ("damaged-checkpoint", record(), run_of(14, 4), {}, "passed: "),
        ("damaged-checkpoint", record(), run_of(14, 3), {}, f"failed: 11 {AGAIN} 10"),
        ("mid-save", record(), run_of(12, 5), {}, f"failed: 7 {AGAIN} 5"),
        ("mid-save", record(), with_event(run_of(12, 5), "checkpoint_begin", 1, 10), {}, "passed: "),
        ("signal", record(), run_of(12, 12, end=FAILED_END), {}, "failed: the run failed: exit code 3"),
        ("signal", record(), run_of(12, 12, end=NO_END), {}, "failed: the run died: no reason was recorded"),
        ("rank", record(stuck="no progress"), run_of(12, 12, end=NO_END), {}, "failed: no progress"),
        # A missing restart is a failure only if the config requests a restart.
        ("rank", NOT_BACK, run_of(12, 10), {}, f"failed: {ALONE}"),
        ("rank", NOT_BACK, run_of(12, 10), {"on": ("hang",)}, RESUMED),
        ("signal", NOT_BACK, run_of(12, 12), {"on": ()}, f"failed: {ALONE}"),
        ("signal", record(), run_of(12, 12, damages=["step-30: gone"]), {}, "failed: step-30: gone"),
        ("damaged-checkpoint", record(damaged_step=5), rejected(12, 10, 5), {}, "passed: "),
        ("damaged-checkpoint", record(damaged_step=10), rejected(12, 10, 5), {}, UNNOTICED),
        # A scenario that could not be carried out has not passed.
        ("rank", record(missed="it was over"), run_of(30, 30), {}, "missed: it was over"),
        ("requeue", record(refused="scontrol: no"), run_of(12, 12), {}, "skipped: scontrol: no"),
        ("rank", record(), run_of(12, 10, steps=[], events=[]), {"reference": []}, ONLY_END),
    ],
)
def test_what_is_made_of_a_run(name, found, outcome, more, expected):
    result = judged(name, found, outcome, **more)
    assert f"{result.state}: {result.message}" == expected
    curve = "" if result.state == "skipped" else "unknown" if expected == ONLY_END else "equal"
    assert (result.curve, result.num_recomputed is None) == (curve, curve != "equal")


def test_another_curve():
    ended = run_of(12, 12)
    ended = replace(ended, steps=[*ended.steps[:-1], point(30, "0.5", 120, 2)])
    result = judged("signal", record(), ended)
    assert (result.state, result.curve) == ("failed", "differs")
    said(result.message)


PASSED = Result("signal", "passed", "", "SIGUSR2", 12, 3.04, "requeue", 0, "equal")
FAILED = Result("rank", "failed", "step 4 is missing", "SIGKILL of rank 1", 20, 3.4, "resume", 1, "differs")
SKIPPED = Result("requeue", "skipped", "there is no Slurm")


def test_the_table():
    said(result_table([PASSED, FAILED, SKIPPED]))


def test_the_whole():
    assert summary([PASSED, FAILED, SKIPPED]) == "1 of 2 passed; 1 skipped"
    assert summary([PASSED, PASSED]) == "2 of 2 passed"
    assert all_passed([PASSED, SKIPPED])
    assert not all_passed([PASSED, FAILED])
    assert not all_passed([PASSED, replace(PASSED, state="missed")])
    assert not all_passed([SKIPPED])
    assert not all_passed([])


CURVE = [point(1, "3.5", 16), point(2, "3.25", 32), point(3, "3.125", 48)]


def test_equal_curves_are_equal_however_often_a_step_was_computed():
    again = [*CURVE[:2], CURVE[1], *CURVE]
    assert (compare(CURVE, CURVE), num_recomputed(CURVE)) == ("", 0)
    assert (compare(CURVE, again), num_recomputed(again)) == ("", 3)


def test_the_first_difference_is_named():
    other = [CURVE[0], point(2, "3.2500000000000004", 32), CURVE[2]]
    said(compare(CURVE, other))
    other = [*CURVE[:2], point(3, "3.125", 64)]
    said(compare(CURVE, other))
    assert compare(CURVE, CURVE[::2]) == "step 2 is missing"
    other = [*CURVE, point(4, "3.0", 64)]
    said(compare(CURVE, other))


@pytest.mark.parametrize(
    ("loss", "tolerance", "is_equal"),
    [
        ("3.25001", 0.0, False),
        ("3.25001", 1e-5, True),
        ("3.2501", 1e-5, False),
        *((loss, 1e-5, False) for loss in ("NaN", "null", "0.0", "-3.25")),
    ],
)
def test_on_another_number_of_nodes_sums_are_rounded(loss, tolerance, is_equal):
    points = [CURVE[0], point(2, loss, 32), CURVE[2]]
    assert (compare(CURVE, points, tolerance) == "") == is_equal


def test_a_step_that_was_wrong_the_first_time_is_a_difference_although_it_was_computed_again():
    said(compare(CURVE, [point(1, "9.0", 16), *CURVE]))


def attempt(number: int, *steps: int) -> list[StepRecord]:
    return [point(step, "1.0", step, number) for step in steps]


def begin(number: int, step: int) -> Event:
    return happened("checkpoint_begin", number, step)


def training(number: int, step: int) -> Event:
    return happened("training", number, step)


def test_steps_of_a_save_that_was_cut_off():
    points = [*attempt(1, *range(1, 14)), *attempt(2, *range(6, 16))]
    began = [training(1, 0), begin(1, 5), begin(1, 10)]
    assert steps_while_saving(points, [*began, training(2, 5)]) == 3
    assert steps_while_saving(points, [*began, training(2, 10)]) == 0
    assert steps_while_saving(points, began) == 0


def test_steps_of_saves_that_were_cut_off_add_up_over_the_attempts():
    points = [*attempt(1, 1, 2, 3, 4, 5, 6), *attempt(2, *range(1, 12)), *attempt(3, *range(6, 16))]
    events = [training(1, 0), begin(1, 5), training(2, 0), begin(2, 5), begin(2, 10), training(3, 5)]
    assert steps_while_saving(points, events) == 1 + 1
