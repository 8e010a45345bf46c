"""Tests weighted sources: the sample at each position, and the errors for invalid values."""

import numpy as np
import pytest
from dataset_content import rows

from tests.support.said import said
from trainkit.capabilities.texts.inputs import DatasetSpec
from trainkit.capabilities.texts.prepare import prepare
from trainkit.config.training import DataConfig
from trainkit.data.checks import inspect_data
from trainkit.data.dataset_file import read_dataset_file
from trainkit.data.order import source_seed
from trainkit.data.shards import TokenMixture, TokenShards, open_dataset
from trainkit.data.sources import MAX_PERIOD, ensure_prepared, has_validation, integer_weights
from trainkit.errors import UsageError
from trainkit.task import TokenSamples


@pytest.fixture
def texts(tmp_path):
    """Write three texts of different lengths, each with a different letter."""
    for letter, number in (("a", 1600), ("b", 3200), ("c", 4800)):
        (tmp_path / f"{letter}.txt").write_text((letter * 15 + "\n") * (number // 16))
    return [str(tmp_path / f"{letter}.txt") for letter in "abc"]


def letters_of(tokens):
    return "".join(next(chr(token) for token in row if token != 10) for row in tokens.tolist())


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.7, 0.3], (7, 3)),
        ([2, 2, 4], (1, 1, 2)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([1e-3, 1], (1, 1000)),
        ([5.0], (1,)),
        ([99_991, 9], (99_991, 9)),
    ],
)
def test_weights_are_integers_in_lowest_terms(data_config, weights, expected):
    source = {str(number): weight for number, weight in enumerate(weights)}
    assert integer_weights(data_config(source=source)) == expected


def test_weights_with_many_digits_are_rounded(data_config):
    weights = [123_456_789_012.0, 7.3e11, 1e-9]
    found = integer_weights(data_config(source=dict(zip("abc", weights, strict=True))))
    assert sum(found) == pytest.approx(MAX_PERIOD, abs=3)
    assert found[2] == 1
    for weight, share in zip(weights[:2], found[:2], strict=True):
        assert share / sum(found) == pytest.approx(weight / sum(weights), abs=2 / MAX_PERIOD)


def test_positions_go_through_epochs_of_every_source(data_config, texts):
    config = data_config(source=dict(zip(texts, (5, 3, 2), strict=True)), val_fraction=0.0)
    data = open_dataset(config, 16, "train")
    alone = [open_dataset(data_config(source=text, val_fraction=0.0), 16, "train") for text in texts]
    assert data.num_samples == sum(part.num_samples for part in alone)
    assert data.num_tokens == sum(part.num_tokens for part in alone)
    positions = np.arange(1000)
    found = data.read(data.sample_index(positions, 7, shuffle=True))
    letters = letters_of(found)
    assert [letters.count(letter) for letter in "abc"] == [500, 300, 200]
    for number, (letter, part) in enumerate(zip("abc", alone, strict=True)):
        own = found[[found == letter for found in letters]]
        index = part.sample_index(np.arange(len(own)), source_seed(7, number), True)
        assert np.array_equal(own, part.read(index))


def test_the_order_of_one_and_of_two_sources(data_config, texts):
    config = data_config(source={texts[0]: 1, texts[1]: 1}, val_fraction=0.0)
    data = open_dataset(config, 16, "train")
    num_first = data.parts[0].num_samples
    index = data.sample_index(np.arange(6), 3, shuffle=False)
    assert index.tolist() == [0, num_first, 1, num_first + 1, 2, num_first + 2]
    mixture = open_dataset(data_config(source={texts[1]: 3.0}), 16, "train")
    alone = open_dataset(data_config(source=texts[1]), 16, "train")
    positions = np.arange(3 * alone.num_samples)
    assert np.array_equal(mixture.sample_index(positions, 5, True), alone.sample_index(positions, 5, True))


def test_sources_of_the_same_size_have_different_orders(data_config, tmp_path):
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text((letter * 15 + "\n") * 200)
    source = {str(tmp_path / "a.txt"): 1, str(tmp_path / "b.txt"): 1}
    data = open_dataset(data_config(source=source, val_fraction=0.0), 16, "train")
    first, second = data.sample_index(np.arange(200), 0, True).reshape(-1, 2).T
    assert not np.array_equal(first, second - data.parts[0].num_samples)


def test_validation_is_the_union_of_what_is_held_out(data_config, texts, tmp_path):
    shards = tmp_path / "shards"
    prepare(DatasetSpec((texts[2],), val_fraction=0.25), shards)
    without = tmp_path / "without"
    prepare(DatasetSpec((texts[2],)), without)
    config = data_config(source={texts[0]: 9, str(without): 1, str(shards): 1}, val_fraction=0.5)
    assert has_validation(config)
    val = open_dataset(config, 16, "val")
    assert val.num_tokens == 801 + 1201
    index = val.sample_index(np.arange(val.num_samples), 0, shuffle=False)
    assert letters_of(val.read(index)) == "a" * 50 + "c" * 75
    assert not has_validation(data_config(source={texts[0]: 1, str(without): 1}, val_fraction=0.0))


