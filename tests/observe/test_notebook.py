"""Tests that tables of a notebook are escaped, masked and small, and never raise an exception."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from tests.support.groups import make_group
from tests.support.said import said
from trainkit.observe.group import GroupStatus, TrialStatus
from trainkit.observe.notebook import (
    HEIGHT,
    MAX_CELL,
    MAX_KEYS,
    MAX_ROWS,
    WIDTH,
    details,
    shortened,
    sparkline,
    table,
)
from trainkit.observe.ranking import Ranking
from trainkit.run.end import Best

KEY = "sk-" + "a1B2" * 8


class Cells(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts, self.names = list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        if tag in ("td", "th"):
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("finished", "finished"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("\"a\" & 'b' </td>", "\"a\" & 'b' </td>"),
        ("läuft ✓ 走る", "läuft ✓ 走る"),
        ("two\nlines\tand  spaces", "two lines and spaces"),
        ("\x1b[31mred\x1b[0m\x00", "red"),
        ("\udcff", "?"),
        ("a\u202eb\x9b31mc", "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}31mc"),
        ("x" * 300, "x" * (MAX_CELL - 1) + "…"),
        (f"failed with {KEY}", "failed with ***"),
        ("password=hunter22", "password=***"),
        ("x" * (MAX_CELL - 10) + " " + KEY, "x" * (MAX_CELL - 10) + " ***"),
        (0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("", ""),
        (False, "False"),
        ([1, "<b>"], "[1, '<b>']"),
    ],
)
def test_a_cell(value, shown):
    for text in (details({"reason": value}), table([("reason", [value])])):
        found = Cells(text)
        assert found.texts == ["reason", shown]
        assert found.names == {"table", "tr", "th", "td"}


def test_what_is_none_is_left_out():
    assert Cells(details({"run": "a", "loss": None})).texts == ["run", "a"]
    columns = [("run", [0, 1]), ("best", [None, None]), ("loss", [None, 2])]
    assert Cells(table(columns)).texts == ["run", "loss", "0", "", "1", "2"]
    assert Cells(table([])).texts == []
    assert Cells(table([("api_key", ["hunter22"])])).texts == ["api_key", "***"]  # masked by its name


CURVES: list[list[tuple[float, float]]] = [
    *([(1, 1.0), (2, 0.5)], [(1, 1.0), (2, 1.0), (3, 1.0)], [(7, 2.0), (7, 3.0)], [(0, -1e308), (1, 1e308)]),
    *([(0, 0.0), (1, 5e-324)], [(step, math.sin(step)) for step in range(1200)]),
    *([(2**53, -1.0), (2**53 + 2, -2.0)], [(step, 10.0**-step) for step in range(300)]),
]


@pytest.mark.parametrize("points", CURVES)
def test_a_curve_stays_in_its_picture(points):
    drawn = str(sparkline(points, "loss"))
    found = re.search(r'points="([^"]*)"', drawn)
    assert found is not None
    pairs = [tuple(map(float, pair.split(","))) for pair in found[1].split()]
    assert 2 <= len(pairs) <= WIDTH + 1
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in pairs)
    assert sorted(pairs) == pairs or points[0][0] == points[-1][0]
    assert "currentColor" in drawn  # the curve has the colour of the page, which may be light or dark


def test_a_curve_falls_from_the_top_to_the_bottom_and_has_two_points():
    drawn = str(sparkline([(1, 9.0), (2, 1.0)], "loss"))
    assert 'points="2.0,2.0 118.0,22.0"' in drawn
    assert "loss from 9 to 1" in drawn
    assert sparkline([], "loss") is sparkline([(1, 1.0)], "loss") is None


class Raises:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Quotes:
    def __repr__(self) -> str:
        return "<b>" * 1000


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        (None, "None"),
        ("text", "'text'"),
        ({"loss": 0.5, "n": [1, 2]}, "{'loss': 0.5, 'n': [1, 2]}"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        (KEY, "'***'"),
        ({"note": [KEY + "x" * 500]}, "{'note': ['***']}"),
        (math.nan, "nan"),
        (10**50, "100000000000000000...0000000000000000000"),
    ],
)
def test_a_result(value, shown):
    assert shortened(value) == shown


def test_a_result_whose_repr_is_broken_or_long_leaves_the_table():
    assert "Raises" in shortened(Raises())
    assert len(shortened(Quotes())) < 2 * MAX_CELL
    found = Cells(details({"result": shortened(Quotes())}))
    assert found.names == {"table", "tr", "th", "td"}


def group(num_trials: int, num_keys: int = 1, state: str = "finished", **values: object) -> GroupStatus:
    """Return a group whose last trial has failed."""
    keys, last = [f"key{number}" for number in range(num_keys)], num_trials - 1
    points = []
    for index in range(num_trials):
        written = {**dict.fromkeys(keys, index), **values}
        ended = ("failed", "rank 0: <b>LookupError</b>") if index == last else (state, None)
        best = Best("val_loss", 1 / (index + 1), 5)
        points.append(TrialStatus(index, written, *ended, None, best, f"/runs/{index}", written=written))
    named = [*keys, *values]
    return GroupStatus("lr <sweep>", "/runs", None, "", named, 1, 1, None, points, Ranking("val_loss"))


def test_a_group():
    found = group(3)
    said(repr(found))
    cells = Cells(found._repr_html_())
    assert cells.texts == [
        *("run", "key0", "state", "best val_loss", "reason"),
        *("0", "0", "finished", "1", ""),
        *("1", "1", "finished", "0.5", ""),
        *("2", "2", "failed", "0.3333", "rank 0: <b>LookupError</b>"),
    ]
    assert cells.names == {"p", "table", "tr", "th", "td"}
    assert "lr &lt;sweep&gt;" in found._repr_html_()


def test_a_large_group_shows_its_failures_and_says_what_it_leaves_out():
    found = group(1000, 1000)
    text = found._repr_html_()
    cells = Cells(text)
    assert len(cells.texts) == (1 + MAX_ROWS) * (4 + MAX_KEYS)
    assert cells.texts[-5 - MAX_KEYS + 1] == "999"
    assert re.findall(r"(\d+) of 1,000", text) == [str(MAX_ROWS), str(MAX_KEYS)]
    assert len(repr(found)) < 200


def test_keys_that_are_called_as_a_column_keep_their_own():
    texts = Cells(group(1, 0, run="r", best="s", loss=2)._repr_html_()).texts
    assert texts[:6] == ["run", "run", "best", "loss", "state", "best val_loss"]
    assert texts[7:12] == ["0", "r", "s", "2", "failed"]


def test_a_group_that_has_not_started(tmp_path):
    from trainkit.observe.current import read_group

    found = read_group(make_group(tmp_path, {0: {"optimizer.lr": 0.1}}), lambda ids: None)
    assert Cells(found._repr_html_()).texts[:3] == ["run", "optimizer.lr", "state"]
