import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.formats import (
    duration,
    mask_secrets,
    memory_mib,
    memory_text,
    number,
    plural,
    size,
    table,
    time_limit_s,
    time_text,
    version_text,
)


def test_columns_are_as_wide_as_their_longest_cell():
    assert table([["A", "B"], ["long", "x"]]) == "A     B\nlong  x"


def test_numbers_are_aligned_on_the_right():
    assert table([["name", "GiB", "why"], ["a", "1.5", "x"]], right=[1]) == "name  GiB  why\na     1.5  x"
    assert table([["a", "1"], ["b", "100"]], right=[1]) == "a    1\nb  100"


def test_a_long_cell_overflows_instead_of_widening_its_column():
    rows = [["a", "x" * 9, "1"], ["b", "y", "2"]]
    assert table(rows, max_width=3) == f"a  {'x' * 9}  1\nb  y    2"


def test_an_empty_last_cell_leaves_no_blanks():
    assert table([["a", "b"], ["c", ""]]) == "a  b\nc"


def test_a_duration_has_two_units_at_most():
    shown = [duration(seconds) for seconds in (None, 0, 59.9, 61, 3_600, 90_000)]
    assert shown == ["-", "0s", "59s", "1m01s", "1h00m", "1d01h"]


def test_a_number_has_four_digits_that_matter():
    shown = [number(value) for value in (None, float("nan"), 0.0, 2.54112, 12345.6, 3e-4)]
    assert shown == ["-", "-", "0", "2.541", "12,346", "0.0003"]


def test_amounts_have_their_unit():
    assert [plural(*what) for what in ((1, "node"), (1200, "process"))] == ["1 node", "1,200 processes"]
    assert [size(value) for value in (0, 1023, 1536, 5 * 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 TiB",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("01:00:00", 3600),
        ("1-0", 86400),
        ("1-02", 93600),
        ("1-02:30", 95400),
        ("2-12:00:01", 216001),
        ("0", None),
        ("0:00", None),
    ],
)
def test_time(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "00:00:59"), (86400, "1-00:00:00"), (90061, "1-01:01:01")]
)
def test_time_as_text(seconds: int, text: str) -> None:
    assert time_text(seconds) == text


@given(st.integers(1, 10**8))
def test_a_time_is_read_back(seconds: int) -> None:
    assert time_limit_s(time_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "mib"),
    [("64000", 64000), ("64000M", 64000), ("64G", 65536), ("2T", 2097152), ("512K", 0.5), ("0", None)],
)
def test_memory(text: str, mib: float | None) -> None:
    assert memory_mib(text) == mib


def test_no_memory() -> None:
    with pytest.raises(ValueError, match="not an amount"):
        memory_mib("much")


@given(st.integers(1, 10**9))
def test_memory_is_read_back(mib: int) -> None:
    assert memory_mib(memory_text(mib)) == mib


@pytest.mark.parametrize(("mib", "text"), [(64000, "64000M"), (65536, "64G"), (1048576, "1T"), (0, "0M")])
def test_memory_as_text(mib: int, text: str) -> None:
    assert memory_text(mib) == text


@pytest.mark.parametrize(("version", "text"), [((22, 5, 8), "22.05.8"), ((24, 11, 0), "24.11.0")])
def test_version(version: tuple[int, ...], text: str) -> None:
    assert version_text(version) == text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgres://me:hunter2@db/x", "postgres://me:***@db/x"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("password: x, then", "password: ***, then"),
        ("DB_PASSWORD=hunter2 loss 2", "DB_PASSWORD=*** loss 2"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_-1 end", "*** end"),
        ("api_key='k' hf_abcdefghijklmnopqrstuv", "api_key='***' ***"),
        *((text, text) for text in ("http://h:80/x", "https://a/b@c", "the password was wrong", "tokens=5")),
    ],
)
def test_what_looks_secret_is_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
