"""Tests that checkpoint.keep and its old form, checkpoint.keep_last, are one rule in all layers."""

import pytest

from tests.support.said import said
from trainkit.config import dump_effective, load_config
from trainkit.config.validation import doubts
from trainkit.errors import ConfigError
from trainkit.plan.keep import KeepRule


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        (tmp_path / "run.yaml").write_text(text)
        return load_config("run.yaml", overrides=overrides, environ={}, cwd=tmp_path)

    return load


BOTH = "checkpoint: {keep_last: 5, keep: {every: 100}}"
LAST, EVERY = "checkpoint: {keep_last: 5}", "checkpoint: {keep: {every: 100}}"


@pytest.mark.parametrize(
    ("text", "override", "rule"),
    [
        ("{}", "checkpoint.keep_last=2", KeepRule(2)),
        ("{}", "checkpoint.keep={at: [3]}", KeepRule(at=(3,))),
        (LAST, "checkpoint.keep.every=100", KeepRule(5, every=100)),
        (LAST, "checkpoint.keep={last: 2}", KeepRule(2)),
        (EVERY, "checkpoint.keep_last=5", KeepRule(5, every=100)),
        (EVERY, "checkpoint.keep_last=null", KeepRule(None, every=100)),
        (LAST, "checkpoint.keep=null", KeepRule(5)),
    ],
)
def test_both_forms_in_several_layers(load, text, override, rule):
    config = load(text, override).config
    assert KeepRule.of(config.checkpoint) == rule
    again = load(dump_effective(config)).config
    assert again == config
    assert KeepRule.of(load(dump_effective(config), "checkpoint.keep_last=7").config.checkpoint).last == 7
    own = KeepRule.of(load(dump_effective(config), "checkpoint.keep.best=2").config.checkpoint)
    assert (own.last, own.every, own.best) == (rule.last, rule.every, 2)


def test_what_is_refused_or_warned_of(load):
    for text in (
        BOTH,
        "checkpoint: {keep: {best: 2}, best_metric: null}",
        "checkpoint: {keep: {every: 0}}",
        "checkpoint: {keep: {first: 1}}",
        "checkpoint: {keep: 3}",
    ):
        with pytest.raises(ConfigError) as error:
            load(text)
        said(error.value.render())
    config = load("{checkpoint: {keep: {every: 150, at: [7, 300]}}, train: {steps: 200}}")
    said("\n".join(doubts(config, trains=True)))
    config = load("{checkpoint: {every_steps: null, every_minutes: 5, keep: {every: 150}}}")
    said("\n".join(doubts(config, trains=True)))
    assert (
        list(doubts(load("checkpoint: {every_steps: 50, keep: {every: 150, log_spaced: true}}"), True)) == []
    )
