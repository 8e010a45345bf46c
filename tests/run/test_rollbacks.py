"""Tests rollbacks: which checkpoints and samples remain part of a run."""

from dataclasses import replace

import pytest

from tests.run.test_manifest import change, make
from trainkit.data.order import positions_of
from trainkit.errors import UsageError
from trainkit.run.checkpoint_list import list_checkpoints
from trainkit.run.manifest import best_step, point_best_at, published
from trainkit.run.rollbacks import (
    Rollback,
    in_line,
    merged,
    move_aside,
    number_before,
    parse_ranges,
    position_of,
    ranges_of,
    read_rollbacks,
    shown_ranges,
    write_rollbacks,
)
from trainkit.run.rundir import RunDir

TO_20 = Rollback(20, 45, 1, ((320, 720),), "the loss was high", is_automatic=True)
TO_30 = Rollback(30, 60, 2)
TO_0 = Rollback(0, 60, 2)


@pytest.mark.parametrize(
    ("rollbacks", "kept"),
    [
        ((), ["10/0", "20/0", "30/0", "30/1", "40/1", "50/2"]),
        ((TO_20,), ["10/0", "20/0", "30/1", "40/1", "50/2"]),
        ((TO_20, TO_30), ["10/0", "20/0", "30/1", "50/2"]),
        ((TO_20, TO_0), ["50/2"]),
        ((TO_30, TO_20), ["10/0", "20/0", "50/2"]),
    ],
)
def test_checkpoints_in_line(tmp_path, rollbacks, kept):
    """A checkpoint is described as its step and the number of rollbacks on which it is based."""
    found = {}
    for name in ("10/0", "20/0", "30/0", "30/1", "40/1", "50/2"):
        step, number = map(int, name.split("/"))
        checkpoint = make(tmp_path / str(number), step)
        change(checkpoint, progress={"num_rollbacks": number} if number else {})
        found[name] = checkpoint
    there = in_line(found.values(), rollbacks)
    assert [name for name, checkpoint in found.items() if checkpoint in there] == kept


def test_an_unreadable_checkpoint_is_left_for_others_to_judge(tmp_path):
    checkpoint = make(tmp_path, 30)
    checkpoint.manifest_file.write_text("")
    assert in_line([checkpoint], [TO_20]) == [checkpoint]


def test_checkpoints_are_moved_aside_once_and_never_lost(tmp_path):
    run = RunDir(tmp_path)
    for step in (10, 20, 30, 40):
        point_best_at(make(run.checkpoints_dir, step))
    write_rollbacks(run, [TO_20])
    assert read_rollbacks(run) == (TO_20,)
    assert [item.state for item in list_checkpoints(run)] == [*["published"] * 2, *["rolled back"] * 2]
    assert move_aside(run) == ["step-00000030", "step-00000040"]
    assert move_aside(run) == []
    assert [item.step for item in published(run.checkpoints_dir)] == [10, 20]
    assert best_step(run.checkpoints_dir) is None
    again = make(run.checkpoints_dir, 40)
    assert move_aside(run) == ["step-00000040"]
    assert not again.path.exists()
    unused = [(item.name, item.state) for item in list_checkpoints(run)[2:]]
    assert unused == [
        ("step-00000030.rolled-back", "rolled back"),
        ("step-00000040.rolled-back", "rolled back"),
        ("step-00000040.rolled-back-2", "rolled back"),
    ]


def test_a_damaged_file_is_an_error(tmp_path):
    run = RunDir(tmp_path)
    assert read_rollbacks(run) == ()
    for text in ('[{"step": "20", "from_step": 45, "attempt": 1}]', '[{"step": 20}]', "[", "3", "[3]"):
        run.rollbacks_file.write_text(text)
        with pytest.raises(UsageError, match=r"rollbacks\.json is damaged: "):
            read_rollbacks(run)


SKIPPED = ((3, 5), (8, 9))


def test_positions_are_counted_without_the_skipped_ones():
    kept = [position for position in range(20) if position not in (3, 4, 8)]
    numbers = range(len(kept))
    assert positions_of(numbers, SKIPPED).tolist() == kept
    assert [position_of(number, SKIPPED) for number in numbers] == kept
    assert position_of(-1, ((0, 4),)) == -1
    for position in range(20):
        assert number_before(position, SKIPPED) == sum(one < position for one in kept)


@pytest.mark.parametrize(
    ("texts", "ranges"),
    [
        ([], ()),
        (["7-7"], ((7, 8),)),
        (["9-12", "0-3"], ((0, 4), (9, 13))),
        (["0-4", "5-9", "7-8", "20-20"], ((0, 10), (20, 21))),
    ],
)
def test_ranges(texts, ranges):
    assert parse_ranges(texts) == ranges
    assert merged(ranges, ranges[::-1]) == ranges


@pytest.mark.parametrize(
    "text", ["", "7", "7-", "-7", "8-7", "a-b", "1-2-3", "1 - 2", "8-9999999999999999999"]
)
def test_what_is_no_range(text):
    with pytest.raises(UsageError, match="is not a range of sample positions"):
        parse_ranges([text])


@pytest.mark.parametrize(
    "wrong", [range(0), range(5, 5), range(-1, 3), range(0, 9, 2), range(9, 5, -1), range(1 << 63)]
)
def test_ranges_from_python(wrong):
    assert ranges_of([range(5, 9), range(3)]) == ((0, 3), (5, 9))
    with pytest.raises(UsageError, match="is not a range of sample positions"):
        ranges_of([wrong])


def test_descriptions():
    assert TO_20.describe() == "went back from step 45 to step 20, left out 400 samples (320-719)"
    assert replace(TO_20, from_step=20).describe() == "continued at step 20, left out 400 samples (320-719)"
    assert TO_30.describe() == "went back from step 60 to step 30"
    assert shown_ranges(SKIPPED) == "3 samples (3-4, 8-8)"
