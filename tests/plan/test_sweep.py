"""Tests the values of ``--sweep``, and how configs differ."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.cli.usage import _cut_setting
from trainkit.errors import UsageError
from trainkit.formats import short_keys, shown
from trainkit.plan.sweep import _meant_values, filled_in, parse_axis, sweep_trials
from trainkit.run.files import changed, difference


@pytest.mark.parametrize(
    ("text", "values"),
    [
        *(("optimizer.lr=1e-4,3e-4", (1e-4, 3e-4)), ("train.epochs=1, null", (1, None))),
        ("parallel.compile=true,false", (True, False)),
        ("resources.time=01:00:00,02:00:00", ("01:00:00", "02:00:00")),
        ('data.source="a,b.txt",c d', ("a,b.txt", "c d")),
        ("data.source=[a.txt,b.txt],[c.txt]", (["a.txt", "b.txt"], ["c.txt"])),
        ("model={preset: nano},{preset: tiny}", ({"preset": "nano"}, {"preset": "tiny"})),
        *(("launch.env.LR=0x10,'1'", ("0x10", "1")), ("seed=1,2,", (1, 2)), ("seed=7", (7,))),
        ("optimizer.lr=1,1.0", (1, 1.0)),  # equal numbers of two types are two points
        ("launch.env.A=1e-4,007,true,x,'2'", ("1e-4", "007", "true", "x", "2")),
    ],
)
def test_values_are_those_of_a_yaml_list(text, values):
    key, found = parse_axis(text)
    assert (key, found) == (text.partition("=")[0], [*values])
    assert [type(value) for value in found] == [type(value) for value in values]


def test_no_hint_is_a_list_of_nothing():
    assert {_meant_values(("optimizer", "lr"), raw) for raw in ("()", "choice()", "{ }")} == {None}
    said("\n".join(_cut_setting(["submit", "--set", "lr", "0.1"])))


NO_SWEEPS = (
    *("=1", "seed=", "seed=1,,2", "seed=1],[2"),
    "seed=1 # 2",
    *("seed=1,2,1", "optimizer.lrr=1", "name=a,b"),
)


def test_what_is_no_sweep():
    for text in NO_SWEEPS:
        with pytest.raises(UsageError) as caught:
            parse_axis(text)
        said(f"{caught.value.message}\n{caught.value.hint}")
    with pytest.raises(UsageError, match="--sweep seed appears twice"):
        sweep_trials(["seed=1", "seed=2"])
    hundred = ",".join(map(str, range(100)))
    with pytest.raises(UsageError, match="1,000,000 combinations; the maximum is 100,000"):
        sweep_trials([f"{key}={hundred}" for key in ("seed", "train.steps", "data.seq_len")])


def test_a_command_can_contain_swept_values():
    command = ("python", "train.py", "--lr={lr}", '{"lr": {lr}}', "{optimizer.lr}", "{other}")
    trials = sweep_trials(["lr=1e-4,3e-4", "optimizer.lr=0.5"], command)
    assert trials == [{"lr": "1e-4", "optimizer.lr": 0.5}, {"lr": "3e-4", "optimizer.lr": 0.5}]
    filled = ("python", "train.py", "--lr=3e-4", '{"lr": 3e-4}', "0.5", "{other}")
    assert filled_in(command, trials[1]) == filled
    with pytest.raises(UsageError, match="unknown key rate") as caught:
        sweep_trials(["rate=1,2"], command)
    said(caught.value.hint)


def test_every_combination_the_last_key_fastest():
    expected = [{"optimizer.lr": lr, "seed": seed} for lr in (1e-4, 3e-4) for seed in (1, 2)]
    assert sweep_trials(["optimizer.lr=1e-4,3e-4", "seed=1,2"]) == expected


def test_for_people():
    said(shown({"optimizer.lr": 0.1, "data.source": "a b", "train.epochs": None}))
    assert short_keys(["optimizer.lr", "train.steps"]) == ["lr", "steps"]
    assert short_keys(several := ["model.dropout", "other.dropout", "seed"]) == several


def test_a_difference_names_only_what_changed():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": {"x": 1}}
    other = {"a": {"b": 2, "c": [1, 2]}, "d": 0, "e": {"y": 1}, "f": {}}
    assert difference(base, other) == {"a.b": 2, "d": 0, "e": {"y": 1}, "f": {}}
    assert difference(base, base) == {}
    assert difference({"a": 1}, {"a": True}) == {"a": True}
    assert difference({"env": {"A": 1}}, {"env": {"A": 1, "b.c": 2}}) == {"env": {"A": 1, "b.c": 2}}
    # Changes leave the base as it is.
    base = {"a": {"b": {"c": 1}}}
    assert changed(base, {"a.b.c": 2}) == {"a": {"b": {"c": 2}}}
    assert base == {"a": {"b": {"c": 1}}}


_NAMES = st.text("ab.c", min_size=1, max_size=3)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2),
    lambda inner: st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)
_TOP = st.fixed_dictionaries({"x": _VALUES, "y": _VALUES, "z": _VALUES})


@given(_TOP, _TOP)
def test_any_difference_leads_from_one_to_the_other(base, other):
    found = changed(base, difference(base, other))
    assert json.dumps(found, sort_keys=True) == json.dumps(other, sort_keys=True)


def test_a_section_is_no_axis():
    other = "use another name: --sweep data_value=/a,/b, and {data_value} in the COMMAND"
    for command, hint in (((), "for example --sweep data.source=…"), (("python", "{data}"), other)):
        with pytest.raises(UsageError, match=r"data is a section of the config") as raised:
            parse_axis("data=/a,/b", command)
        assert raised.value.hint == hint
    assert parse_axis("data={source: /a},{source: /b}")[1] == [{"source": "/a"}, {"source": "/b"}]
