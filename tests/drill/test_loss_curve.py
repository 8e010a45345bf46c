from trainkit.drill.loss_curve import Comparison, Point, compare, points_of, steps_while_saving
from trainkit.run.events import Event, steps_of

REFERENCE = [Point(1, "3.5", 16), Point(2, "3.25", 32), Point(3, "3.125", 48)]


def test_points_are_read_as_they_were_written_and_other_records_are_passed_over():
    records = [
        {"step": 1, "loss": 0.1, "samples_seen": 16, "attempt": 1},
        {"step": 1, "loss": 0.10000000000000002},
        {"step": 2, "note": "no loss"},
        {"loss": 1.0},
    ]
    assert points_of(steps_of(records)) == [Point(1, "0.1", 16, 1), Point(1, "0.10000000000000002")]


def test_equal_curves_are_equal_however_often_a_step_was_computed():
    assert compare(REFERENCE, REFERENCE) == Comparison(0, "")
    assert compare(REFERENCE, [*REFERENCE[:2], REFERENCE[1], *REFERENCE]) == Comparison(3, "")


def test_the_first_difference_is_named():
    other = [REFERENCE[0], Point(2, "3.2500000000000004", 32), REFERENCE[2]]
    assert compare(REFERENCE, other).difference == "loss 3.2500000000000004 at step 2 instead of 3.25"
    other = [*REFERENCE[:2], Point(3, "3.125", 64)]
    assert compare(REFERENCE, other).difference == "64 samples seen at step 3 instead of 48"
    assert compare(REFERENCE, REFERENCE[::2]).difference == "step 2 is missing"
    other = [*REFERENCE, Point(4, "3.0", 64)]
    assert compare(REFERENCE, other).difference == "step 4 is not in the uninterrupted run"


def test_a_step_that_was_wrong_the_first_time_is_a_difference_although_it_was_computed_again():
    assert compare(REFERENCE, [Point(1, "9.0", 16), *REFERENCE]) == Comparison(
        1, "loss 9.0 at step 1 instead of 3.5"
    )


def attempt(number: int, *steps: int) -> list[Point]:
    return [Point(step, "1.0", step, number) for step in steps]


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
