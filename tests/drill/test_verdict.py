from dataclasses import replace

import pytest

from trainkit.drill.curve import Point
from trainkit.drill.run_scenario import Played
from trainkit.drill.scenarios import SCENARIOS
from trainkit.drill.verdict import Ended, Result, all_hold, judge, result_table, summary

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
REFERENCE = [Point(step, f"{1 / step}", 4 * step, 1) for step in range(1, 31)]
FINISHED = {"state": "finished", "reason": "all workers finished"}
EVERYTHING = ("preempted", "timeout", "node_fail", "crash", "hang")


def run_of(first: int, resumed: int, **more) -> Ended:
    """A run that did the steps up to `first`, and came back from the checkpoint of step `resumed`."""
    again = [replace(point, attempt=2) for point in REFERENCE[resumed:]]
    events = [
        {"event": "training", "attempt": 1, "step": 0},
        {"event": "training", "attempt": 2, "step": resumed},
    ]
    ended = Ended(FINISHED, [*REFERENCE[:first], *again], events, [], "runs/drill/x")
    return replace(ended, **more)


def verdict(
    name: str, played: Played, ended: Ended, reference=REFERENCE, interval=5, on=EVERYTHING
) -> Result:
    return judge(BY_NAME[name], played, ended, reference, interval, on)


def test_a_notice_in_time_costs_no_step():
    played = Played("SIGUSR2", 12, 3.0, "requeue")
    assert verdict("signal", played, run_of(12, 12)) == Result(
        *("signal", "holds", "", "SIGUSR2", 12, 3.0, "requeue", 0, "equal", "runs/drill/x")
    )
    result = verdict("signal", played, run_of(12, 11))
    assert (result.state, result.again) == ("broken", 1)
    assert result.words == "1 steps were computed again after a notice in time"


@pytest.mark.parametrize(
    ("name", "resumed", "state"),
    [
        ("rank", 9, "holds"),
        ("rank", 8, "broken"),
        ("damaged-checkpoint", 4, "holds"),
        ("damaged-checkpoint", 3, "broken"),
    ],
)
def test_a_kill_costs_at_most_the_interval_between_two_saves(name: str, resumed: int, state: str):
    ended = run_of(14, resumed)
    ended = replace(ended, events=[*ended.events, {"event": "checkpoint_rejected", "attempt": 2, "step": 10}])
    assert verdict(name, Played("SIGKILL", 14), ended).state == state


def test_steps_during_a_save_that_was_cut_off_are_lost_on_top():
    ended = run_of(12, 5)
    assert (
        verdict("mid-save", Played(), ended).words
        == "7 steps were computed again, and 5 are the most that can be"
    )
    begun = {"event": "checkpoint_begin", "attempt": 1, "step": 10}
    assert verdict("mid-save", Played(), replace(ended, events=[begun, *ended.events])).state == "holds"


def test_who_does_not_know_the_interval_does_not_judge_it():
    assert verdict("rank", Played(), run_of(25, 0), interval=None).state == "holds"


def test_another_curve():
    ended = run_of(12, 12)
    ended = replace(ended, points=[*ended.points[:-1], Point(30, "0.5", 120, 2)])
    result = verdict("signal", Played(), ended)
    assert (result.state, result.curve) == ("broken", "differs")
    assert result.words == f"loss 0.5 at step 30 instead of {1 / 30}"


def test_a_run_that_does_not_finish():
    ended = run_of(12, 12, end={"state": "failed", "reason": "a worker ended with exit code 3"})
    assert verdict("signal", Played(), ended).words == "it ended as failed: a worker ended with exit code 3"
    assert verdict("signal", Played(), replace(ended, end={})).words == "it ended as died: without a word"


def test_a_run_that_was_stuck_is_told_as_that_alone():
    ended = run_of(12, 12, end={"state": "cancelled", "reason": "killed by cancel --now"})
    assert verdict("rank", Played(stuck="nothing was heard of it for 9 s"), ended).words == (
        "nothing was heard of it for 9 s"
    )


def test_coming_back_by_hand_is_wrong_only_where_the_config_says_that_it_comes_back_by_itself():
    played = Played("SIGKILL", 12, 3.0, "resume", not_by_itself="no nodes left")
    broken = verdict("rank", played, run_of(12, 10))
    assert (broken.state, broken.words) == ("broken", "it did not come back by itself: no nodes left")
    allowed = verdict("rank", played, run_of(12, 10), on=("preempted",))
    assert (allowed.state, allowed.words) == ("holds", "not by itself: no nodes left")
    assert verdict("signal", played, run_of(12, 12), on=()).state == "broken"


def test_damage_to_checkpoints():
    bad = run_of(12, 12, damages=["step-00000030: manifest.json is missing"])
    assert verdict("signal", Played(), bad).words == "step-00000030: manifest.json is missing"
    rejected = {"event": "checkpoint_rejected", "attempt": 2, "step": 5}
    ended = run_of(12, 10)
    ended = replace(ended, events=[*ended.events, rejected])
    assert verdict("damaged-checkpoint", Played(damaged_step=5), ended).state == "holds"
    unnoticed = verdict("damaged-checkpoint", Played(damaged_step=10), ended)
    assert unnoticed.words == "nobody noticed that the checkpoint of step 10 is damaged"


def test_what_could_not_be_done_has_not_held():
    missed = verdict("rank", Played(missed="the run was over"), run_of(30, 30))
    assert (missed.state, missed.words) == ("missed", "the run was over")
    refused = verdict("requeue", Played("scontrol requeue", refused="scontrol: disabled"), run_of(12, 12))
    assert (refused.state, refused.words, refused.curve) == ("not here", "scontrol: disabled", "")


def test_without_a_curve_only_the_end_is_judged():
    result = verdict("rank", Played("SIGKILL"), run_of(12, 10, points=[], events=[]), reference=[])
    assert (result.state, result.curve, result.again) == ("holds", "not seen", None)
    assert result.words == "its end only: COMMAND writes no steps into metrics.jsonl"


HELD = Result("signal", "holds", "", "SIGUSR2", 12, 3.04, "requeue", 0, "equal")
BROKEN = Result("rank", "broken", "step 4 is missing", "SIGKILL of rank 1", 20, 3.4, "resume", 1, "differs")
NOT_HERE = Result("requeue", "not here", "there is no Slurm")


def test_the_table():
    assert result_table([HELD, BROKEN, NOT_HERE]).splitlines() == [
        "scenario  done               at step  back after       computed again  curve    verdict",
        "signal    SIGUSR2            12       3.0 s (requeue)  0 steps         equal    holds",
        "rank      SIGKILL of rank 1  20       3.4 s (resume)   1 step          differs  BROKEN",
        "requeue   -                  -        -                -               -        not here",
        "rank: step 4 is missing",
        "requeue: there is no Slurm",
    ]


def test_the_whole():
    assert summary([HELD, BROKEN, NOT_HERE]) == "1 of 2 hold; 1 cannot be tried here"
    assert summary([HELD, HELD]) == "2 of 2 hold"
    assert all_hold([HELD, NOT_HERE])
    assert not all_hold([HELD, BROKEN])
    assert not all_hold([HELD, replace(HELD, state="missed")])
    assert not all_hold([NOT_HERE])
    assert not all_hold([])
