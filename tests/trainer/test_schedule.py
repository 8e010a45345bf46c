"""The learning rate at the borders of each shape."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from trainkit.config.training import ScheduleConfig
from trainkit.trainer.optimizer import learning_rate

SHAPES = ["cosine", "linear", "wsd", "constant"]


def rates(total: int, peak: float = 1.0, **config: Any) -> list[float]:
    """The rates of the steps 1 to `total`."""
    schedule = ScheduleConfig(**config)
    return [learning_rate(step, total, peak, schedule) for step in range(1, total + 1)]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    for name in SHAPES:
        assert rates(10, peak=8.0, name=name, warmup_steps=4)[:4] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("name", SHAPES)
def test_warm_up_longer_than_the_run(name: str) -> None:
    assert rates(3, peak=8.0, name=name, warmup_steps=8) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", SHAPES)
def test_warm_up_as_long_as_the_run(name: str) -> None:
    assert rates(4, name=name, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_cosine() -> None:
    found = rates(4, name="cosine", warmup_steps=0, min_lr_ratio=0.2)
    assert found == pytest.approx([0.2 + 0.8 * (1 + c) / 2 for c in (0.5**0.5, 0.0, -(0.5**0.5), -1.0)])


def test_linear() -> None:
    assert rates(4, name="linear", warmup_steps=0, min_lr_ratio=0.2) == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_constant() -> None:
    assert rates(4, name="constant", warmup_steps=1, min_lr_ratio=0.2) == [1.0] * 4


def test_wsd_decays_over_the_last_steps_only() -> None:
    found = rates(10, name="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_wsd_decays_over_a_fifth_by_default() -> None:
    found = rates(20, name="wsd", warmup_steps=0, min_lr_ratio=0.5)
    assert found[:16] == [1.0] * 16
    assert found[16:] == pytest.approx([0.875, 0.75, 0.625, 0.5])


def test_wsd_whose_decay_is_longer_than_the_run_begins_after_the_warm_up() -> None:
    found = rates(6, name="wsd", warmup_steps=2, decay_steps=100, min_lr_ratio=0.0)
    assert found == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_wsd_of_a_run_too_short_to_have_a_fifth() -> None:
    assert rates(2, name="wsd", warmup_steps=0, min_lr_ratio=0.5) == [1.0, 0.5]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 7, 1000])
def test_the_last_step_has_the_lowest_rate_and_none_beyond_falls_further(name: str, total: int) -> None:
    config = ScheduleConfig(name=name, warmup_steps=0, min_lr_ratio=0.1)
    assert learning_rate(total, total, 3.0, config) == pytest.approx(0.3)
    assert learning_rate(total + 5, total, 3.0, config) == pytest.approx(0.3)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_no_jumps(name: str, warmup_steps: int) -> None:
    found = rates(1000, name=name, warmup_steps=warmup_steps, min_lr_ratio=0.0)
    steepest = 1 / warmup_steps if warmup_steps > 1 else 0.0051
    assert all(abs(after - before) <= steepest + 1e-12 for before, after in pairwise(found))
    assert all(0 <= rate <= 1 for rate in found)
