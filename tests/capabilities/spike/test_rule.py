"""Tests the rule for loss spikes on sequences of losses, without training."""

import json
import math
from collections.abc import Sequence

import pytest

from trainkit.capabilities.spike.rule import SpikeRule
from trainkit.capabilities.spike.spike_plan import SpikePlan

PLAN = SpikePlan(factor=2.0, window_steps=4, patience_steps=3, max_rollbacks=2)
NAN, INF = math.nan, math.inf


def run(rule: SpikeRule, losses: Sequence[float], first: int = 1) -> tuple[list[tuple[str, int]], int | None]:
    """Return the name and step of each event, and the step at which the rule goes back, if it does."""
    events = []
    for step, loss in enumerate(losses, first):
        for name, values in rule.after_step(step, has_updated=True, loss=loss):
            json.dumps(values, allow_nan=False)
            events.append((name, values["step"]))
        if rule.go_back() is not None:
            return events, step
    return events, None


@pytest.mark.parametrize(
    ("losses", "events", "back"),
    [
        ([4, 3, 2, 1, 4, 3, 2], [], None),
        ([1, 1, 9, 9, 9, 9, 9], [], None),  # until the window is full, no finite loss is high
        ([1, 1, 1, 1, 2, 2, 2, 2, 2], [], None),  # a loss must exceed the limit
        ([1, 1, 1, 1, 9, 9], [("loss_spike", 5)], None),
        ([1, 1, 1, 1, 9, 9, 9], [("loss_spike", 5)], 7),
        ([1, 1, 1, 1, 9, 9, 1, 9, 9], [("loss_spike", 5), ("loss_spike_over", 7), ("loss_spike", 8)], None),
        ([1, 1, 1, 1, 9, NAN, INF], [("loss_spike", 5)], 7),
        ([1, NAN, NAN, NAN], [("loss_spike", 2)], 4),
        ([NAN, NAN, NAN], [("loss_spike", 1)], 3),
        # A high loss does not raise the median, but a slow rise does.
        ([1, 1, 1, 1, 9, 1, 9, 1, 9, 9, 9], [(f"loss_spike{over}", step) for step, over in (
            (5, ""), (6, "_over"), (7, ""), (8, "_over"), (9, "")
        )], 11),
        ([1, 1, 1, 1, 1.9, 1.9, 1.9, 1.9, 3.7, 3.7, 3.7], [], None),
        # With an even window, the median is the mean of the two middle losses, here 2.5.
        ([1, 2, 3, 4, 5], [], None),
        ([1, 2, 3, 4, 5.1], [("loss_spike", 5)], None),
    ],
)  # fmt: skip
def test_what_is_a_spike(losses, events, back):
    assert run(SpikeRule(PLAN), losses) == (events, back)


def test_the_request():
    rule = SpikeRule(PLAN)
    assert run(rule, [1, 1, 1, 1, 9, 9, 9])[1] == 7
    request = rule.go_back()
    assert request is not None
    assert (request.before_step, request.max_times) == (5, 2)
    assert request.why == "the loss was above 2 x its median, or not finite, from step 5 to 7"


@pytest.mark.parametrize("cut", range(9))
def test_a_resumed_run_decides_the_same(cut):
    losses = [4, 3, 2, 1, 9, 1, 9, 9, 9]
    rule = SpikeRule(PLAN)
    before = run(rule, losses[:cut])[0]
    resumed = SpikeRule(PLAN)
    resumed.load(json.loads(json.dumps(rule.saved(), allow_nan=False)))
    after, back = run(resumed, losses[cut:], cut + 1)
    assert (before + after, back) == run(SpikeRule(PLAN), losses)
    assert back == 9