def test_val_source_is_the_only_validation_data(data_config, texts):
    config = data_config(source={texts[0]: 1, texts[1]: 1}, val_source=texts[2], val_fraction=0.5)
    assert inspect_data(config).problems == ()
    val = open_dataset(config, 16, "val")
    assert set(letters_of(val.read(np.arange(val.num_samples)))) == {"c"}
    assert val.num_tokens == 4801
    assert open_dataset(config, 16, "train").num_tokens == 1601 + 3201


def test_val_source_with_a_prepared_dataset_is_refused(data_config, texts, tmp_path):
    prepare(DatasetSpec((texts[1],)), tmp_path / "shards")
    for source in ({texts[0]: 1, str(tmp_path / "shards"): 1}, {str(tmp_path / "shards"): 1, texts[0]: 1}):
        config = data_config(source=source, val_source=texts[2])
        [(key, message, _)] = inspect_data(config).problems
        assert key == "data.val_source"
        said(message)
        with pytest.raises(UsageError, match="with its own validation split"):
            open_dataset(config, 16, "train")


def test_fingerprint_covers_sources_weights_and_their_order(data_config, texts):
    a, b, c = texts
    sources = [{a: 1, b: 1}, {a: 1, b: 2}, {b: 1, a: 1}, {a: 1, c: 1}, {a: 1, b: 1, c: 1}, {a: 1}]
    found = [open_dataset(data_config(source=source), 16, "train").fingerprint for source in sources]
    assert len(set(found)) == len(sources)
    scaled = open_dataset(data_config(source={a: 0.5, b: 0.5}), 16, "train")
    assert scaled.fingerprint == found[0]


def test_sources_are_cached_one_by_one(data_config, texts):
    open_dataset(data_config(source={texts[0]: 1, texts[1]: 2}), 16, "train")
    folder = ensure_prepared(data_config(source=texts[1]))
    assert len(list(folder.parent.glob("*/dataset.json"))) == 2


def test_different_tokenizers_are_refused(data_config, texts, tmp_path, tokenizer_json):
    shards = str(tmp_path / "shards")
    (tmp_path / "words.jsonl").write_text(rows(*["the quick brown fox"] * 100))
    spec = DatasetSpec((str(tmp_path / "words.jsonl"),), tokenizer=str(tokenizer_json), val_fraction=0.1)
    prepare(spec, tmp_path / "shards")
    config = data_config(source={texts[0]: 1, shards: 1})
    [(key, message, hint)] = inspect_data(config).problems
    assert key == "data.source"
    said(message)
    assert "set data.tokenizer" in hint
    with pytest.raises(UsageError, match="all sources of a mixture must use the same tokenizer"):
        open_dataset(config, 16, "train")
    same = data_config(source={texts[0]: 1, shards: 1}, tokenizer=str(tokenizer_json))
    assert inspect_data(same).problems == ()
    size = read_dataset_file(tmp_path / "shards").tokenizer.vocab_size
    assert inspect_data(same).vocab_size == open_dataset(same, 16, "train").vocab_size == size


def test_problems_name_the_source(data_config, texts, tmp_path):
    (tmp_path / "short.txt").write_text("tiny")
    source = {texts[0]: 1, str(tmp_path / "short.txt"): 1, "/no/such.txt": 1}
    found = inspect_data(data_config(source=source, tokenizer="/no/tokenizer.json")).problems
    assert [key for key, _, _ in found] == ["data.tokenizer", "data.source"]  # each key is reported once
    found = inspect_data(data_config(source=source)).problems
    assert [key for key, _, _ in found] == ["data.seq_len", "data.source"]
    said(found[0][1])


def test_weights_are_shown_as_they_are_used(data_config, texts):
    config = data_config(source={texts[0]: 3, texts[1]: 1})
    assert inspect_data(config).mixture == f"75% {texts[0]}, 25% {texts[1]}"
    assert inspect_data(data_config(source=texts[0])).mixture is None
    data = open_dataset(config, 16, "train")
    said("\n".join(data.describe(["a", "b"])))


def test_index_outside_the_data(data_config, texts):
    data = open_dataset(data_config(source={texts[0]: 1, texts[1]: 1}), 16, "train")
    assert isinstance(data, TokenMixture)
    assert isinstance(data.parts[0], TokenShards)
    for index in (-1, data.num_samples):
        with pytest.raises(IndexError):
            data.read([index])


def test_own_tasks_get_one_source(texts):
    with pytest.raises(UsageError, match=r"data\.source is a mixture"):
        TokenSamples(DataConfig(source={texts[0]: 0.5}))
