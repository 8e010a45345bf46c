"""What is printed for us to read, cut up again."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.slurm.client import FIELD, RECORD, records, seconds_of, time_of

PLAIN = st.text(st.characters(blacklist_characters=FIELD + RECORD + "\n", blacklist_categories=["Cs"]))
NAME = st.text(st.characters(blacklist_categories=["Cs"])).filter(lambda name: f"{RECORD}\n" not in name)


@given(st.lists(st.tuples(PLAIN, PLAIN, NAME)))
def test_any_name_comes_back(rows: list[tuple[str, str, str]]) -> None:
    text = "".join(FIELD.join(row) + RECORD + "\n" for row in rows)
    assert [tuple(row) for row in records(text, 3)] == rows


def test_names_of_clusters_between_records() -> None:
    text = f"CLUSTER: west\n1{FIELD}a{RECORD}\nCLUSTER: east\n2{FIELD}b{RECORD}\n"
    assert list(records(text, 2)) == [["1", "a"], ["2", "b"]]


def test_what_is_cut_off_is_left_out() -> None:
    text = f"1{FIELD}a{RECORD}\n2{FIELD}b{RECORD}\n3"
    assert list(records(text, 2)) == [["1", "a"], ["2", "b"]]
    assert list(records("", 2)) == []


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", "", "0", "2024-01-01T00:00:00"])
def test_no_time(text: str) -> None:
    assert time_of(text) is None


def test_time() -> None:
    assert time_of("1700000000") == datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:05", 5), ("05:00", 300), ("1:00:00", 3600), ("2-03:04:05", 183845), ("10-00:00:00", 864000)],
)
def test_seconds(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["UNLIMITED", "INVALID", "NOT_SET", "N/A", "NONE", "infinite", "", "5", "-1:00", "a-1:00:00"]
)
def test_no_duration(text: str) -> None:
    assert seconds_of(text) is None
