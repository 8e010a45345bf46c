"""Tests the shard format: samples across shards, threads, many files, and damage that is found at open."""

import json
import pickle
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.said import said
from trainkit.data.dataset_file import DatasetFile, Shard, TokenizerIdentity, read_dataset_file
from trainkit.data.shards import MAX_OPEN_SHARDS, TokenShards
from trainkit.errors import UsageError


def write_dataset(folder, shard_sizes, dtype="uint16"):
    """Write a dataset whose train tokens count from 0 (mod 50,000) over shards of these sizes."""
    folder.mkdir(exist_ok=True)
    shards, start = [], 0
    for number, size in enumerate(shard_sizes):
        name = f"train-{number:05d}.bin"
        values = np.arange(start, start + size) % 50_000
        values.astype({"uint16": "<u2", "uint32": "<u4"}[dtype]).tofile(folder / name)
        shards.append(Shard(name, size, "unused"))
        start += size
    identity = TokenizerIdentity("bytes", "bytes", "0" * 64, 50_000, 7, "<eos>")
    file = DatasetFile(identity, dtype, "f" * 64, {}, {"train": tuple(shards), "val": ()})
    file.write(folder, folder)
    return folder


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("shard_sizes", [[100], [1] * 100, [3, 50, 1, 1, 45], [99, 1], [1, 99]])
def test_samples_step_by_seq_len_and_overlap_by_one(tmp_path, dtype, shard_sizes):
    data = TokenShards(write_dataset(tmp_path / "d", shard_sizes, dtype), "train", seq_len=8)
    assert (data.num_tokens, data.num_samples) == (100, 12)
    everything = data.read(np.arange(12))
    assert everything.dtype == np.int64
    assert everything.tolist() == [list(range(8 * i, 8 * i + 9)) for i in range(12)]
    assert data.read([11, 0, 5, 0]).tolist() == everything[[11, 0, 5, 0]].tolist()
    assert data.read([]).shape == (0, 9)


def test_the_number_of_samples(tmp_path):
    assert TokenShards(write_dataset(tmp_path / "a", [17]), "train", 8).num_samples == 2
    assert TokenShards(write_dataset(tmp_path / "b", [16]), "train", 8).num_samples == 1
    folder = write_dataset(tmp_path / "d", [10])
    with pytest.raises(UsageError, match=r"10 tokens, fewer than one sample of data\.seq_len 10") as caught:
        TokenShards(folder, "train", 10)
    said(caught.value.hint)
    assert TokenShards(folder, "train", 9).num_samples == 1
    with pytest.raises(UsageError, match=r"val split .* has 0 tokens") as caught:
        TokenShards(folder, "val", 8)
    assert "data.val_fraction" in caught.value.hint


@pytest.mark.parametrize("index", [-1, 12])
def test_no_sample_outside_the_data(tmp_path, index):
    data = TokenShards(write_dataset(tmp_path / "d", [100]), "train", 8)
    with pytest.raises(IndexError, match="of size 12"):
        data.read([0, index])


def test_threads_read_what_one_reads(tmp_path):
    data = TokenShards(write_dataset(tmp_path / "d", [37] * 400), "train", 8)
    expected = data.read(np.arange(data.num_samples))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = list(pool.map(lambda index: data.read([index])[0], range(data.num_samples)))
            assert np.array_equal(np.stack(found), expected)


def test_thousands_of_shards_hold_few_files_open(tmp_path):
    data = TokenShards(write_dataset(tmp_path / "d", [9] * 2000), "train", 8)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert data.read(np.arange(data.num_samples)).shape == (2249, 9)
    opened = len(list(Path("/proc/self/fd").iterdir())) - before
    assert opened <= MAX_OPEN_SHARDS + 1 < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize("num_bytes", [60, 61, 0, None])
def test_a_damaged_shard_is_named_at_the_start_or_at_its_first_use(tmp_path, num_bytes):
    folder = write_dataset(tmp_path / "d", [50, 50])
    shard = folder / "train-00001.bin"
    shard.unlink()
    data = pickle.loads(pickle.dumps(TokenShards(folder, "train", 8, checks_sizes=False)))
    if num_bytes is not None:
        shard.write_bytes(bytes(num_bytes))
    assert data.read([0]).shape == (1, 9)
    what = "cannot be opened" if num_bytes is None else f"has {num_bytes} bytes instead of 100"
    for use in (lambda: data.read([11]), lambda: TokenShards(folder, "train", 8)):
        with pytest.raises(UsageError, match=rf"train-00001\.bin {what}") as caught:
            use()
        assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format version 2, but this trainkit version supports at most version 1"),
        ({"format": "else"}, "not written by trainkit"),
        ({"dtype": "float16"}, "damaged.*float16"),
        ({"splits": {}}, "damaged"),
    ],
)
def test_dataset_file_that_cannot_be_used(tmp_path, change, message):
    folder = write_dataset(tmp_path / "d", [10])
    record = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(record | change))
    with pytest.raises(UsageError, match=message):
        read_dataset_file(folder)


def test_folder_that_is_no_dataset(tmp_path):
    with pytest.raises(UsageError, match=r"it has no dataset\.json") as caught:
        TokenShards(tmp_path, "train", 8)
    assert "trainkit data prepare" in caught.value.hint
    (tmp_path / "dataset.json").write_text('{"half')
    with pytest.raises(UsageError, match="cannot be read"):
        TokenShards(tmp_path, "train", 8)
