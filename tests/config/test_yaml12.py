"""Tests scalars of YAML 1.2, the traps of YAML 1.1, and values on the way to YAML and back."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainkit.config.yamlfile import dump, parse_value

VALUES: dict[str, Any] = {
    **{"true": True, "False": False, "null": None, "~": None, "": None},
    **{"3e-4": 3e-4, "1e4": 1e4, "3.0e-4": 3e-4, ".5": 0.5, "-1": -1, "+7": 7, "010": 10, "0o17": 15},
    **{"0x1F": 31, '"200"': "200", "'true'": "true", "!!str 200": "200", "!!float 2": 2.0},
    **{"[1, two, 3.0]": [1, "two", 3.0], "{preset: nano}": {"preset": "nano"}},
    **{
        text: text
        for text in ("yes", "on", "off", "NO", "01:00:00", "10:30", "1_000", "2026-01-31", "1b", "8b")
    },
}


@pytest.mark.parametrize("text", VALUES)
def test_value(text):
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (VALUES[text], type(VALUES[text]))


NOT_VALUES = {
    "[1, 2": "[1, 2 is not valid YAML: while parsing a flow sequence, did not find expected ',' or ']'",
    "!!python/name:os.system x": "the tag tag:yaml.org,2002:python/name:os.system is not supported",
    "!!int two": "the tag tag:yaml.org,2002:int is not supported",
    "{a: 1, a: 2}": "duplicate key, first on line 1",
    "{1: a}": "a key must be text",
    "&a [*a]": "the value contains an alias that refers to the value itself",
}


@pytest.mark.parametrize("text", NOT_VALUES)
def test_not_a_value(text):
    with pytest.raises(ValueError, match=f"^{re.escape(NOT_VALUES[text])}$"):
        parse_value(text)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
printable = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]))
values = st.recursive(
    scalars | printable,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(printable, inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_dump_comes_back(value):
    assert parse_value(dump(value)) == value


@given(printable)
def test_dumped_text_is_text_for_a_yaml_1_1_reader_too(text):
    assert yaml.safe_load(dump({"key": text})) == {"key": text}


def test_words_that_one_yaml_takes_for_something_else_stay_text():
    for text in ("on", "yes", "3e-4", "1e5", "01:00:00", "12:30:45", "0o17", "null", "~", ""):
        assert parse_value(dump(text)) == yaml.safe_load(dump(text)) == text
