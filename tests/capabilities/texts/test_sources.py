"""Tests which files a source refers to."""

from pathlib import Path

import pytest

from trainkit.capabilities.texts.inputs import DatasetSpec, find_inputs
from trainkit.errors import UsageError


def test_stdlib_is_split_by_file():
    inputs = find_inputs(DatasetSpec(("stdlib",), val_fraction=0.05))
    names = [source.name for source in inputs]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert {source.role for source in inputs} == {"train", "val"}
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not any(skipped & set(Path(name).parts) or name.startswith("config-") for name in names)
    num_val = sum(source.role == "val" for source in inputs)
    assert num_val / len(inputs) == pytest.approx(0.05, abs=0.03)
    assert sum(source.size for source in inputs) > 4 << 20


def fake_stdlib(root, monkeypatch, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("pass\n")
    monkeypatch.setattr("trainkit.capabilities.texts.inputs.stdlib_folder", lambda: root)


def test_a_file_keeps_its_split_when_others_come_and_go(tmp_path, monkeypatch):
    fake_stdlib(tmp_path, monkeypatch, *(f"m{number}.py" for number in range(60)))
    before = {source.name: source.role for source in find_inputs(DatasetSpec(("stdlib",), val_fraction=0.2))}
    fake_stdlib(tmp_path, monkeypatch, *(f"n{number}.py" for number in range(60)))
    after = {source.name: source.role for source in find_inputs(DatasetSpec(("stdlib",), val_fraction=0.2))}
    assert before.items() <= after.items()


def test_some_validation_even_of_a_reduced_stdlib(tmp_path, monkeypatch):
    fake_stdlib(tmp_path, monkeypatch, "os.py", "re/parser.py", "test/skipped.py", "config-3.11/skipped.py")
    roles = [source.role for source in find_inputs(DatasetSpec(("stdlib",), val_fraction=1e-9))]
    assert sorted(roles) == ["train", "val"]
    assert {source.role for source in find_inputs(DatasetSpec(("stdlib",)))} == {"train"}


def test_files_and_folders_in_order(tmp_path):
    for name in ("b.txt", "d/z.jsonl", "d/a.txt.gz", "d/.git/x.txt", "d/readme.md", "a b;'\".txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    sources = (str(tmp_path / "b.txt"), str(tmp_path / "d"), str(tmp_path / "a b;'\".txt"))
    found = [(source.name, source.form, source.compressed) for source in find_inputs(DatasetSpec(sources))]
    assert found == [
        ("b.txt", "text", False),
        ("a.txt.gz", "text", True),
        ("z.jsonl", "rows", False),
        ("a b;'\".txt", "text", False),
    ]


def test_what_is_no_source(tmp_path, monkeypatch):
    for name in ("a.csv", "a.parquet.gz", "a.arrow"):
        (tmp_path / name).write_text("x")
        with pytest.raises(UsageError, match="an unsupported file type"):
            find_inputs(DatasetSpec((str(tmp_path / name),)))
    with pytest.raises(UsageError, match=r"contains no \.txt"):
        find_inputs(DatasetSpec((str(tmp_path),)))
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be mixed"):
        find_inputs(DatasetSpec((str(tmp_path), "stdlib")))
    fake_stdlib(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match="has no source files"):
        find_inputs(DatasetSpec(("stdlib",)))
