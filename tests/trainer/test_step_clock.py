"""Tests the times that a rank reports, and their readers."""

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.support.runs import launch_plan
from trainkit.capabilities.slow_ranks import SlowRanks
from trainkit.capabilities.slow_ranks.policy import SlowRanksPlan
from trainkit.capability import NewEvent, RankObserver
from trainkit.plan.launch import Layout
from trainkit.run.events import read_events
from trainkit.run.rundir import RunDir
from trainkit.trainer import step_clock
from trainkit.trainer.distributed import World
from trainkit.trainer.step_clock import RankObservers, StepClock


def test_a_rank_reports_the_times_since_its_last_report():
    clock = StepClock(world_of(rank=1, size=2), Layout(dp_replicate=2))
    assert clock.report().tolist() == [0.0] * 4
    for data_s in (1.0, 9.0, 2.0):
        take_step(clock, data_s)
    rank_0, (data_s, compute_s) = clock.report().view(2, 2).tolist()
    assert (rank_0, data_s) == ([0.0, 0.0], 1.5), "without the longest step"
    assert 0.0 < compute_s < 1.0
    assert clock.report().tolist() == [0.0] * 4
    take_step(clock, 3.0)
    assert clock.report()[2] == 3.0
    alone = StepClock(world_of(rank=0, size=1), Layout())
    take_step(alone, 1.0)
    assert alone.report().tolist() == [0.0] * 2, "nobody to compare with: nothing is kept"


def world_of(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"), mesh=None, checkpoint_group=None)


def take_step(clock: StepClock, data_s: float) -> None:
    clock.begin_step(data_s)
    clock.end_forward()
    clock.begin_update()
    clock.end_update()


class Fragile(RankObserver):
    """Has an event for each step, but fails at odd ones."""

    def __init__(self) -> None:
        self.values = {"newest": 1.0}

    def add(self, step: int, times: Sequence[float], step_s: float) -> Iterator[NewEvent]:
        if step % 2:
            raise ValueError("the step is odd")
        yield "seen", {"step": step}


@pytest.mark.parametrize(("rank", "size", "steps"), [(0, 2, [2, 4]), (1, 2, []), (0, 1, [])])
def test_an_observer_that_fails_does_not_end_the_training(tmp_path, monkeypatch, caplog, rank, size, steps):
    monkeypatch.setattr(SlowRanks, "rank_observer", lambda self, plan, ranks: Fragile())
    monkeypatch.setattr(step_clock, "gather_from_all", lambda value, world: [value] * world.size)
    plan, attempt = launch_plan().with_part(SlowRanksPlan()), RunDir(tmp_path).attempt(1)
    observers = RankObservers(attempt, plan, world_of(rank, size))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            observers.add(step, (), 0.1)
    assert [event.step for event in read_events(attempt.run, "seen")] == steps
    warning = "warning: the capability slow_ranks failed: ValueError: the step is odd"
    assert caplog.messages == ([warning] if steps else [])
    assert observers.values == ({"newest": 1.0} if steps else {})
