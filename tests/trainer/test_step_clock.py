"""The times that a rank reports."""

import torch

from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import World
from trainkit.trainer.step_clock import StepClock


def test_a_rank_reports_the_times_since_its_last_report() -> None:
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
