from dataclasses import replace

import pytest

from trainkit.config.schema import RunConfig
from trainkit.drill.campaign import FEWEST_STEPS, save_interval
from trainkit.drill.scenarios import NAMES, SCENARIOS, chosen, take_aim, why_not
from trainkit.plan.launch import Batch, LaunchPlan, Layout

LOCAL = LaunchPlan(
    backend="local",
    num_nodes=2,
    workers_per_node=2,
    device="cpu",
    layout=Layout(dp_shard=4),
    batch=Batch(1, 1, 4, 4),
    lr=0.1,
    threads_per_worker=1,
    grace_s=20.0,
    reasons={},
)
SLURM = replace(LOCAL, backend="sbatch")
NEVER = {"preempt", "time-limit"}


def not_here(plan: LaunchPlan, config: RunConfig = RunConfig()) -> set[str]:  # noqa: B008
    return {scenario.name for scenario in SCENARIOS if why_not(scenario, config, plan)}


def test_what_can_be_tried_where():
    assert not_here(LOCAL) == {"requeue", *NEVER}
    assert not_here(SLURM) == NEVER
    assert not_here(replace(SLURM, command=("train",))) == {"mid-save", "damaged-checkpoint", *NEVER}
    assert not_here(SLURM, RunConfig.model_validate({"checkpoint": {"keep_last": 1}})) == {
        "damaged-checkpoint",
        *NEVER,
    }


def test_chosen_ones_come_in_the_order_of_the_table():
    assert [scenario.name for scenario in chosen(("requeue", "signal"))] == ["signal", "requeue"]
    assert [scenario.name for scenario in chosen(())] == list(NAMES)


@pytest.mark.parametrize("num_steps", [FEWEST_STEPS, 30, 200])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_an_aim_leaves_something_to_lose_before_and_something_to_do_after(scenario, num_steps):
    interval = save_interval(num_steps)
    steps = set()
    for seed in range(200):
        aim = take_aim(scenario, seed, num_steps, interval, 4, 2)
        assert aim.step is not None
        assert interval * (2 if scenario.needs_checkpoints else 1) <= aim.step <= num_steps * 2 // 3
        assert 0 <= aim.rank < 4
        assert 0 <= aim.node_rank < 2
        assert scenario.name != "mid-save" or aim.step % interval == 0
        steps.add(aim.step)
    assert len(steps) > 1 or num_steps == FEWEST_STEPS


def test_the_same_seed_aims_at_the_same_and_another_elsewhere():
    rank = SCENARIOS[1]
    aims = [take_aim(rank, seed, 200, 33, 4, 2) for seed in (1, 1, 2)]
    places = [(aim.step, aim.share, aim.rank, aim.node_rank) for aim in aims]
    assert places[0] == places[1] != places[2]


def test_a_trainer_that_does_not_say_its_step_is_struck_by_the_clock():
    aim = take_aim(SCENARIOS[0], 0, None, None, 4, 2)
    assert aim.step is None
    assert 0.3 <= aim.share <= 0.6
