"""Tests a setting that the shell split at its spaces."""

import time

import pytest

from trainkit.cli.usage import cut_setting


@pytest.mark.parametrize("loose", ["2", "2,3", "=2", "2,,3,", "1e-3,-.5"])
def test_values_behind_a_space_belong_to_the_setting(loose: str) -> None:
    error = cut_setting(["--set", "seed=1", loose], loose)
    assert error is not None
    assert "--sweep seed=1," in str(error.hint)


def test_a_name_of_many_digits_is_no_value_at_once() -> None:
    for name in (f"{'2' * 5000}x.yaml", f"{'2,' * 5000}x.yaml"):
        began = time.monotonic()
        assert cut_setting(["--set", "seed=1", name], name) is None
        assert time.monotonic() - began < 5
