"""Tests the values of trials: which ones are numbers, and how the arguments of a call are stored."""

import argparse
import math
import os
import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from trainkit.run.files import write_json
from trainkit.run.group import GroupRecord, Trial
from trainkit.run.rundir import RunDir
from trainkit.run.trial import MAX_PARTS, SweeperTrial, as_number, group_values, trial_values, values_of

Pair = namedtuple("Pair", "lr betas")


class Kind(Enum):
    SMALL = 1


@dataclass
class Settings:
    lr: float = 0.1
    path: Path = Path("a")
    inner: dict = field(default_factory=lambda: {"depth": 2})


@dataclass
class Asked:
    """Has the attributes of a trial of Optuna or a job of Hydra."""

    number: int
    params: dict


class Plain:
    pass


class Fails:
    def __repr__(self) -> str:
        raise ValueError("no text")


NO_NUMBERS = (
    *("007", "1_000", "1,5", "0x10", "1e999", "nan", "inf", "-inf", "true", "null", "", " 1", "1 ", "1e"),
    *("e1", "--1", "+", ".", "1.2.3", "٣", "½", "9" * 41),
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1e-4", 1e-4), ("0.1", 0.1), (".5", 0.5), ("5.", 5.0), ("-3", -3), ("+2", 2), ("0", 0)),
        ("1E3", 1000.0),
        *((text, text) for text in NO_NUMBERS),
        *((other, other) for other in (None, True, 0.5, [1], {"a": 1})),
    ],
)
def test_a_text_that_is_a_number_is_one(text, number):
    found = as_number(text)
    assert (found, type(found)) == (number, type(number))


SIMPLE = (None, True, False, 0, -1, 0.1, "a", "", "1e-4", "ü 模", [1, 2], [0.9, 0.95])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        *((value, value) for value in SIMPLE),
        *(((1, "a"), [1, "a"]), ([[1, 2], [3]], [[1, 2], [3]]), ([], [])),
        *((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), ([math.nan], ["nan"])),
        *((Path("a/b"), "a/b"), (Kind.SMALL, "SMALL"), (np.float32(0.1), 0.1), (np.int64(3), 3)),
        *((np.float64(1e-4), 1e-4), (1 + 2j, "(1+2j)"), (b"ab", "b'ab'"), (range(3), "range(0, 3)")),
        *((print, "print"), (Kind, "Kind"), (Plain(), "<test_trial.Plain object>"), (os.environ, None)),
        *((2**4000, None), ("x" * 1000, "x" * 99 + "…"), (list(range(10_000)), None), (Fails(), None)),
        (np.arange(1_000_000), None),
    ],
)
def test_an_argument_is_a_value(value, kept):
    """None stands for some short text."""
    found = trial_values({"x": value})["x"]
    if kept is None and value is not None:
        assert isinstance(found, str)
        assert 0 < len(found) <= 100
    else:
        text = found.replace("tests.run.", "") if isinstance(found, str) else found
        assert (text, type(text)) == (kept, type(kept))


PARTS = {"lr": 0.1, "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    "value",
    [
        *(PARTS, OrderedDict(lr=0.1, betas=(0.9, 0.95)), Pair(0.1, [0.9, 0.95])),
        *(argparse.Namespace(**PARTS), types.SimpleNamespace(**PARTS)),
    ],
)
def test_the_parts_of_an_argument_are_values(value):
    assert trial_values({"config": value}) == {"config.lr": 0.1, "config.betas": [0.9, 0.95]}


def test_parts_of_parts():
    found = trial_values({"config": Settings(), "seed": 3})
    assert found == {"config.lr": 0.1, "config.path": "a", "config.inner.depth": 2, "seed": 3}
    assert trial_values({"config": {}, "kind": Settings}) == {"kind": "Settings"}


def test_a_trial_has_the_names_that_it_gives():
    trial = Asked(4, {"lr": "1e-4", "optimizer.name": "sgd", "layers": {"depth": 2}})
    assert isinstance(trial, SweeperTrial)
    values = {"lr": "1e-4", "optimizer.name": "sgd", "layers.depth": 2}
    assert trial_values({"trial": trial}) == values
    assert trial_values({"trial": Asked(0, {})}) == {}


