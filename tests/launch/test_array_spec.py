"""Tests ``--array`` as it is typed, and as Slurm gets it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.errors import UsageError
from trainkit.launch.sweep import ArraySpec, parse_array
from trainkit.scheduler import array_indices


@pytest.mark.parametrize(
    ("text", "indices", "limit", "directive"),
    [
        ("0-3", (0, 1, 2, 3), None, "0-3"),
        ("0-9%4", tuple(range(10)), 4, "0-9%4"),
        ("5,1,3", (1, 3, 5), None, "1,3,5"),
        ("1-2,4,5-6%1", (1, 2, 4, 5, 6), 1, "1-2,4-6%1"),
        ("0-20:10", (0, 10, 20), None, "0,10,20"),
        ("7", (7,), None, "7"),
        ("%4", (), 4, "%4"),
    ],
)
def test_arrays(text: str, indices: tuple[int, ...], limit: int | None, directive: str) -> None:
    spec = parse_array(text)
    assert (spec.indices, spec.limit, spec.directive) == (indices, limit, directive)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the indices of a job array: ''"),
        ("a-b", "not the indices of a job array"),
        ("0-9%", "'' is not a number of concurrent tasks"),
        ("0-9%0", "'0' is not a number"),
        ("0-9%x", "'x' is not a number"),
        ("1,1", "it repeats an index"),
        ("0-3,2", "it repeats an index"),
        ("9-0", "it contains no indices"),
        ("0-200000", "200,001 tasks; the maximum is 100,000"),
        ("-1", "not the indices of a job array"),
    ],
)
def test_no_arrays(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_array(text)
    assert message in caught.value.message
    assert caught.value.hint


@given(st.sets(st.integers(0, 300), min_size=1))
def test_slurm_reads_the_same_indices(indices: set[int]) -> None:
    spec = ArraySpec(tuple(sorted(indices)), None)
    assert array_indices(spec.directive) == sorted(indices)
