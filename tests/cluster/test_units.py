"""Times, memory and versions as Slurm writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.formats import memory_mib, memory_text, time_limit_s, time_text, version_text


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
