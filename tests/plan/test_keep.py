"""Tests which checkpoints a rule keeps, against a version that repeats the definition of each part."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.run.test_manifest import change, make
from tests.support.said import said
from trainkit.config.running import CheckpointConfig
from trainkit.errors import UsageError
from trainkit.plan.keep import KeepRule, best_values, obsolete
from trainkit.run.manifest import Checkpoint

LOG = KeepRule(last=1, log_spaced=True)


def gone(steps, rule, *, best=None, pinned=(), values=None):
    checkpoints = [Checkpoint(Path("x"), step) for step in steps]
    found = obsolete(checkpoints, rule, best_step=best, pinned=pinned, values=values)
    return [checkpoint.step for checkpoint in found]


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        (KeepRule(last=1), {}, [1, 2, 3]),
        (KeepRule(last=2), {}, [1, 2]),
        (KeepRule(last=2), {"best": 1}, [2]),
        (KeepRule(last=1), {"best": 4}, [1, 2, 3]),
        (KeepRule(last=4), {}, []),
        (KeepRule(last=9), {"best": 2}, []),
        (KeepRule(last=None), {"best": 2}, []),
        (KeepRule(last=1), {"pinned": [2]}, [1, 3]),
        (KeepRule(last=1, every=2), {}, [1, 3]),
        (KeepRule(last=1, at=(1, 3)), {}, [2]),
        (LOG, {}, [3]),
        (KeepRule(last=1, best=2), {"values": {1: 0.5, 2: 0.1, 3: 0.3}}, [1]),
        (KeepRule(last=1, best=2), {"values": {1: 0.3, 2: 0.1, 3: 0.3}}, [3]),
        (KeepRule(last=1, best=9), {"values": {2: 0.1}}, [1, 3]),
    ],
    ids=str,
)
def test_obsolete(rule, options, expected):
    assert gone((3, 1, 4, 2), rule, **options) == expected


def expected_kept(saved, rule, best, pinned, values):
    kept = {*saved[-rule.last :], *rule.at, *pinned, best}
    kept |= {2**n for n in range(10)} if rule.log_spaced else set()
    if rule.every:
        multiples = range(rule.every, 999, rule.every)
        kept |= {min((step for step in saved if step >= one), default=0) for one in multiples}
    kept |= {
        step for step in values if sum((values[o], o) < (values[step], step) for o in values) < rule.best
    }
    return sorted(kept & set(saved))


def test_deleting_after_each_save_keeps_what_the_definition_says():
    """A run deletes after each save, while the definition sees all checkpoints that were ever saved."""
    draw = random.Random(5)
    for _ in range(400):
        saved = sorted(draw.sample(range(1, 200), draw.randint(1, 40)))
        rule = KeepRule(
            last=draw.randint(1, 4),
            every=draw.choice([None, 7, 25, 50]),
            at=tuple(draw.sample(range(1, 200), draw.randint(0, 9))),
            log_spaced=draw.random() < 0.5,
            best=draw.randint(1, 3),
        )
        values = {step: float(draw.randint(0, 9)) for step in saved if draw.random() < 0.7}
        pinned = draw.sample(saved, draw.randint(0, min(2, len(saved))))
        there = list[int]()
        for step in saved:
            there.append(step)
            known = {one: values[one] for one in there if one in values}
            best = min(known, key=lambda one: (known[one], one), default=None)
            removed = gone(there, rule, best=best, pinned=pinned, values=known)
            there = [one for one in there if one not in removed]
        assert there == expected_kept(saved, rule, best, pinned, values), (saved, rule, values)
        assert gone(there, rule, best=best, pinned=pinned, values=values) == []


@pytest.mark.parametrize(
    ("rule", "total", "most"),
    [
        (KeepRule(), 200, 5),
        (KeepRule(), None, 5),
        (KeepRule(every=50), 200, 9),
        (KeepRule(every=50), None, None),
        (KeepRule(at=(1, 500)), 200, 6),
        (replace(LOG, last=3), 200, 5 + 8),
        (replace(LOG, every=64), 128, 3 + 8),
        (KeepRule(last=None), 200, None),
        (KeepRule(best=4), 200, 8),
    ],
    ids=str,
)
def test_how_many_are_kept_at_most(rule, total, most):
    assert rule.most_kept(total, has_best=True) == most


def test_a_rule_as_text():
    rule = KeepRule(2, 1000, (500, 2000), log_spaced=True, best=2)
    assert rule.text() == "last=2,every=1000,at=500,2000,log_spaced,best=2"
    for one in (rule, KeepRule(), KeepRule(last=None), KeepRule(every=7)):
        assert KeepRule.parse(one.text()) == one
    for wrong in ("", "last", "last=0", "every=x", "3", "best=all", "last=1,last=2", "at=1,every=2,3", "a=1"):
        with pytest.raises(UsageError) as error:
            KeepRule.parse(wrong)
        said(error.value.render())


def test_the_rule_of_a_config():
    parts = {"last": 2, "every": 10, "at": (3,), "log_spaced": True, "best": 2}
    config = CheckpointConfig.model_validate({"keep": parts})
    assert KeepRule.of(config) == KeepRule(2, 10, (3,), log_spaced=True, best=2)
    assert KeepRule.of(CheckpointConfig()) == KeepRule() == KeepRule.of(CheckpointConfig(keep={}))  # type: ignore[arg-type]
    assert KeepRule.of(CheckpointConfig(keep_last=None)).last is None


def test_only_values_that_can_be_compared_count(tmp_path):
    metric = {"name": "val_loss", "mode": "min"}
    given = [
        {"metric": {**metric, "value": 3.0}},
        {"metric": {**metric, "value": 2.0}, "val_fingerprint": "other data"},
        {"metric": {"name": "loss", "mode": "min", "value": 1.0}},
        {"metric": {**metric, "value": 2.5}},
        {},
    ]
    checkpoints = [make(tmp_path, step) for step in range(1, 6)]
    for checkpoint, values in zip(checkpoints, given, strict=True):
        change(checkpoint, **values)
    assert best_values(checkpoints) == {1: 3.0, 4: 2.5}
    checkpoints[3].manifest_file.write_text("{")
    assert best_values(checkpoints) == {3: 1.0}
    change(checkpoints[4], metric={"name": "acc", "mode": "max", "value": 0.5})
    assert best_values(checkpoints) == {5: -0.5}
