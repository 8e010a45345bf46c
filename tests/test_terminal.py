"""Tests hostile and wide texts in a terminal: their width, their style, and that they do not control it."""

import json
import re
from collections.abc import Sequence

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.formats import table
from trainkit.terminal import (
    STATE_STYLES,
    Styled,
    cut,
    cut_in_the_middle,
    painted,
    plain,
    state_style,
    text_width,
    wrapped,
)

WIDTHS = {
    "": 0,
    "lr=0.1": 6,
    "müller": 6,
    "mu\N{COMBINING DIAERESIS}ller": 6,
    "表": 2,
    "学習率-0.1": 10,
    "ｱｲ": 2,
    "Ａ１": 4,
    "한국어": 6,
    "\N{ROCKET}": 2,
    "a\N{ZERO WIDTH SPACE}b": 2,
    "\N{ARABIC LETTER ALEF}\N{ARABIC FATHA}": 1,
    "…": 1,
}


@pytest.mark.parametrize("text", WIDTHS)
def test_the_columns_of_a_text(text: str) -> None:
    assert text_width(text) == WIDTHS[text]


HOSTILE = {
    "\x1b[31mred": "red",
    "\x1b[8mhidden\x1b[0m": "hidden",
    "\x1b]0;title\x07": "\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}",
    "\x1b[2J\x1b[H": "\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}[H",
    "\x9b31m": "\N{REPLACEMENT CHARACTER}31m",
    "a\u202eb": "a\N{REPLACEMENT CHARACTER}b",
    "two\nlines": "two lines",
    "over\rwritten": "over written",
    "tab\tback\b": "tab back ",
    "\x00": "\N{REPLACEMENT CHARACTER}",
    "é 表": "é 表",
    "\udcff": "\udcff",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_controls_no_terminal(text: str) -> None:
    assert plain(text) == painted(text) == HOSTILE[text]
    assert painted(Styled(text, "bold red")) == f"\x1b[1;31m{HOSTILE[text]}\x1b[0m"
    assert table([["a", text, "c"]]) == f"a  {HOSTILE[text]}  c"


def test_a_styled_text_is_that_text_elsewhere() -> None:
    text = Styled("failed", "bold red")
    assert text == "failed"
    assert json.dumps({"state": text}) == '{"state": "failed"}'
    assert click.unstyle(painted(text)) == text
    assert {state_style(state) for state in STATE_STYLES} == {"green", "bold red"}
    assert state_style("pending") == state_style("a state of a later version") == "yellow"


CUT = [
    ("runs/a", 6, "runs/a", "runs/a"),
    ("runs/quickstart-12", 12, "runs/quicks…", "runs/q…rt-12"),
    ("/home/me/projects/vision/runs/resnet-50", 24, "/home/me/projects/visio…", "/hom…sion/runs/resnet-50"),
    ("/a/b", 3, "/a…", "/…b"),
    ("学習率/表", 6, "学習…", "…率/表"),
    ("学習率の実験", 7, "学習率…", "学…実験"),
    ("x" * 1000, 5, "xxxx…", "xx…xx"),
    ("abc", 1, "…", "…"),
    ("", 0, "", ""),
]


@pytest.mark.parametrize(("text", "room", "at_end", "in_middle"), CUT)
def test_a_text_is_cut(text: str, room: int, at_end: str, in_middle: str) -> None:
    assert (cut(text, room), cut_in_the_middle(text, room)) == (at_end, in_middle)


@settings(max_examples=40)
@given(st.text(), st.integers(1, 40))
def test_what_is_cut_or_wrapped_fits(text: str, room: int) -> None:
    assert text_width(cut(text, room)) <= room
    assert text_width(cut_in_the_middle(text, room)) <= room
    lines = wrapped(plain(text), max(2, room))
    assert max(map(text_width, lines)) <= max(2, room)
    assert "".join("".join(lines).split()) == "".join(plain(text).split())


NAMES = (
    "runs/a",
    "runs/" + "x" * 300,
    "/a/very/long/folder/that/is/elsewhere/in/the/file/system/runs/quickstart-2",
    "runs/学習率の実験、とても長い名前のもの、もっと長い名前のもの",
    "runs/\x1b[31mred\x1b[0m",
    "runs/two\nlines",
    "runs/\N{ROCKET}\N{ROCKET}\N{ROCKET}" * 12,
)


@pytest.mark.parametrize("fit", [60, 80, 100, 120, 200])
def test_a_row_of_a_table_that_cuts_is_one_line(fit: int) -> None:
    rows: list[Sequence[str]] = [("RUN", "STATE", "STEP", "LOSS")]
    rows += [(name, Styled("failed", "bold red"), "10/20", "diverged since step 15") for name in NAMES]
    lines = table(rows, fit=fit, cuts=True).splitlines()
    assert len(lines) == len(rows)
    assert all(text_width(click.unstyle(line)) <= fit for line in lines)
    assert len({text_width(click.unstyle(line).partition("failed")[0]) for line in lines[1:]}) == 1
    assert all(re.findall(r"\x1b\[[\d;]*m", line) == ["\x1b[1;31m", "\x1b[0m"] for line in lines[1:])
