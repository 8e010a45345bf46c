import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.formats import (
    duration,
    hours_text,
    memory_mib,
    memory_text,
    number,
    plural,
    result_text,
    size,
    slurm_memory,
    table,
    time_limit_s,
    time_text,
    version_text,
    worker_time,
)


def test_a_table():
    assert table([["A", "B"], ["long", "x"]]) == "A     B\nlong  x"
    assert table([["name", "GiB", "why"], ["a", "1.5", "x"]], right=[1]) == "name  GiB  why\na     1.5  x"
    assert table([["a", "1"], ["b", "100"]], right=[1]) == "a    1\nb  100"
    rows = [["a", "x" * 9, "1"], ["b", "y", "2"]]
    assert table(rows, max_width=3) == f"a  {'x' * 9}  1\nb  y    2"
    assert table([["a", "b"], ["c", ""]]) == "a  b\nc"


def test_narrow_columns_wrap_and_more_columns_follow_below():
    rows = [["run", "where", "n"], ["a", "/one/two/three/four/five", "1"]]
    assert table(rows, fit=80) == table(rows)
    wrapped = "run  where           n\na    /one/two/three  1\n     /four/five"
    assert table(rows, right=[2], fit=22) == wrapped
    many = [[f"head-{index}" for index in range(6)], ["key", *"12345"]]
    first, second = "head-0  head-1  head-2\nkey     1       2", "head-0  head-3  head-4\nkey     3       4"
    assert table(many, fit=24) == f"{first}\n\n{second}\n\nhead-0  head-5\nkey     5"


SHOWN = [
    # A duration has at most two units.
    (duration, {None: "-", 0: "0s", 59.9: "59s", 61: "1m01s", 3_600: "1h00m", 90_000: "1d01h"}),
    # A number has four significant digits.
    (
        number,
        {
            None: "-",
            math.nan: "-",
            0.0: "0",
            2.54112: "2.541",
            12345.6: "12,346",
            9999.6: "10,000",
            -9999.4: "-9999",
            -1e300: "-1e+300",
            3e-4: "0.0003",
        },
    ),
    # Less than 0.1 hours are shown in minutes and seconds.
    (
        hours_text,
        {None: "-", 0.0: "0.0 s", 0.0004669: "1.7 s", 0.0166: "59.8 s", 0.05: "3.0 min", 0.1: "0.1"},
    ),
    (hours_text, {0.0999: "6.0 min", 2.54112: "2.54", 123456.7: "123,457"}),
    (size, {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 5 * 2**40: "5.0 TiB"}),
    (time_limit_s, {"90": 5400, "10:30": 630, "01:00:00": 3600, "0": None, "0:00": None}),
    (time_limit_s, {"1-0": 86400, "1-02": 93600, "1-02:30": 95400, "2-12:00:01": 216001}),
    (time_text, {59: "00:00:59", 86400: "1-00:00:00", 90061: "1-01:01:01"}),
    (memory_mib, {"64000": 64000, "64000M": 64000, "64G": 65536, "2T": 2097152, "512K": 1, "0": None}),
    (memory_mib, {"28GB": 28672, "3584MB": 3584, "100g": 102400, "3.5G": 3584, "100GiB": 102400, "0G": None}),
    (
        memory_mib,
        {"64 G": 65536, "1.5tb": 1572864, "1048577B": 2, "1048576 bytes": 1, "0.1G": 103, "1P": 2**30},
    ),
    (memory_mib, {"28Gn": 28672, "4000Mn": 4000, "62.50G": 64000}),  # sacct prints these forms
    (
        slurm_memory,
        {"64000": "64000", "64G": "64G", "0": "0", "3.5 GiB": "3584M", "2048mb": "2G", "0gb": "0M"},
    ),
    (memory_text, {64000: "64000M", 65536: "64G", 1048576: "1T", 0: "0M"}),
    (version_text, {(22, 5, 8): "22.05.8", (24, 11, 0): "24.11.0"}),
    (lambda amount: plural(*amount), {(1, "node"): "1 node", (1200, "process"): "1,200 processes"}),
    (
        lambda hours: worker_time(hours, "GPU"),
        {3.2: "3.2 GPU-hours", 0.075: "4.5 GPU-minutes", 0.0004669: "1.7 GPU-seconds", 0: "0.0 GPU-seconds"},
    ),
    # A small result keeps the digits that matter.
    (result_text, {9e-07: "9e-07", -9e-07: "-9e-07", 0.0: "0.0000", 0.001: "0.0010", 2.5: "2.5000"}),
    (result_text, {12345.678: "12345.6780", math.nan: "nan", None: "-"}),
]


@pytest.mark.parametrize(("function", "expected"), SHOWN)
def test_what_is_shown_and_read(function: Callable[[Any], Any], expected: dict[Any, Any]) -> None:
    assert {value: function(value) for value in expected} == expected


@pytest.mark.parametrize(
    "text",
    ["much", "", "G", "3.5", "3,5G", "1,024M", "-1G", "1e3G", "28Gc", "4000Mc", "64G\n", "64 gigs", "٣G"],
)
def test_no_amounts_of_memory(text: str) -> None:
    for read in (memory_mib, slurm_memory):
        with pytest.raises(ValueError, match="is not an amount of memory"):
            read(text)


@given(st.integers(1, 10**8))
def test_what_is_shown_is_read_back(value: int) -> None:
    assert time_limit_s(time_text(value)) == value
    assert memory_mib(memory_text(value)) == value