def test_a_trial_of_optuna():
    optuna = pytest.importorskip("optuna")
    trial = optuna.create_study().ask()
    lr, depth = trial.suggest_float("lr", 1e-5, 1e-1, log=True), trial.suggest_int("depth", 1, 4)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    assert trial_values({"trial": trial}) == {"lr": lr, "depth": depth, "kind": kind}
    frozen = optuna.trial.FixedTrial({"lr": 0.1})
    frozen.suggest_float("lr", 0, 1)
    assert trial_values({"trial": frozen}) == {"lr": 0.1}


def test_omegaconf():
    values = {"base": 0.1, "lr": "${base}", "data": "???", "d": {"n": 2}}
    conf = pytest.importorskip("omegaconf").OmegaConf.create(values)
    expected = {"config.base": 0.1, "config.lr": "${base}", "config.data": "???", "config.d.n": 2}
    assert trial_values({"config": conf}) == expected


def test_secrets_are_masked_before_they_are_shortened():
    found = trial_values({"api_key": "abcdef123", "config": {"password": "hunter2", "lr": 0.1}})
    assert found == {"api_key": "***", "config.password": "***", "config.lr": 0.1}
    url = f"https://me:{'p4ssw0rd' * 12}@host/"
    held = types.SimpleNamespace(url=url)
    found = trial_values({"url": url, "several": [url], "wide": [url] * 30, "deep": [[[url]]], "held": held})
    assert "p4ssw0rd" not in str(found)
    assert trial_values({"password": ["hunter2", "hunter3"]}) == {"password": ["***", "***"]}


@pytest.mark.parametrize("params", [None, [1, 2], (), "lr"])
def test_what_has_a_number_and_params_of_another_kind_is_no_trial(params):
    found = trial_values({"layer": types.SimpleNamespace(number=3, params=params), "lr": 0.1})
    assert (found["layer.number"], found["lr"]) == (3, 0.1)


class Raises:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


class Lost(dict):
    def items(self) -> object:
        raise RuntimeError("no items")


@pytest.mark.parametrize("make", [Raises, lambda: [Raises()], lambda: {"a": Raises()}, Lost, MagicMock])
def test_any_object_has_some_text(make):
    value = make()
    found = trial_values({"x": value, "lr": 0.1})
    assert found.pop("lr") == 0.1
    assert found
    assert group_values([{"x": value}])


def test_what_is_huge_or_contains_itself_is_short():
    own: dict = {}
    own.update(own=own, also=own)
    assert len(trial_values({"own": own})) <= MAX_PARTS
    wide = {f"k{index}": index for index in range(MAX_PARTS + 1)}
    found = trial_values({"wide": wide, "lr": 1})
    assert (len(found), max(len(str(value)) for value in found.values()) <= 100) == (2, True)


def test_a_group_has_the_parts_that_differ():
    base = {"depth": 2, "width": 64}
    trials = [{"config": {**base, "lr": lr}, "seed": 0, "model": Plain()} for lr in (0.1, 0.2)]
    assert group_values(trials) == [{"config.lr": 0.1, "seed": 0}, {"config.lr": 0.2, "seed": 0}]
    assert " ".join(group_values(trials[:1])[0]) == "config.depth config.width config.lr seed model"
    given = [{"lr": n, "model": "big"} for n in (0, 1)]
    assert group_values([{"trial": Asked(n, values)} for n, values in enumerate(given)]) == given
    assert group_values([{"config": {"a": 1}}, {"config": {}}]) == [{"config.a": 1}, {}]
    assert group_values([]) == []


def test_the_values_of_a_run_and_of_one_of_a_group(tmp_path):
    run = RunDir(tmp_path / "alone")
    run.path.mkdir()
    assert values_of(run) == {}
    write_json(run.values_file, {"lr": "1e-4"})
    assert values_of(run) == {"lr": "1e-4"}
    run.values_file.write_text('{"lr": ')
    assert values_of(run) == {}
    group = tmp_path / "group"
    group.mkdir()
    write_json(group / "sweep.json", GroupRecord(name="group").to_dict([Trial(0, {"lr": 0.1})]))
    assert values_of(RunDir(group / "0")) == {"lr": 0.1}
    assert values_of(RunDir(group / "1")) == {}
