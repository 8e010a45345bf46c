"""Tests the way from texts to shards: each split's documents, and a result that only the texts decide."""

import errno
import fcntl
import gzip
import json
import os
import signal
import time

import pytest
from dataset_content import content_of, documents_of, rows, tokens_of

from trainkit.capabilities.texts.inputs import DatasetSpec
from trainkit.capabilities.texts.prepare import exclusive, prepare, run_jobs
from trainkit.capabilities.texts.tokenize import WORK_FOLDER
from trainkit.data.dataset_file import read_dataset_file
from trainkit.data.shards import TokenShards
from trainkit.errors import TrainkitError, UsageError


def made(tmp_path, *sources, name="out", workers=1, unit_bytes=1 << 26, **options):
    folder = tmp_path / name
    spec = DatasetSpec(tuple(str(source) for source in sources), **options)
    prepare(spec, folder, workers, unit_bytes=unit_bytes)
    return folder


def many_texts(folder):
    """Write some texts of each kind: unicode, CRLF, long lines, empty rows, compressed files."""
    folder.mkdir()
    (folder / "a.txt").write_bytes("héllo wörld\r\n".encode() * 3000)
    (folder / "b.txt").write_bytes(("ü" * 70_000).encode() + b"\nend")
    (folder / "c.jsonl").write_text(rows(*(f"row {i} ☃" * (i % 7) for i in range(2000))), encoding="utf-8")
    with gzip.open(folder / "d.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write(rows(*(f"packed {i}" for i in range(300))))
    with gzip.open(folder / "e.txt.gz", "wb") as stream:
        stream.write(b"compressed line\n" * 500)
    (folder / "sub").mkdir()
    (folder / "sub" / "f.txt").write_text("deep\n" * 20)
    (folder / "empty.txt").write_text("")
    (folder / ".hidden.txt").write_text("never")
    (folder / "notes.md").write_text("never")
    return folder


def test_text_is_split_by_position_on_a_line_or_at_a_character(tmp_path):
    text = b"".join(b"line %03d\r\n" % number for number in range(100))
    (tmp_path / "a.txt").write_bytes(text)
    documents = documents_of(made(tmp_path, tmp_path / "a.txt", val_fraction=0.25))
    assert documents == {"train": [text[:750]], "val": [text[750:]]}
    text = ("é" * 1000).encode()
    (tmp_path / "a.txt").write_bytes(text)
    documents = documents_of(made(tmp_path, tmp_path / "a.txt", name="one", val_fraction=0.0995))
    (train,), (val,) = documents["train"], documents["val"]
    assert train + val == text
    assert len(val.decode()) == 99


def test_every_kth_row_is_validation(tmp_path):
    texts = [f"row {number}" for number in range(40)]
    (tmp_path / "a.jsonl").write_text(rows(*texts))
    documents = documents_of(made(tmp_path, tmp_path / "a.jsonl", val_fraction=0.1))
    assert documents["val"] == [text.encode() for text in texts[::10]]
    assert sorted(documents["train"] + documents["val"]) == sorted(text.encode() for text in texts)


def test_many_small_files_keep_the_fraction(tmp_path):
    for number in range(300):
        (tmp_path / f"{number:03d}.jsonl").write_text(rows("a", "b", "c"))
    documents = documents_of(made(tmp_path, tmp_path, name="../out-fraction", val_fraction=0.1))
    assert len(documents["val"]) == pytest.approx(90, abs=30)


def test_unicode_crlf_blank_rows_and_byte_order_mark(tmp_path):
    content = (
        b"\xef\xbb\xbf" + b'{"text": "caf\\u00e9 \\ud83d\\ude00"}\r\n\r\n{"text": ""}\n{"text": "a\\r\\nb"}'
    )
    (tmp_path / "a.jsonl").write_bytes(content)
    documents = documents_of(made(tmp_path, tmp_path / "a.jsonl"))
    assert documents == {"train": ["café 😀".encode(), b"a\r\nb"], "val": []}


def test_text_key_and_val_source(tmp_path):
    (tmp_path / "a.jsonl").write_text(rows("hello", key="body"))
    (tmp_path / "b.txt").write_text("checking")
    options = {"text_key": "body", "val_sources": (str(tmp_path / "b.txt"),), "val_fraction": 0.5}
    folder = made(tmp_path, tmp_path / "a.jsonl", **options)
    assert documents_of(folder) == {"train": [b"hello"], "val": [b"checking"]}


def test_number_of_workers_does_not_matter(tmp_path):
    folder = many_texts(tmp_path / "texts")
    one = made(tmp_path, folder, name="one", workers=1, val_fraction=0.1, unit_bytes=8192)
    three = made(tmp_path, folder, name="three", workers=3, val_fraction=0.1, unit_bytes=8192)
    assert content_of(one) == content_of(three)
    assert not (one / WORK_FOLDER).exists()


def test_units_that_are_done_are_not_done_again(tmp_path, monkeypatch):
    folder = many_texts(tmp_path / "texts")
    expected = content_of(made(tmp_path, folder, name="expected", val_fraction=0.1, unit_bytes=8192))
    from trainkit.capabilities.texts import prepare as module

    real, ran = module.run_unit, []

    def fail_after_five(folder, unit):
        if len(ran) == 5:
            raise KeyboardInterrupt
        ran.append(unit.index)
        return real(folder, unit)

    monkeypatch.setattr(module, "run_unit", fail_after_five)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, folder, val_fraction=0.1, unit_bytes=8192)
    assert not (tmp_path / "out" / "dataset.json").exists()

    monkeypatch.setattr(module, "run_unit", lambda *job: (ran.append(job[1].index), real(*job)))
    assert content_of(made(tmp_path, folder, val_fraction=0.1, unit_bytes=8192)) == expected
    assert ran == sorted(set(ran))


