"""The results of a drill: curves that are compared, and what is made of a run."""

import json
from dataclasses import replace

import pytest

from trainkit.contrib.drill.result import (
    RunOutcome,
    all_passed,
    compare,
    evaluate,
    num_recomputed,
    result_table,
    steps_while_saving,
    summary,
)
from trainkit.contrib.drill.scenarios import SCENARIOS, Result
from trainkit.run.end import AttemptEnd
from trainkit.run.events import Event, StepRecord


def point(step: int, loss: str, samples_seen: int | None = None, attempt: int | None = None) -> StepRecord:
    values = {"step": step, "loss": json.loads(loss), "samples_seen": samples_seen, "attempt": attempt}
    return StepRecord(values)


BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
REFERENCE = [point(step, f"{1 / step}", 4 * step, 1) for step in range(1, 31)]
FINISHED = AttemptEnd("finished", reason="all workers finished")
EVERYTHING = ("preempted", "timeout", "node_fail", "crash", "hang")


def run_of(first: int, resumed: int, **more) -> RunOutcome:
    """A run that did the steps up to `first`, and resumed from the checkpoint of step `resumed`."""
    again = [StepRecord({**one.values, "attempt": 2}) for one in REFERENCE[resumed:]]
    events = [
        Event({"event": "training", "attempt": 1, "step": 0}),
        Event({"event": "training", "attempt": 2, "step": resumed}),
    ]
    ended = RunOutcome(FINISHED, [*REFERENCE[:first], *again], events, [], "runs/drill/x")
    return replace(ended, **more)


def record(action: str = "", step: int | None = None, *restart, **more) -> Result:
    """What a scenario knows before its run is judged."""
    return Result("", "passed", "", action, step, *restart, **more)


def result_of(
    name: str, found: Result, outcome: RunOutcome, reference=REFERENCE, interval=5, on=EVERYTHING
) -> Result:
    return evaluate(BY_NAME[name], replace(found, scenario=name), outcome, reference, interval, on)


def test_a_graceful_stop_costs_no_step():
    found = record("SIGUSR2", 12, 3.0, "requeue")
    assert result_of("signal", found, run_of(12, 12)) == Result(
        *("signal", "passed", "", "SIGUSR2", 12, 3.0, "requeue", 0, "equal", "runs/drill/x")
    )
    result = result_of("signal", found, run_of(12, 11))
    assert (result.state, result.num_recomputed) == ("failed", 1)
    assert result.message == "1 step was recomputed after a graceful stop"


@pytest.mark.parametrize(
    ("name", "resumed", "state"),
    [
        ("rank", 9, "passed"),
        ("rank", 8, "failed"),
        ("damaged-checkpoint", 4, "passed"),
        ("damaged-checkpoint", 3, "failed"),
    ],
)
def test_a_kill_costs_at_most_the_interval_between_two_saves(name: str, resumed: int, state: str):
    ended = run_of(14, resumed)
    rejected = Event({"event": "checkpoint_rejected", "attempt": 2, "step": 10})
    ended = replace(ended, events=[*ended.events, rejected])
    assert result_of(name, record("SIGKILL", 14), ended).state == state


def test_steps_during_a_save_that_was_cut_off_are_lost_on_top():
    ended = run_of(12, 5)
    assert result_of("mid-save", record(), ended).message == "7 steps were recomputed; the maximum is 5"
    begun = Event({"event": "checkpoint_begin", "attempt": 1, "step": 10})
    assert result_of("mid-save", record(), replace(ended, events=[begun, *ended.events])).state == "passed"


def test_an_unknown_interval_is_not_checked():
    assert result_of("rank", record(), run_of(25, 0), interval=None).state == "passed"


def test_another_curve():
    ended = run_of(12, 12)
    ended = replace(ended, steps=[*ended.steps[:-1], point(30, "0.5", 120, 2)])
    result = result_of("signal", record(), ended)
    assert (result.state, result.curve) == ("failed", "differs")
    assert result.message == f"loss 0.5 at step 30 instead of {1 / 30}"


def test_a_run_that_does_not_finish():
    ended = run_of(12, 12, end=AttemptEnd("failed", reason="a worker ended with exit code 3"))
    assert result_of("signal", record(), ended).message == "the run failed: a worker ended with exit code 3"
    assert (
        result_of("signal", record(), replace(ended, end=AttemptEnd())).message
        == "the run died: it recorded no reason"
    )


def test_a_stuck_run_has_that_as_its_only_problem():
    ended = run_of(12, 12, end=AttemptEnd("cancelled", reason="killed by cancel --now"))
    assert result_of("rank", record(stuck="it made no progress for 9 s"), ended).message == (
        "it made no progress for 9 s"
    )


