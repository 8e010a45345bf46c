"""Tests the source files and the positions of samples."""

import random
from pathlib import Path

from dataset_content import rows

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
    (tmp_path / "a.jsonl").write_text(rows(*(f"row {number} é" * 9 for number in range(40))))
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
