"""Batch arithmetic, and the sizes that its message proposes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.errors import ConfigError
from trainkit.plan.batch import batch_reason, fitting_device_sizes, fitting_global_sizes, make_batch
from trainkit.plan.launch import Batch

sizes = st.integers(1, 64)


def test_accumulation() -> None:
    assert make_batch(8, 32, 2, 256) == Batch(8, 2, 32, 8192)


def test_null_is_no_accumulation() -> None:
    assert make_batch(8, None, 3, 128) == Batch(8, 1, 24, 3072)


def test_reason() -> None:
    assert batch_reason(make_batch(8, 32, 2, 256), 2) == (
        "32 samples a step = 8 at once x 2 data-parallel x 2 accumulation"
    )


@pytest.mark.parametrize(
    ("device", "total", "dp", "message"),
    [
        (
            8,
            32,
            3,
            "is 32, which is not a multiple of the 24 samples that 3 data-parallel processes x "
            "train.device_batch_size 8 read at once\n  hint: train.global_batch_size = 24 or 48 would do",
        ),
        (
            6,
            32,
            1,
            "is 32, which is not a multiple of the 6 samples that 1 data-parallel process x "
            "train.device_batch_size 6 read at once\n"
            "  hint: train.global_batch_size = 30 or 36 would do, or train.device_batch_size = 4 or 8",
        ),
        (
            8,
            4,
            2,
            "is 4, which is not a multiple of the 16 samples that 2 data-parallel processes x "
            "train.device_batch_size 8 read at once\n"
            "  hint: train.global_batch_size = 16 would do, or train.device_batch_size = 2",
        ),
    ],
)
def test_what_would_do(device: int, total: int, dp: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_batch(device, total, dp, 256)
    assert error.value.message == f"train.global_batch_size: {message}"


@given(device=sizes, total=st.integers(1, 4096), dp=sizes)
def test_a_batch_adds_up_or_every_proposed_size_does(device: int, total: int, dp: int) -> None:
    try:
        batch = make_batch(device, total, dp, 16)
    except ConfigError:
        assert total % (device * dp)
        proposals = fitting_global_sizes(device, total, dp)
        assert proposals
        for size in proposals:
            make_batch(device, size, dp, 16)
        for size in fitting_device_sizes(device, total, dp):
            make_batch(size, total, dp, 16)
        assert bool(fitting_device_sizes(device, total, dp)) == (total % dp == 0)
    else:
        assert batch.device_batch_size * dp * batch.accumulation_steps == batch.global_batch_size == total
        assert batch.tokens_per_step == 16 * total
