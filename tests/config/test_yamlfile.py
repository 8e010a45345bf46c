"""Tests YAML files: their lines, what is no config, scalars of YAML 1.2, and values written back to YAML."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.config.yamlfile import dump, parse_value, read_yaml_file
from trainkit.errors import ConfigError


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_yaml_file(path, path.name)
    assert error.value.exit_code == 2
    return error.value.message


def test_lines_are_those_of_the_keys(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("# comment\ntrain:\n  steps: 3\n\n  log_every:\n    5\nseed: 1\n")
    tree = read_yaml_file(file, "a.yaml")
    assert {".".join(path): (entry.value, entry.origin) for path, entry in tree.leaves()} == {
        **{"train.steps": (3, "a.yaml:3"), "train.log_every": (5, "a.yaml:5"), "seed": (1, "a.yaml:7")}
    }


@pytest.mark.parametrize(
    ("content", "values", "origin"),
    [
        (b"requeue:\n  on: [crash]\n", {"requeue": {"on": ["crash"]}}, "a.yaml:1"),
        (b"model: {dim: &n 64, ffn_dim: *n}\n", {"model": {"dim": 64, "ffn_dim": 64}}, "a.yaml:1"),
        (b"\xef\xbb\xbfseed: 1\r\nname: a\r\n", {"seed": 1, "name": "a"}, "a.yaml:2"),
    ],
    ids=["on is a key", "aliases", "byte order mark and CRLF"],
)
def test_content(tmp_path, content, values, origin):
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    tree = read_yaml_file(file, "a.yaml")
    assert (tree.plain(), [*tree.value.values()][-1].origin) == (values, origin)


def test_aliases_do_not_multiply_without_end(tmp_path):
    """Ten lines of aliases stand for ten billion values."""
    file, lines = tmp_path / "a.yaml", ["a0: &a0 [1]"]
    for number in range(1, 11):
        lines.append(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]")
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        read_yaml_file(file, "a.yaml")


def test_what_is_no_config_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 10**12)
    for name in ("pipe", "large"):
        with pytest.raises(ConfigError, match="this is not a config"):
            read_yaml_file(tmp_path / name, "a.yaml")


def test_not_a_config(tmp_path):
    file = tmp_path / "a.yaml"
    for content in (b"seed: \xff\n", b"1: a\n", b"seed: !secret 1\n"):
        file.write_bytes(content)
        said(problem(file))
    for content in (b"a: 1\n---\nb: 2\n", b"a: \x00\n", b"a: @x\n"):
        file.write_bytes(content)
        found = problem(file)
        assert (found[:6], ": invalid YAML: " in found) == ("a.yaml", True)
        assert found.count("\n") == found.count("\n  hint: ") == 1


def test_all_problems_of_the_form_at_once(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("seed: 1\nseed: 2\n3: x\nname: !x y\n")
    with pytest.raises(ConfigError) as error:
        read_yaml_file(file, "a.yaml")
    assert [item.origin for item in error.value.problems] == ["a.yaml:2", "a.yaml:3", "a.yaml:4"]


def test_missing_file_and_folder(tmp_path):
    said(problem(tmp_path / "a.yaml"))
    said(problem(tmp_path).partition(": ")[2])


def test_what_yaml_would_drop_on_a_command_line_is_refused():
    for text in ("a # b", "#x", "[1, 2] # c"):
        with pytest.raises(ValueError, match="is a comment in YAML"):
            parse_value(text)
    assert parse_value("'a # b'") == "a # b"
    assert parse_value("a#b") == "a#b"


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
    **{"{a: 1, a: 2}": "duplicate key, first on line 1", "{1: a}": "a key must be text"},
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
