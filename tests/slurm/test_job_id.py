"""Job ids and the indices of arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.errors import UsageError
from trainkit.slurm.states import array_indices, base_id, checked_job_id, expand_tasks, is_job_id


@pytest.mark.parametrize("text", ["1", "123456789", "123_0", "123_42"])
def test_job_ids(text: str) -> None:
    assert is_job_id(text)
    assert checked_job_id(text) == text


@pytest.mark.parametrize(
    "text", ["", "-1", "a", "1 ", "1;2", "1_", "_1", "1_[2-3]", "1.0", "1_2_3", "--all", "1\n", "١"]
)
def test_no_job_ids(text: str) -> None:
    assert not is_job_id(text)
    with pytest.raises(UsageError, match="is not a Slurm job id"):
        checked_job_id(text)


def test_base_id() -> None:
    assert [base_id(text) for text in ("12", "12_3", "12_[4-9%2]", "12+1")] == ["12"] * 4


def test_expand_tasks() -> None:
    assert expand_tasks("12_[5-7,9%2]") == ["12_5", "12_6", "12_7", "12_9"]
    assert expand_tasks("12_5") == ["12_5"]
    assert expand_tasks("12") == ["12"]


@pytest.mark.parametrize(
    ("spec", "indices"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("1,3,5", [1, 3, 5]),
        ("0-15:5,20%2", [0, 5, 10, 15, 20]),
        ("7", [7]),
        ("3-1", []),
    ],
)
def test_array_indices(spec: str, indices: list[int]) -> None:
    assert array_indices(spec) == indices


@pytest.mark.parametrize("spec", ["", "a", "1-", "1--2", "1,,2", "-1", "1-2:", "0-9:0", "1;2"])
def test_no_array_indices(spec: str) -> None:
    with pytest.raises(UsageError, match="not the indices of a job array"):
        array_indices(spec)


@given(st.lists(st.integers(0, 5000), min_size=1, unique=True))
def test_any_indices_come_back(indices: list[int]) -> None:
    assert array_indices(",".join(map(str, indices))) == indices
