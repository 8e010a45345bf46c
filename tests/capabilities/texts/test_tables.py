"""Tests that Parquet files and saved Hugging Face datasets yield the same documents as a .jsonl file."""

import json
import os
import sys
from itertools import product

import pytest
from dataset_content import content_of, documents_of, rows

from tests.capabilities.texts.test_prepare import made
from tests.support.said import said
from trainkit.capabilities.texts.inputs import DatasetSpec, find_inputs, read_column
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.capabilities.texts.validate import LONG_ROW_BYTES, validate_texts
from trainkit.data.checks import inspect_data
from trainkit.errors import UsageError

FORMS = ["parquet", "arrow"]


@pytest.fixture(scope="session")
def pa():
    """Return pyarrow with the submodules that the tests write with."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("pyarrow.ipc")
    return arrow


@pytest.fixture
def write(pa, tmp_path):
    """Return a function that writes rows with other columns as a Parquet file or a dataset.

    It returns the path of the source.
    """

    def make(form, texts, name="table", key="text", kind="string", group=50, others=True):
        columns = {key: pa.array(texts, getattr(pa, kind)())}
        if others:
            columns = {"id": pa.array(range(len(texts)))} | columns | {"url": pa.array(["u"] * len(texts))}
        table = pa.table(columns)
        if form == "parquet":
            path = tmp_path / f"{name}.parquet"
            pa.parquet.write_table(table, path, row_group_size=group)
            return path
        folder = tmp_path / name
        half = len(texts) // 2
        save_to_disk(pa, folder, [table.slice(0, half), table.slice(half)], group)
        return folder

    return make


def save_to_disk(pa, folder, tables, group):
    """Write the files of `datasets.Dataset.save_to_disk` in an order that no sorting yields."""
    folder.mkdir(parents=True)
    names = [f"data-{len(tables) - number:05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=group)
    (folder / "cache-1234.arrow").write_bytes(b"left by `map`")
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "1"}))


TEXTS = [f"row {number} ☃\n" * (number % 7) for number in range(1000)]


@pytest.mark.parametrize("form", FORMS)
def test_same_documents_as_jsonl(tmp_path, write, form):
    (tmp_path / "a.jsonl").write_text(rows(*TEXTS), encoding="utf-8")
    expected = documents_of(made(tmp_path, tmp_path / "a.jsonl", name="rows"))
    for number, kind in enumerate(("string", "large_string")):
        source = write(form, TEXTS, name=f"table{number}", kind=kind)
        assert documents_of(made(tmp_path, source, name=f"out{number}")) == expected


@pytest.mark.parametrize(("form", "unit_bytes"), list(product(FORMS, [500, 4000])))
def test_cuts_lose_nothing_and_workers_do_not_matter(tmp_path, write, form, unit_bytes):
    source = write(form, TEXTS, group=20)
    whole = documents_of(made(tmp_path, source, name="whole"))
    one = made(tmp_path, source, name="one", unit_bytes=unit_bytes)
    two = made(tmp_path, source, name="two", unit_bytes=unit_bytes, workers=2)
    assert documents_of(one) == whole
    assert content_of(one) == content_of(two)
    assert len(list(one.glob("train-*.bin"))) > 4


def test_folder_with_all_kinds(tmp_path, write, pa):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.jsonl").write_text(rows("line"))
    write("parquet", ["parquet"]).rename(folder / "c.parquet")
    save_to_disk(pa, folder / "saved", [pa.table({"text": ["arrow 1"]}), pa.table({"text": ["arrow 2"]})], 1)
    (folder / "other.arrow").write_text("not named by a state.json")
    documents = documents_of(made(tmp_path, folder))["train"]
    assert documents == [b"text", b"line", b"parquet", b"arrow 1", b"arrow 2"]


def test_folders_that_are_no_dataset(tmp_path, pa):
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match="does not list the files of a Hugging Face dataset"):
        find_inputs(DatasetSpec((str(tmp_path),)))
    for split in ("train", "validation"):
        save_to_disk(pa, tmp_path / "saved" / split, [pa.table({"text": ["x"]})], 1)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    with pytest.raises(UsageError, match="contains several splits of a Hugging Face DatasetDict"):
        find_inputs(DatasetSpec((str(tmp_path / "saved"),)))
    assert len(find_inputs(DatasetSpec((str(tmp_path / "saved" / "train"),)))) == 1


@pytest.mark.parametrize("form", FORMS)
def test_text_key_is_the_column(tmp_path, write, form):
    source = write(form, ["hello", "world"], key="body")
    documents = documents_of(made(tmp_path, source, text_key="body"))
    assert documents["train"] == [b"hello", b"world"]
    with pytest.raises(UsageError, match=r'no column "text" .*; the columns are: body, id, url') as caught:
        made(tmp_path, source, name="other")
    said(caught.value.hint)
    with pytest.raises(UsageError, match=r'column "id" .* contains int64, not strings'):
        made(tmp_path, source, name="numbers", text_key="id")


def test_dictionary_column(tmp_path, pa):
    values = pa.array(["same", "same", "other"]).dictionary_encode()
    save_to_disk(pa, tmp_path / "saved", [pa.table({"text": values})], 2)
    documents = documents_of(made(tmp_path, tmp_path / "saved"))
    assert documents["train"] == [b"same", b"same", b"other"]


@pytest.mark.parametrize(("form", "unit_bytes"), list(product(FORMS, [1 << 26, 700])))
def test_bad_row_is_named(tmp_path, write, form, unit_bytes):
    source = write(form, [*["good"] * 600, None, "good"], group=30)
    with pytest.raises(UsageError, match=r':\d+: column "text" .* is null, not a string') as caught:
        made(tmp_path, source, unit_bytes=unit_bytes)
    number = 601 if form == "parquet" else 601 - 301  # the row of the second file
    assert f":{number}: " in caught.value.message


@pytest.mark.parametrize("form", FORMS)
def test_bytes_that_are_no_utf8(tmp_path, write, pa, form, monkeypatch):
    invalid = pa.array([b"fine", b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    monkeypatch.setattr(pa, "array", lambda values, *kind, real=pa.array: invalid if kind else real(values))
    source = write(form, ["a", "b"], others=False)
    with pytest.raises(UsageError, match=r":\d: not UTF-8: byte 0xe9 at byte 4"):
        made(tmp_path, source)


@pytest.mark.parametrize("form", FORMS)
def test_file_that_is_cut_off(tmp_path, write, form):
    source = write(form, TEXTS)
    file = source if form == "parquet" else source / "data-00001.arrow"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UsageError, match=r"not a complete (Parquet|Arrow) file"):
        made(tmp_path, source)


def test_rows_are_counted_across_the_file(tmp_path, write):
    source = write("parquet", [str(number) for number in range(100)], group=10)
    (found,) = find_inputs(DatasetSpec((str(source),)))
    middle = source.stat().st_size // 4  # the footer follows
    first = list(read_column(found, "text", 0, middle))
    second = list(read_column(found, "text", middle))
    assert [row for row, _ in first + second] == list(range(1, 101))
    assert [int(value) for _, value in first + second] == list(range(100))
    assert first
    assert second


@pytest.mark.parametrize("form", FORMS)
def test_memory_does_not_grow_with_row_groups(write, pa, form):
    texts = [os.urandom(5000).hex() for _ in range(6000)]
    source = write(form, texts, group=6000, others=False)
    for found in find_inputs(DatasetSpec((str(source),))):
        before = peak = pa.total_allocated_bytes()
        for _row, _value in read_column(found, "text"):
            peak = max(peak, pa.total_allocated_bytes())
        assert peak - before < 40 << 20  # the table has 57 MiB, compressed or not


@pytest.mark.parametrize("form", FORMS)
def test_checks_before_a_run(data_config, write, form):
    source = str(write(form, ["hello world"] * 50))
    assert inspect_data(data_config(source=source)).problems == ()
    (found,) = inspect_data(data_config(source=source, text_key="body")).problems
    assert found[0] == "data.source"
    assert 'no column "body"' in found[1]
    (found,) = inspect_data(data_config(source=source, seq_len=1000)).problems
    assert found[0] == "data.seq_len"


@pytest.mark.parametrize("form", FORMS)
def test_first_rows_of_big_tables_are_checked(data_config, write, form, monkeypatch):
    monkeypatch.setattr("trainkit.capabilities.texts.checks._READ_IN_FULL", 10)
    source = str(write(form, ["x", None, *["hello world"] * 50]))
    (found,) = inspect_data(data_config(source=source)).problems
    said(found[1])
    (found,) = inspect_data(data_config(source=source, text_key="body")).problems
    assert 'no column "body"' in found[1]


def validated(source, key="text"):
    problems = []
    texts = find_inputs(DatasetSpec((str(source),)))
    summaries = [validate_texts(text, key, Tokenizer("bytes"), problems.append) for text in texts]
    assert [sum(problem.file == one.file for problem in problems) for one in summaries] == [
        one.problems for one in summaries
    ]
    return summaries, [(problem.line, problem.message) for problem in problems]


def test_validate_tables(tmp_path, write):
    source = write("parquet", ["good", None, "", "x" * LONG_ROW_BYTES, *["more"] * 300, None], group=50)
    (summary,), problems = validated(source)
    assert (summary.lines, summary.documents, summary.empty, summary.long) == (305, 302, 1, 1)
    assert (summary.first_empty, summary.first_long) == ([3], [4])
    assert summary.tokens == len("good") + LONG_ROW_BYTES + 4 * 300 + 302
    null = 'column "text" (data.text_key) is null, not a string'
    assert problems == [(2, null), (305, null)]
    source = write("arrow", ["", "a", "b", None])
    summaries, problems = validated(source)
    assert [(one.lines, one.first_empty) for one in summaries] == [(2, [1]), (2, [])]
    assert [line for line, _ in problems] == [2]


def test_validate_names_a_missing_column_and_a_damaged_file(tmp_path, write):
    source = write("parquet", ["a"])
    _, problems = validated(source, key="body")
    [(line, message)] = problems
    assert line is None
    said(message)
    source.write_bytes(source.read_bytes()[:-5])
    _, [(line, message)] = validated(source)
    assert line is None
    said(message)


def test_only_tables_need_pyarrow(data_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    expected = f"{tmp_path}/a.parquet cannot be read without pyarrow, which cannot be imported"
    with pytest.raises(UsageError) as caught:
        made(tmp_path, tmp_path / "a.parquet")
    assert caught.value.message.startswith(expected)
    said(caught.value.hint)
    (found,) = inspect_data(data_config(source=str(tmp_path / "a.parquet"))).problems
    assert found[1].startswith(expected)
    said(found[2])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.jsonl").write_text(rows("x"))
    assert documents_of(made(tmp_path, tmp_path / "a.jsonl", name="rows"))["train"] == [b"x"]


def test_real_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"n": list(range(len(TEXTS))), "text": TEXTS})
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    saved.select([5, 3]).save_to_disk(tmp_path / "selected")
    saved.to_parquet(tmp_path / "a.parquet")
    expected = [text.encode() for text in TEXTS if text]
    for number, name in enumerate(("saved", "a.parquet")):
        documents = documents_of(made(tmp_path, tmp_path / name, name=f"out{number}"))
        assert documents["train"] == expected
    selected = documents_of(made(tmp_path, tmp_path / "selected", name="few"))
    assert selected["train"] == [TEXTS[5].encode(), TEXTS[3].encode()]
