"""Tests the messages about data before a run starts."""

import gzip
import json
import sys

import pytest
from dataset_content import rows

from tests.support.programs import run_program
from tests.support.said import said
from trainkit.capabilities.texts.inputs import DatasetSpec
from trainkit.capabilities.texts.prepare import prepare
from trainkit.data.checks import inspect_data


def only(config):
    (problem,) = inspect_data(config).problems
    return problem


@pytest.mark.parametrize(
    ("name", "content", "key", "message"),
    [
        ("a.txt", None, "data.source", "a.txt does not exist"),
        ("a.csv", "1,2", "data.source", "an unsupported file type"),
        ("a.txt", "", "data.source", "contains no text to train on"),
        ("a.jsonl", "\n\n", "data.source", "contains no text to train on"),
        ("a.txt", "tiny", "data.seq_len", "16 is too long: the data contains at most 5 tokens"),
        ("a.txt", "hello\n" * 20, "data.val_fraction", "0.1: at most 13 tokens remain for validation"),
        ("a.jsonl", rows("x" * 99) + "{bad", "data.source", "a.jsonl:2: not JSON"),
        ("a.jsonl", rows("x" * 99, key="body"), "data.source", 'no field "text"'),
        ("a.jsonl.gz", "no gzip", "data.source", "cannot be read: Not a gzipped file"),
    ],
)
def test_problems_of_texts(data_config, tmp_path, name, content, key, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    found = only(data_config(source=str(tmp_path / name)))
    assert found[0] == key
    assert message in found[1]
    assert found[2] or "cannot be read" in message


def test_a_line_of_gigabytes_is_not_read(data_config, tmp_path):
    # the content is no row, but only reading it would show that
    (tmp_path / "a.jsonl").write_text(f'["{"x" * (3 << 20)}"]')
    assert inspect_data(data_config(source=str(tmp_path / "a.jsonl"))).problems == ()


def test_all_at_once(data_config, tmp_path):
    config = data_config(source="/no/text.txt", val_source="/no/val.txt", tokenizer="/no/tokenizer.json")
    assert [key for key, _, _ in inspect_data(config).problems] == [
        "data.tokenizer",
        "data.source",
        "data.val_source",
    ]


def test_a_short_validation_split(data_config, tmp_path):
    (tmp_path / "a.txt").write_text("hello\n" * 200)
    fractions = {"source": str(tmp_path / "a.txt"), "seq_len": 128}
    found = only(data_config(**fractions, val_fraction=0.01))
    assert found[0] == "data.val_fraction"
    said(found[2])
    assert inspect_data(data_config(**fractions, val_fraction=0.2)).problems == ()
    assert inspect_data(data_config(**fractions, val_fraction=0.0)).problems == ()
    (tmp_path / "a.txt").write_text("hello\n" * 200)
    (tmp_path / "v.txt").write_text("hello")
    found = only(data_config(source=str(tmp_path / "a.txt"), val_source=str(tmp_path / "v.txt")))
    assert found[0] == "data.val_source"
    assert "at most 6 tokens" in found[1]


def test_a_cache_that_cannot_be_written(data_config, tmp_path):
    (tmp_path / "file").write_text("")
    found = only(data_config(val_fraction=0.01, cache_dir=str(tmp_path / "file" / "cache")))
    assert found[0] == "data.cache_dir"
    said(found[1])
    assert inspect_data(data_config(seq_len=256, val_fraction=0.01)).problems == ()


def test_first_rows_of_big_and_packed_files_are_looked_at(data_config, tmp_path):
    content = rows("x", "y") + "{bad\n" + rows(*["z" * 1000] * 3000)
    (tmp_path / "a.jsonl").write_text(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert f"{name}:3: not JSON" in only(data_config(source=str(tmp_path / name)))[1]


def test_prepared_folder(data_config, tmp_path, tokenizer_json):
    (tmp_path / "a.txt").write_text("hello world\n" * 100)
    folder = tmp_path / "shards"
    prepare(DatasetSpec((str(tmp_path / "a.txt"),)), folder)
    assert inspect_data(data_config(source=str(folder))).problems == ()
    assert only(data_config(source=str(folder), seq_len=5000))[0] == "data.seq_len"
    other = only(data_config(source=str(folder), tokenizer=str(tokenizer_json)))
    assert other[0] == "data.tokenizer"
    said(other[1].replace(str(tokenizer_json), "tokenizer.json"))
    elsewhere = only(data_config(source=str(folder), val_source=str(tmp_path / "no-such-file.txt")))
    assert elsewhere[0] == "data.val_source"
    said(elsewhere[1])
    record = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(record | {"format_version": 99}))
    said(only(data_config(source=str(folder)))[1])
    (folder / "dataset.json").write_text(json.dumps(record))
    (folder / "train-00000.bin").write_bytes(b"")
    said(only(data_config(source=str(folder)))[1])


def test_vocab_size(data_config, tmp_path, tokenizer_json):
    from tokenizers import Tokenizer

    size = Tokenizer.from_file(str(tokenizer_json)).get_vocab_size()
    assert inspect_data(data_config()).vocab_size == 257
    assert inspect_data(data_config(tokenizer=str(tokenizer_json))).vocab_size == size
    (tmp_path / "a.txt").write_text("hello world\n" * 100)
    prepare(DatasetSpec((str(tmp_path / "a.txt"),), tokenizer=str(tokenizer_json)), tmp_path / "shards")
    assert inspect_data(data_config(source=str(tmp_path / "shards"))).vocab_size == size


def test_imports_stay_light():
    heavy = "{'numpy', 'tokenizers', 'torch', 'rich'}"
    code = f"import sys, trainkit.data.checks; print(*{heavy} & set(sys.modules))"
    found = run_program(sys.executable, "-c", code, check=True)
    assert found.stdout.strip() == ""
