"""Tests that every invalid line is reported, and the summary of a source."""

import gzip

import pytest
from dataset_content import rows

from tests.support.said import said
from trainkit.capabilities.texts.inputs import DatasetSpec, find_inputs
from trainkit.capabilities.texts.prepare import prepare
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.capabilities.texts.validate import LONG_ROW_BYTES, validate_texts


def validated(path, content, tokenizer="bytes"):
    path.write_bytes(content)
    (source,) = find_inputs(DatasetSpec((str(path),)))
    problems = []
    summary = validate_texts(source, "text", Tokenizer(tokenizer), problems.append)
    assert summary.problems == len(problems)
    return summary, [(problem.line, problem.message) for problem in problems]


def test_rows(tmp_path):
    content = (
        rows("good", "", "café").encode() + b'\n{bad\n{"text": 3}\n{"text": "\xff"}\n' + rows("last").encode()
    )
    summary, problems = validated(tmp_path / "a.jsonl", content)
    assert (summary.lines, summary.documents, summary.empty) == (8, 3, 2)
    assert summary.tokens == len("good") + len("café".encode()) + len("last") + 3
    assert [line for line, _ in problems] == [5, 6, 7]
    said(problems[2][1])
    long = "x" * LONG_ROW_BYTES
    content = rows("a", *[""] * 7, long, "b", long, long[1:]).encode() + b"\n"
    summary, problems = validated(tmp_path / "a.jsonl", content)
    assert problems == []
    assert (summary.empty, summary.first_empty) == (8, [2, 3, 4, 5, 6])
    assert (summary.long, summary.first_long) == (2, [9, 11])
    said("\n".join(summary.notes()))


def test_text(tmp_path):
    content = b"fine \xe2\x98\x83\r\ncaf\xe9 caf\xe9\nfine\n\xff" + b"x" * 3_000_000 + b"\xff\nends \xe2\x98"
    summary, problems = validated(tmp_path / "a.txt", content)
    assert [line for line, _ in problems] == [2, 4, 5]
    said("\n".join(message for _, message in problems))
    assert (summary.lines, summary.documents) == (5, 1)
    summary, problems = validated(tmp_path / "a.txt", b"x" + "☃".encode() * 1_000_000)
    assert problems == []
    assert summary.tokens == 3_000_002
    summary, problems = validated(tmp_path / "a.txt", b"")
    assert (summary.documents, summary.empty, summary.tokens, problems) == (0, 1, 0, [])


def test_counts_are_those_of_prepare(tmp_path, tokenizer_json):
    content = rows(*(f"the quick brown fox {number}" for number in range(500))).encode()
    summary, problems = validated(tmp_path / "a.jsonl", content, str(tokenizer_json))
    made, _ = prepare(
        DatasetSpec((str(tmp_path / "a.jsonl"),), tokenizer=str(tokenizer_json)), tmp_path / "out"
    )
    assert summary.tokens == made.num_tokens("train")
    assert problems == []


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"x" * 100, mtime=0)[:-9]], ids=["no gzip", "cut off"]
)
def test_damaged_gzip(tmp_path, content):
    _, problems = validated(tmp_path / "a.txt.gz", content)
    assert len(problems) == 1
    assert "gzip" in problems[0][1]
