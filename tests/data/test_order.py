"""Tests the order of the data: a bijection in every epoch, well mixed, and the same in all versions."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data.order import Schedule, sample_index

SIZES = [*range(1, 40), 97, 127, 128, 129, 997, 1023, 1024, 1025, 9973, 65535, 65536, 65537, 100_000]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_every_epoch_reaches_every_sample_once(seed):
    for num_samples, epoch in product(SIZES, (0, 1, 5)):
        positions = np.arange(num_samples) + epoch * num_samples
        reached = sample_index(positions, num_samples, seed, shuffle=True)
        assert np.array_equal(np.sort(reached), np.arange(num_samples))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20), st.integers(1, 2**40), st.integers(0, 9))
def test_a_position_has_one_index_whatever_it_is_asked_with(positions, num_samples, seed):
    together = sample_index(positions, num_samples, seed, shuffle=True)
    alone = [int(sample_index(position, num_samples, seed, shuffle=True)) for position in positions]
    assert together.tolist() == alone
    assert all(0 <= index < num_samples for index in alone)


def test_without_shuffle_and_of_any_shape():
    assert sample_index(np.arange(7), 3, seed=5, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]
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
    """A change of these values changes the data order of resumed runs, so raise a format version first."""
    assert sample_index(np.arange(10), 10, 0, True).tolist() == [9, 8, 4, 2, 1, 7, 6, 5, 0, 3]
    assert sample_index(np.arange(10, 20), 10, 0, True).tolist() == [5, 3, 8, 2, 1, 4, 7, 9, 0, 6]
    positions, found = [0, 1, 2, 999_999, 1_000_000, 10**15], [797300, 557848, 649222, 747738, 511523, 11208]
    assert sample_index(positions, 10**6, 1234, True).tolist() == found
    found = [25391709511207, 17133517769404, 33672430598796]
    assert sample_index([0, 1, 2], 2**45 + 1, -7, True).tolist() == found
    sources, items = Schedule([5, 3, 2]).at(np.arange(12))
    assert "".join(map(str, sources)) == "010201010201"
    assert items.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3]


weights_lists = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(weights_lists)
def test_every_prefix_has_the_share_of_each_source_rounded_up_or_down(weights):
    period = sum(weights)
    sources, items = Schedule(weights).at(np.arange(3 * period))
    places = np.arange(1, 3 * period + 1)
    for number, weight in enumerate(weights):
        counts = np.cumsum(sources == number)
        assert (np.abs(counts * period - places * weight) < period).all()
        assert items[sources == number].tolist() == list(range(3 * weight))


@settings(max_examples=60, deadline=None)
@given(weights_lists, st.lists(st.integers(0, 2**50), min_size=1, max_size=9))
def test_a_position_has_one_source_whatever_it_is_asked_with(weights, positions):
    schedule = Schedule(weights)
    together = schedule.at(positions)
    alone = [schedule.at([position]) for position in positions]
    assert [source.tolist() for source, _ in alone] == [[source] for source in together[0]]
    assert [item.tolist() for _, item in alone] == [[item] for item in together[1]]


def test_shares_of_a_long_period():
    weights = [99_991, 7, 1, 1]
    sources, _ = Schedule(weights).at(np.arange(100_000))
    for number, weight in enumerate(weights):
        deviation = np.cumsum(sources == number) - np.arange(1, 100_001) * weight / 100_000
        assert np.abs(deviation).max() < 1


@pytest.mark.parametrize(("positions", "num_samples"), [([-1], 3), ([0], 0)])
def test_impossible_arguments_are_refused(positions, num_samples):
    with pytest.raises(ValueError, match="must"):
        sample_index(positions, num_samples, 0, True)