def test_same_inputs_again_do_nothing(tmp_path, a_txt):
    spec = DatasetSpec((str(a_txt),))
    assert not prepare(spec, tmp_path / "out")[1]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare(spec, tmp_path / "out")[1]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({"val_fraction": 0.5}, "hello\n", "val_fraction 0.0 instead of 0.5"),
        ({}, "hello, longer\n", "prepared from different files"),
        ({}, "HELLO\n", "prepared from files that have changed since then"),
    ],
)
def test_folder_with_another_dataset_is_left_alone(tmp_path, changes, text, message):
    (tmp_path / "a.txt").write_text("hello\n")
    folder = made(tmp_path, tmp_path / "a.txt")
    before = content_of(folder)
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        made(tmp_path, tmp_path / "a.txt", **changes)
    assert "nothing was overwritten" in caught.value.hint
    assert content_of(folder) == before


def test_folder_with_something_else_is_left_alone(tmp_path, a_txt):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"it contains thesis\.tex"):
        made(tmp_path, a_txt)
    assert content_of(tmp_path / "out") == {"thesis.tex": b"years of work"}


def test_begun_with_other_options(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello\n")
    monkeypatch.setattr("trainkit.capabilities.texts.prepare.run_unit", lambda folder, unit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(tmp_path, tmp_path / "a.txt")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="started with different options"):
        made(tmp_path, tmp_path / "a.txt", val_fraction=0.5)
    assert documents_of(made(tmp_path, tmp_path / "a.txt"))["train"] == [b"hello\n"]


def test_fingerprint_changes_with_text_tokenizer_and_options_only(tmp_path, tokenizer_json):
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.txt").write_text("hello\n")

    def fingerprint(name, source="a.txt", **options):
        return read_dataset_file(made(tmp_path, tmp_path / source, name=name, **options)).fingerprint

    first = fingerprint("1")
    assert fingerprint("2", "copy/a.txt") == first
    others = {
        fingerprint("3", val_fraction=0.5),
        fingerprint("4", text_key="other"),
        fingerprint("5", tokenizer=str(tokenizer_json)),
    }
    (tmp_path / "a.txt").write_text("hallo\n")
    others.add(fingerprint("6"))
    assert len(others) == 4
    assert first not in others


def test_hugging_face_tokenizer(tmp_path, tokenizer_json):
    from tokenizers import Tokenizer

    text = "the quick brown fox ☃\n" * 9000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(rows("the lazy dog", "jumps"))
    folder = made(tmp_path, tmp_path / "a.txt", tmp_path / "b.jsonl", tokenizer=str(tokenizer_json))
    library = Tokenizer.from_file(str(tokenizer_json))
    file = read_dataset_file(folder)
    assert file.tokenizer.vocab_size == library.get_vocab_size()
    assert (file.tokenizer.eos_token, file.tokenizer.eos_id) == ("<|endoftext|>", 0)
    parts = " ".join(map(str, tokens_of(folder)["train"])).split(" 0 ")
    assert library.decode([int(token) for token in parts[0].split()]) == text
    assert [int(token) for token in parts[1].split()] == library.encode("the lazy dog").ids


def test_vocabulary_beyond_16_bits(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(rows("w69999 w1", "w65536"))
    folder = made(tmp_path, tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    assert read_dataset_file(folder).dtype == "uint32"
    assert tokens_of(folder)["train"] == [69_999, 1, 70_000, 65_536, 70_000]
    assert TokenShards(folder, "train", 4).read([0]).tolist() == [[69_999, 1, 70_000, 65_536, 70_000]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{bad", "not JSON"),
        (b'{"body": 1}', 'no field "text" .*the fields are: body'),
        (b'{"text": null}', '"text" .* is null, not a string'),
        (b'{"text": [1]}', "is a list, not a string"),
        (b'["text"]', "the row is a list, not an object"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
        (b'{"text": "\\ud800"}', "an unpaired surrogate"),
    ],
)
@pytest.mark.parametrize("unit_bytes", [1 << 26, 64])
def test_bad_row_is_named_by_file_and_line(tmp_path, line, message, unit_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(*["good"] * 20).encode() + line + b"\n" + rows("good").encode())
    with pytest.raises(UsageError, match=rf"a\.jsonl:21: .*{message}") as caught:
        made(tmp_path, path, unit_bytes=unit_bytes)
    assert "trainkit data validate" in caught.value.hint


def test_text_that_is_no_utf8(tmp_path, tokenizer_json):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n" * 5)
    assert documents_of(made(tmp_path, tmp_path / "a.txt", name="bytes"))["train"] == [b"caf\xe9\n" * 5]
    with pytest.raises(UsageError, match=r"a\.txt is not UTF-8: byte 0xe9"):
        made(tmp_path, tmp_path / "a.txt", tokenizer=str(tokenizer_json))


def test_source_that_changes_in_the_middle(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("hello\n" * 100)
    from trainkit.capabilities.texts import prepare as module

    real = module.run_unit

    def touch_first(*job):
        path.write_text("HELLO\n" * 100)
        os.utime(path, ns=(1, 1))
        return real(*job)

    monkeypatch.setattr(module, "run_unit", touch_first)
    with pytest.raises(UsageError, match=r"a\.txt changed while it was being prepared"):
        made(tmp_path, path)


def test_cut_off_gzip_and_no_text_at_all(tmp_path):
    packed = gzip.compress(rows(*[f"row {number}" for number in range(5000)]).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UsageError, match=r"a\.jsonl\.gz is not a complete gzip file"):
        made(tmp_path, tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl").write_text("\n\n" + rows(""))
    with pytest.raises(UsageError, match="contain no text"):
        made(tmp_path, tmp_path / "a.jsonl", name="other")


def test_a_dataset_can_be_shared(tmp_path, a_txt):
    folder = made(tmp_path, a_txt)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) == 1
    record = json.loads((folder / "dataset.json").read_text())
    assert str(tmp_path) not in json.dumps(record)


def test_second_prepare_into_a_folder_is_refused(tmp_path, a_txt):
    (tmp_path / "out" / WORK_FOLDER).mkdir(parents=True)
    refused = pytest.raises(UsageError, match="another process is preparing")
    with exclusive(tmp_path / "out" / WORK_FOLDER / "lock"), refused:
        prepare(DatasetSpec((str(a_txt),)), tmp_path / "out")


def test_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(TrainkitError, match="does not support file locks"), exclusive(tmp_path / "lock"):
        pass


def double(number):
    return 2 * number


def fail_at_three(number):
    if number == 3:
        raise UsageError("three is wrong", hint="choose another")
    time.sleep(0 if number < 3 else 30)
    return number


def signal_own_parent_group(number):
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        os.kill(os.getpid(), sent)
    return number


def kill_self(number):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_in_the_order_of_the_jobs(workers):
    ended = []
    assert run_jobs(double, list(range(20)), workers, ended.append) == [2 * number for number in range(20)]
    assert sorted(ended) == list(range(20))
    assert run_jobs(double, [], workers, ended.append) == []


def test_a_failure_does_not_wait_for_the_others():
    began = time.monotonic()
    with pytest.raises(UsageError, match="three is wrong") as caught:
        run_jobs(fail_at_three, list(range(10)), 2, lambda number: None)
    assert caught.value.hint == "choose another"
    assert time.monotonic() - began < 15


def test_workers_that_get_a_signal():
    assert run_jobs(signal_own_parent_group, [1, 2], 2, lambda number: None) == [1, 2]
    with pytest.raises(TrainkitError, match="a worker process was killed") as caught:
        run_jobs(kill_self, [1, 2], 2, lambda number: None)
    assert "fewer workers" in caught.value.hint
