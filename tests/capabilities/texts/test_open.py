"""Tests the way from a config to tokens: the cache, concurrent processes, and prepared folders."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from dataset_content import content_of, rows

from tests.support.nfs import nfs_clients
from trainkit.capabilities.texts.cache import cache_folder, cache_key
from trainkit.capabilities.texts.inputs import DatasetSpec, dataset_spec, find_inputs
from trainkit.capabilities.texts.prepare import prepare
from trainkit.data.dataset_file import identify, is_dataset
from trainkit.data.shards import open_dataset
from trainkit.data.sources import ensure_prepared, has_validation
from trainkit.errors import UsageError


def test_what_was_begun_in_the_cache_with_other_times_is_begun_anew(data_config, monkeypatch):
    """The cache key ignores the file times of the standard library, which may differ between hosts."""

    def killed(*args):
        raise KeyboardInterrupt

    config = data_config(source="stdlib")
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.capabilities.texts.prepare.run_jobs", killed)
        with pytest.raises(KeyboardInterrupt):
            ensure_prepared(config)
    [plan_file] = cache_folder(config).glob("*.partial/*/plan.json")
    plan = json.loads(plan_file.read_text())
    plan["inputs"][0]["mtime_ns"] += 1
    plan_file.write_text(json.dumps(plan))
    assert is_dataset(ensure_prepared(config))


def test_whatever_decides_about_tokens_has_a_cache_of_its_own(data_config, tmp_path, tokenizer_json):
    path = tmp_path / "a.txt"
    path.write_text("hello world\n" * 100)
    source = str(path)
    configs = [
        data_config(source=source),
        data_config(source=[source, "stdlib"]),
        data_config(source=source, val_fraction=0.2),
        data_config(source=source, val_source=source),
        data_config(source=source, tokenizer=str(tokenizer_json)),
    ]
    folders = [ensure_prepared(config) for config in configs]
    path.write_text("Hello world\n" * 100)
    os.utime(path, ns=(1, 1))
    folders.append(ensure_prepared(configs[0]))
    assert len(set(folders)) == 6
    assert ensure_prepared(data_config(source=source, seq_len=99, num_workers=0)) == folders[-1]


def test_validation_is_optional(data_config, a_txt):
    assert has_validation(data_config(source=str(a_txt)))
    without = data_config(source=str(a_txt), val_fraction=0.0)
    assert not has_validation(without)
    with pytest.raises(UsageError, match=r"val split of .* has 0 tokens"):
        open_dataset(without, 16, "val")


def test_prepared_folder_is_used_as_it_is(data_config, tmp_path, tokenizer_json, a_txt):
    folder = tmp_path / "shards"
    prepare(DatasetSpec((str(a_txt),), tokenizer=str(tokenizer_json)), folder)
    before = content_of(folder)
    data = open_dataset(data_config(source=str(folder)), 16, "train")
    assert data.tokenizer.kind == "tokenizer.json"
    assert open_dataset(data_config(source=[str(folder)], tokenizer=str(tokenizer_json)), 16, "train")
    assert content_of(folder) == before
    assert not (tmp_path / "cache").exists()


def test_prepared_folder_of_another_tokenizer(data_config, tmp_path, tokenizer_json, a_txt):
    prepare(DatasetSpec((str(a_txt),)), tmp_path / "shards")
    with pytest.raises(UsageError, match="is not the tokenizer of"):
        ensure_prepared(data_config(source=str(tmp_path / "shards"), tokenizer=str(tokenizer_json)))


def test_default_cache_is_the_users(data_config, tmp_path, monkeypatch, a_txt):
    config = data_config(source=str(a_txt), cache_dir=None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ensure_prepared(config).parent == tmp_path / "xdg" / "trainkit" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ensure_prepared(config).parent == tmp_path / "home" / ".cache" / "trainkit" / "data"


def test_cache_that_cannot_be_written(data_config, tmp_path):
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(UsageError, match=r"cannot write the data cache .*") as caught:
        ensure_prepared(data_config())
    assert "data.cache_dir" in caught.value.hint


def test_what_a_killed_prepare_left_is_used(data_config, tmp_path, monkeypatch, a_txt):
    config = data_config(source=str(a_txt))
    monkeypatch.setattr("trainkit.capabilities.texts.prepare.run_unit", lambda folder, unit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ensure_prepared(config)
    monkeypatch.undo()
    assert is_dataset(ensure_prepared(config))
    names = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert names == [ensure_prepared(config).name]


def _open_and_report(config, start, results):
    start.wait()
    data = open_dataset(config, 16, "train")
    results.put((str(data.folder), data.fingerprint, data.read([0, data.num_samples - 1]).tolist()))


def test_many_processes_at_once(data_config, tmp_path):
    (tmp_path / "a.jsonl").write_text(rows(*(f"row {number} " * 20 for number in range(20_000))))
    config = data_config(source=str(tmp_path / "a.jsonl"))
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_open_and_report, args=(config, start, results)) for _ in range(6)]
    for process in processes:
        process.start()
    start.set()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len({json.dumps(one) for one in found}) == 1
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) == 1


def test_shards_that_another_rank_checks(data_config, monkeypatch, a_txt):
    config = data_config(source=str(a_txt), val_fraction=0.5)
    folder = ensure_prepared(config)
    looked_at = []
    real = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **more: looked_at.append(path.name) or real(path, **more))
    for split in ("train", "val"):
        open_dataset(config, 8, split, checks_sizes=False)
        assert has_validation(config, checks_sizes=False)
    assert not [name for name in looked_at if name.endswith(".bin")]
    open_dataset(config, 8, "train")
    assert {name for name in looked_at if name.endswith(".bin")} == {
        path.name for path in folder.glob("*.bin")
    }


def test_data_that_another_host_has_prepared_meanwhile_on_nfs(data_config, tmp_path, monkeypatch, a_txt):
    (tmp_path / "server").mkdir()
    first, other = tmp_path / "first", tmp_path / "other"
    with nfs_clients(tmp_path / "server", first, other):
        config = data_config(source=str(a_txt), cache_dir=str(first))
        key = cache_key(dataset_spec(config), find_inputs(dataset_spec(config)), identify(config.tokenizer))
        assert not is_dataset(other / key)
        assert ensure_prepared(config) == first / key
        assert not is_dataset(other / key)
        monkeypatch.setattr(
            "trainkit.capabilities.texts.prepare.prepare", lambda *args: pytest.fail("prepared again")
        )
        assert ensure_prepared(data_config(source=config.source, cache_dir=str(other))) == other / key
        assert is_dataset(other / key)