def test_a_missing_restart_fails_only_where_the_config_asks_for_one():
    found = record("SIGKILL", 12, 3.0, "resume", no_restart="no nodes left")
    broken = result_of("rank", found, run_of(12, 10))
    assert (broken.state, broken.message) == ("failed", "it did not restart by itself: no nodes left")
    allowed = result_of("rank", found, run_of(12, 10), on=("preempted",))
    assert (allowed.state, allowed.message) == ("passed", "resumed by the drill: no nodes left")
    assert result_of("signal", found, run_of(12, 12), on=()).state == "failed"


def test_damage_to_checkpoints():
    bad = run_of(12, 12, damages=["step-00000030: manifest.json is missing"])
    assert result_of("signal", record(), bad).message == "step-00000030: manifest.json is missing"
    rejected = Event({"event": "checkpoint_rejected", "attempt": 2, "step": 5})
    ended = run_of(12, 10)
    ended = replace(ended, events=[*ended.events, rejected])
    assert result_of("damaged-checkpoint", record(damaged_step=5), ended).state == "passed"
    unnoticed = result_of("damaged-checkpoint", record(damaged_step=10), ended)
    assert unnoticed.message == "the damage to the checkpoint of step 10 was not detected"


def test_what_could_not_be_done_has_not_passed():
    missed = result_of("rank", record(missed="the run was over"), run_of(30, 30))
    assert (missed.state, missed.message) == ("missed", "the run was over")
    refused = result_of("requeue", record("scontrol requeue", refused="scontrol: disabled"), run_of(12, 12))
    assert (refused.state, refused.message, refused.curve) == ("skipped", "scontrol: disabled", "")


def test_without_a_curve_only_the_end_is_judged():
    result = result_of("rank", record("SIGKILL"), run_of(12, 10, steps=[], events=[]), reference=[])
    assert (result.state, result.curve, result.num_recomputed) == ("passed", "unknown", None)
    assert result.message == "only its end was checked: the COMMAND writes no steps to metrics.jsonl"


PASSED = Result("signal", "passed", "", "SIGUSR2", 12, 3.04, "requeue", 0, "equal")
FAILED = Result("rank", "failed", "step 4 is missing", "SIGKILL of rank 1", 20, 3.4, "resume", 1, "differs")
SKIPPED = Result("requeue", "skipped", "there is no Slurm")


def test_the_table():
    assert result_table([PASSED, FAILED, SKIPPED]).splitlines() == [
        "SCENARIO  ACTION             AT STEP  RESUMED AFTER    RECOMPUTED  LOSSES   RESULT",
        "signal    SIGUSR2            12       3.0 s (requeue)  0 steps     equal    passed",
        "rank      SIGKILL of rank 1  20       3.4 s (resume)   1 step      differs  FAILED",
        "requeue   -                  -        -                -           -        skipped",
        "rank: step 4 is missing",
        "requeue: there is no Slurm",
    ]


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
    assert compare(CURVE, other) == "loss 3.2500000000000004 at step 2 instead of 3.25"
    other = [*CURVE[:2], point(3, "3.125", 64)]
    assert compare(CURVE, other) == "64 samples seen at step 3 instead of 48"
    assert compare(CURVE, CURVE[::2]) == "step 2 is missing"
    other = [*CURVE, point(4, "3.0", 64)]
    assert compare(CURVE, other) == "step 4 is not in the uninterrupted run"


@pytest.mark.parametrize(
    ("loss", "tolerance", "is_equal"),
    [
        ("3.25001", 0.0, False),
        ("3.25001", 1e-5, True),
        ("3.2501", 1e-5, False),
        *((loss, 1e-5, False) for loss in ("NaN", "null", "0.0", "-3.25")),
    ],
)
def test_on_another_number_of_nodes_sums_are_rounded(loss: str, tolerance: float, is_equal: bool):
    points = [CURVE[0], point(2, loss, 32), CURVE[2]]
    assert (compare(CURVE, points, tolerance) == "") == is_equal


def test_a_step_that_was_wrong_the_first_time_is_a_difference_although_it_was_computed_again():
    assert compare(CURVE, [point(1, "9.0", 16), *CURVE]) == "loss 9.0 at step 1 instead of 3.5"


def attempt(number: int, *steps: int) -> list[StepRecord]:
    return [point(step, "1.0", step, number) for step in steps]


def begin(number: int, step: int) -> dict:
    return Event({"event": "checkpoint_begin", "attempt": number, "step": step})


def training(number: int, step: int) -> dict:
    return Event({"event": "training", "attempt": number, "step": step})


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
