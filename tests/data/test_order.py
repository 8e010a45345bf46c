"""The order of the data: a bijection in every epoch, well mixed, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data.order import sample_index

SIZES = [*range(1, 40), 97, 127, 128, 129, 997, 1023, 1024, 1025, 9973, 65535, 65536, 65537, 100_000]


@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_every_epoch_reaches_every_sample_once(num_samples, seed):
    for epoch in (0, 1, 5):
        positions = np.arange(num_samples) + epoch * num_samples
        reached = sample_index(positions, num_samples, seed, shuffle=True)
        assert np.array_equal(np.sort(reached), np.arange(num_samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_bijection_for_any_size_seed_and_epoch(num_samples, seed, epoch):
    positions = np.arange(num_samples) + epoch * num_samples
    assert len(np.unique(sample_index(positions, num_samples, seed, shuffle=True))) == num_samples


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20), st.integers(1, 2**40), st.integers(0, 9))
def test_a_position_has_one_index_whatever_it_is_asked_with(positions, num_samples, seed):
    together = sample_index(positions, num_samples, seed, shuffle=True)
    alone = [int(sample_index(position, num_samples, seed, shuffle=True)) for position in positions]
    assert together.tolist() == alone
    assert all(0 <= index < num_samples for index in alone)


def test_without_shuffle_the_order_is_that_of_the_data():
    assert sample_index(np.arange(7), 3, seed=5, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_shape_is_kept_and_nothing_is_no_trouble():
    assert sample_index(np.arange(6).reshape(2, 3), 4, 0, True).shape == (2, 3)
    assert sample_index([], 4, 0, True).shape == (0,)


@pytest.mark.parametrize("num_samples", [1000, 10_007, 100_000])
def test_mixing(num_samples):
    epochs = [sample_index(np.arange(num_samples) + e * num_samples, num_samples, 0, True) for e in range(4)]
    places = np.arange(num_samples)
    noise = 5 / np.sqrt(num_samples)
    for order in epochs:
        assert np.abs(order - places).mean() / num_samples == pytest.approx(1 / 3, abs=noise)
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < noise
        assert np.mean(np.diff(order) == 1) < 10 / num_samples
        assert np.sum(order == places) < 10
    assert abs(np.corrcoef(epochs[0], epochs[1])[0, 1]) < noise
    other_seed = sample_index(places, num_samples, 1, True)
    assert abs(np.corrcoef(epochs[0], other_seed)[0, 1]) < noise


def test_all_orders_of_a_few_samples_occur():
    seen = {tuple(sample_index(np.arange(4) + 4 * epoch, 4, 0, True).tolist()) for epoch in range(600)}
    assert len(seen) == 24


def test_golden_values():
    """Changing these changes the data order of runs that are resumed: raise a format version first."""
    assert sample_index(np.arange(10), 10, 0, True).tolist() == [9, 8, 4, 2, 1, 7, 6, 5, 0, 3]
    assert sample_index(np.arange(10, 20), 10, 0, True).tolist() == [5, 3, 8, 2, 1, 4, 7, 9, 0, 6]
    assert sample_index([0, 1, 2, 999_999, 1_000_000, 10**15], 10**6, 1234, True).tolist() == [
        797300,
        557848,
        649222,
        747738,
        511523,
        11208,
    ]
    assert sample_index([0, 1, 2], 2**45 + 1, -7, True).tolist() == [
        25391709511207,
        17133517769404,
        33672430598796,
    ]


@pytest.mark.parametrize(("positions", "num_samples"), [([-1], 3), ([0], 0)])
def test_impossible_arguments_are_refused(positions, num_samples):
    with pytest.raises(ValueError, match="must"):
        sample_index(positions, num_samples, 0, True)
