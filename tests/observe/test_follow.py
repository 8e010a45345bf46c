import pytest

from trainkit.observe.logs import MAX_LINE, follow, last_texts, run_is_over, start_of_last
from trainkit.run.files import parse_record, write_json
from trainkit.run.rundir import RunDir


def rank_0(attempt):
    return [attempt.rank_log(0)]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.attempt(1).create()
    return run


def test_over_all_attempts(run):
    run.attempt(1).rank_log(0).write_text("a\nb\n")
    write_json(run.attempt(1).end_file, {"action": "requeue"})
    run.attempt(2).create()
    run.attempt(2).rank_log(0).write_text("c\n")
    write_json(run.attempt(2).end_file, {"action": "finished"})
    lines = list(follow(run, 1, rank_0, lambda: True))
    assert lines == [("rank-0000", text) for text in "abc"]
    assert list(follow(run, 2, rank_0, lambda: True)) == [("rank-0000", "c")]
    assert [line for _, line in follow(run, 1, rank_0, lambda: True, last=1)] == ["b", "c"]


def test_what_is_written_while_following(run):
    steps = iter(["a\n", "b\nc", None])

    def alive():
        text = next(steps)
        if text is None:
            return False
        with run.attempt(1).rank_log(0).open("a") as stream:
            stream.write(text)
        return True

    assert [line for _, line in follow(run, 1, rank_0, alive)] == ["a", "b", "c"]


def test_when_a_run_is_over(run):
    for action, expected in (
        (None, (False, False, True)),
        ("requeue", (False, False, True)),
        ("failed", (True,) * 3),
    ):
        if action is not None:
            write_json(run.attempt(1).end_file, {"action": action})
        assert tuple(run_is_over(run, alive) for alive in (True, None, False)) == expected


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (b"a\nb\nc\n", 2, (["b", "c"], 2, 2)),
        (b"a\nb\nc", 2, (["a", "b"], 0, 2)),
        (b"a\nb\nc", 1, (["b"], 2, 4)),
        (b"a\nb\nc", 0, ([], 4, 5)),
        (b"a\n", 5, (["a"], 0, 0)),
        (b"a\nb\n", 0, ([], 4, 4)),
        (b"", 3, ([], 0, 0)),
        (b"x" * 100_000 + b"\n" + b"y" * 100_000 + b"\n", 1, (["y" * MAX_LINE], 100_001, 100_001)),
    ],
)
def test_last_lines(tmp_path, text, count, expected):
    path = tmp_path / "log"
    path.write_bytes(text)
    with path.open("rb") as stream:
        starts = [start_of_last(stream, count, unfinished=one) for one in (False, True)]
    assert (last_texts(path, count), *starts) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((b'{"loss": NaN, "step": 1}', {"loss": None, "step": 1}), (b'{"loss": -Infinity}', {"loss": None})),
        *((text, None) for text in (b'{"loss": 1', b"[1]", b"\xff\x00", b"[" * 100_000)),
    ],
)
def test_a_record_is_a_json_object(line, expected):
    assert parse_record(line) == expected
