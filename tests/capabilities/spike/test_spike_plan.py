"""Tests what is planned for `train.spike`, and which values are refused or doubtful."""

from pathlib import Path

import pytest

from tests.support.runs import launch_plan
from trainkit.capabilities.spike import Spike
from trainkit.capabilities.spike.spike_plan import SpikePlan
from trainkit.cluster.machine import Machine
from trainkit.config import load_config
from trainkit.errors import ConfigError
from trainkit.plan.facts import Facts
from trainkit.plan.workload import Workload

FACTS = Facts(Machine(num_cpus=2, num_gpus=0, gpu_names=(), gpu_reason="a test"))
KEPT = (
    "train.spike.patience_steps is 5, checkpoint.every_steps is {}, and checkpoint.keep_last is {}: no "
    "checkpoint from before a spike may be left"
)
NAN = (
    "train.spike.patience_steps is 6, but the run fails after 5 non-finite steps (train.max_nonfinite_steps)"
)


def planned(*overrides: str, **draft: object):
    loaded = load_config("quickstart", overrides=overrides, environ={}, cwd=Path("/nowhere"))
    return Spike().plan(loaded, FACTS, launch_plan(**draft))


@pytest.mark.parametrize(
    ("overrides", "warnings"),
    [
        ((), ()),
        (("checkpoint.every_steps=3", "checkpoint.keep_last=3"), ()),
        (("checkpoint.every_steps=2", "checkpoint.keep_last=3"), (KEPT.format(2, 3),)),
        (("checkpoint.every_steps=50", "checkpoint.keep_last=1"), (KEPT.format(50, 1),)),
        (("checkpoint.every_steps=1", "checkpoint.keep_last=null"), ()),
        (("train.spike.patience_steps=6",), (NAN,)),
        (("train.spike.patience_steps=6", "train.max_nonfinite_steps=6"), ()),
    ],
)
def test_warnings(overrides, warnings):
    found = planned("train.spike={}", *overrides)
    assert found.warnings == warnings
    assert isinstance(found.part, SpikePlan)
    assert (found.part.factor, found.part.window_steps, found.part.max_rollbacks) == (2.0, 100, 3)


def test_who_does_not_use_it():
    assert planned().part is None
    assert planned("train.spike={}", workload=Workload(("true",))).part is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.spike={factor: 1.0}"],
        ["train.spike={window_steps: 1001}"],
        ["train.spike={patience_steps: 0}"],
        ["train.spike={max_rollbacks: 0}"],
        ["train.spike={}", "checkpoint.every_steps=null"],
    ],
)
def test_what_is_refused(overrides):
    with pytest.raises(ConfigError) as caught:
        planned(*overrides)
    assert caught.value.problems[0].key == "train.spike"
