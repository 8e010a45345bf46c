import pytest

from trainkit.observe.follow import LogTail, last_lines, last_records
from trainkit.run.files import parse_record


def test_new_lines_as_they_are_completed(tmp_path):
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == []
    path.write_text("one\ntw")
    assert tail.read() == ["one"]
    with path.open("a") as stream:
        stream.write("o\nthree")
    assert tail.read() == ["two"]
    assert tail.read_rest() == ["three"]
    assert tail.read_rest() == []


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (b"a\nb\nc\n", 2, ([b"b", b"c"], 6)),
        (b"a\nb\nc", 2, ([b"a", b"b"], 4)),
        (b"a\n", 5, ([b"a"], 2)),
        (b"a\nb\n", 0, ([], 4)),
        (b"", 3, ([], 0)),
        (b"x" * 100_000 + b"\n" + b"y" * 100_000 + b"\n", 1, ([b"y" * 100_000], 200_002)),
    ],
)
def test_last_lines(tmp_path, text, count, expected):
    path = tmp_path / "log"
    path.write_bytes(text)
    assert last_lines(path, count) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"loss": NaN, "step": 1}', {"loss": None, "step": 1}),
        (b'{"loss": -Infinity}', {"loss": None}),
        (b'{"loss": 1', None),
        (b"[1]", None),
        (b"\xff\x00", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_record_is_a_json_object(line, expected):
    assert parse_record(line) == expected


def test_last_records_pass_over_what_a_crash_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert last_records(path, 5) == [{"step": 1}, {"step": 2}]
    assert last_records(path, 1) == [{"step": 2}]
    assert last_records(tmp_path / "missing", 1) == []
