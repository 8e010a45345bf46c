"""Tests the source files and the positions of samples."""

import gzip
import json
import random
from pathlib import Path

import pytest

from trainkit.capabilities.replay.steps import Document, SampleSources
from trainkit.capabilities.texts.inputs import DatasetSpec
from trainkit.capabilities.texts.prepare import prepare
from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import places_file
from trainkit.data.shards import open_dataset

SEQ_LEN = 50


def config_of(tmp_path: Path, source: object, **others: object) -> DataConfig:
    values = {"source": source, "seq_len": SEQ_LEN, "val_fraction": 0.1, "cache_dir": str(tmp_path / "cache")}
    return DataConfig.model_validate({**values, **others})


def sources_of(config: DataConfig) -> tuple[SampleSources, int]:
    data = open_dataset(config, SEQ_LEN, "train")
    return SampleSources(config, data), data.num_samples


def lines(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices("abc dé\n", k=chance.randrange(0, 130))) for _ in range(count)]


def write_rows(file: Path, texts: list[str]) -> None:
    data = "".join(json.dumps({"text": text}) + "\n\n" for text in texts).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_rows_have_their_line(tmp_path: Path, suffix: str) -> None:
    file, texts = tmp_path / f"a{suffix}", lines(60, 1)
    write_rows(file, texts)
    found, count = sources_of(config_of(tmp_path, str(file)))
    seen = set()
    for index in range(count):
        documents = found.documents(index)
        assert sum(document.num_tokens for document in documents) == SEQ_LEN + 1
        for document in documents:
            assert (document.file, document.unit) == (str(file), "line")
            assert document.position % 2 == 1, "every second line is blank"
            text = texts[document.position // 2].encode()
            # The end of a document is a token without text.
            piece = text[document.skipped_tokens :][: document.num_tokens]
            assert document.text == piece.decode(errors="replace")
            seen.add(document.position)
    trained = {2 * row + 1 for row, text in enumerate(texts) if text and row % 10}
    assert seen <= trained
    assert len(seen) >= len(trained) - 2, "only the end of the data is not used"


def test_text_files_have_their_byte(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, size in (("a.txt", 200_000), ("b.txt", 300)):
        (folder / name).write_bytes(random.Random(size).randbytes(size).hex(" ").encode())
    found, count = sources_of(config_of(tmp_path, str(folder)))
    for index in (0, 1, count // 2, count - 2, count - 1):
        for document in found.documents(index):
            whole = Path(document.file).read_bytes()
            assert document.unit == "byte"
            assert document.skipped_tokens == 0
            assert whole[document.position :].startswith(document.text.encode())
    assert {document.file for index in range(count) for document in found.documents(index)} == {
        str(folder / "a.txt"),
        str(folder / "b.txt"),
    }


def test_a_prepared_folder_and_one_of_an_older_version(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", lines(40, 1))
    folder = tmp_path / "shards"
    prepare(DatasetSpec((str(tmp_path / "a.jsonl"),)), folder)
    config = config_of(tmp_path, str(folder))
    (first, *_) = sources_of(config)[0].documents(1)
    assert (first.file, first.unit) == ("a.jsonl", "byte")
    for shard in folder.glob("*.bin"):
        places_file(shard).unlink()
    shard = folder / "train-00000.bin"
    (first,) = sources_of(config)[0].documents(1)
    assert isinstance(first, Document)
    assert (first.file, first.unit, first.position, first.num_tokens) == (str(shard), "token", 50, 51)
    assert first.where == f"{shard} token 50"
