"""Compares the share of effective time with simulated runs that fail."""

import random

import pytest

from trainkit.capabilities.layouts.effective_time import (
    Assumed,
    best_interval_s,
    effective_share,
    effective_time,
)
from trainkit.config.load import load_config

HOUR = 3600.0


def simulated_share(rate: float, interval_s: float, assumed: Assumed, rng: random.Random) -> float:
    """Return the effective share of a run of many checkpoint intervals."""
    num_intervals, time_s, fails_s, done = 20_000, 0.0, rng.expovariate(rate), 0
    while done < num_intervals:
        end_s = time_s + interval_s + assumed.save_s
        while fails_s < end_s:
            time_s = fails_s + assumed.restart_s
            fails_s += rng.expovariate(rate)
            # The next failure may happen during the restart.
            end_s = time_s + (interval_s + assumed.save_s if fails_s >= time_s else 0.0)
        time_s, done = end_s, done + 1
    return num_intervals * interval_s / time_s


@pytest.mark.parametrize(
    ("every_h", "interval_s", "restart_s", "save_s"),
    [(30, 600, 300, 1), (2, 1800, 300, 20), (1, 3600, 900, 60), (0.2, 300, 600, 5)],
)
def test_the_share_is_that_of_a_simulation(every_h, interval_s, restart_s, save_s):
    assumed, rate = Assumed(restart_s=restart_s, save_s=save_s), 1 / (every_h * HOUR)
    expected = simulated_share(rate, interval_s, assumed, random.Random(7))
    assert effective_share(rate, interval_s, assumed) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("every_h", [0.2, 2, 30, 1000])
@pytest.mark.parametrize("save_s", [0.1, 1, 60])
def test_no_other_interval_is_better(every_h, save_s):
    assumed, rate = Assumed(save_s=save_s), 1 / (every_h * HOUR)
    best_s = best_interval_s(rate, save_s)
    best = effective_share(rate, best_s, assumed)
    assert all(effective_share(rate, factor * best_s, assumed) < best for factor in (0.5, 0.9, 1.1, 2))
    # Young's approximation holds if a save is short compared with the time between failures
    if save_s / HOUR < 0.001 * every_h:
        assert best_s == pytest.approx((2 * save_s / rate) ** 0.5, rel=0.03)


def test_a_run_that_never_saves_makes_no_progress():
    assert effective_share(1 / HOUR, 1e9, Assumed()) == 0.0
    assert effective_share(1 / HOUR, 60.0, Assumed(restart_s=1e9)) == 0.0


@pytest.mark.parametrize(
    ("num_nodes", "overrides", "interval_s"),
    [
        (64, [], 1000),  # 100 steps of 10 s
        (64, ["checkpoint.every_minutes=5"], 300),
        (64, ["checkpoint.every_steps=null", "checkpoint.every_minutes=90"], 5400),
        (64, ["checkpoint.every_steps=null"], None),
        (64, ["train.steps=1000"], None),  # no failure is expected within three hours
        (64, ["train.steps=null", "train.epochs=1"], None),
        (1, ["train.steps=100000000"], None),
    ],
)
def test_nothing_is_said_of_a_short_run_or_one_node(tmp_path, num_nodes, overrides, interval_s):
    overrides = ["train.steps=100000", *overrides]
    config = load_config(None, overrides=overrides, environ={}, cwd=tmp_path).config
    found = effective_time(config, num_nodes, 10.0, Assumed())
    assert (None if found is None else found.interval_s) == interval_s
    if found is not None:
        assert found.failure_every_s == pytest.approx(24 * HOUR / (64 * 0.0065))
        assert found.share <= found.best_share
        assert found.best_interval_s == 10.0 * found.best_steps
    asked = effective_time(config, num_nodes, 10.0, Assumed(restart_s=60))
    assert (asked is None) == ("checkpoint.every_steps=null" in overrides and interval_s is None)
