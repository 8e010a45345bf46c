"""Tests training data without a length: distributed by position, and resumed at the checkpoint."""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.support import tasks
from tests.support.parity import Case, curve, run_cases, run_chain, worst_difference
from tests.support.ranks import ForkedWorker
from tests.support.runs import (
    fork_workers,
    log_text,
    losses,
    make_attempt,
    samples_seen,
    train,
    wait_for,
    wait_until,
)
from tests.support.said import said
from trainkit.config import load_config
from trainkit.config.schema import RunConfig
from trainkit.errors import EXIT_NO_RESTART
from trainkit.plan.launch import Batch, BatchStage
from trainkit.run.manifest import published
from trainkit.run.rollbacks import Ranges
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.checkpoint.state import StreamState
from trainkit.trainer.stream import StreamData, is_stream, stream_batches
from trainkit.trainer.task_batches import Positions, TaskBatches
from trainkit.trainer.user_code import TaskError

FILE = Path(tasks.__file__)
STREAM = (f"task={FILE}:ClassifyStream", "optimizer.lr=0.01", "task_args.samples=37")


def config_of(*overrides: str) -> RunConfig:
    options = ["task=mine.py:Mine", "data.num_workers=0", *overrides]
    return load_config("quickstart", overrides=options, environ={}).config


class Letters:
    """A stream with the same letters in each epoch, and a random number for each letter."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.epochs: list[int] = []
        self.start = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < self.count:
            self.at += 1
            yield f"{'abcdefghij'[self.at - 1]}{random.randrange(1000)}"


class StatefulLetters(Letters):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


def batches(
    stream: Any,
    *,
    rank: int = 0,
    dp: int = 1,
    start: int = 0,
    saved: StreamState | None = None,
    skipped: Ranges = (),
) -> TaskBatches:
    return stream_batches(
        StreamData(stream, config_of()),
        list,
        Positions(Batch(1, 4 // dp, 4, 4), rank, dp, start, end=None, skipped=skipped),
        saved=saved,
        takes_state=rank == 0,
        pin_memory=False,
    )


def read(found: TaskBatches, count: int) -> list[str]:
    return [item for _ in range(count) for micro in next(found).microbatches for item in micro.data]


@pytest.mark.parametrize("kind", [Letters, StatefulLetters])
def test_samples_that_a_run_leaves_out(kind):
    """The skipped samples begin in the first epoch, in the middle of a step, and end in the second epoch."""
    kept = [position for position in range(30) if not 6 <= position < 13]
    everything = read(batches(kind(10)), 8)
    skipped = ((6, 13),)
    assert read(batches(kind(10), skipped=skipped), 5) == [everything[position] for position in kept[:20]]
    # A rollback adds the samples after a step that was saved without them.
    first = next(batches(kind(10)))
    later = batches(kind(10), start=4, saved=first.stream, skipped=skipped)
    assert read(later, 2) == [everything[position] for position in kept[4:12]]
    within = next(batches(kind(10), start=4, saved=first.stream, skipped=skipped))
    later = batches(kind(10), start=8, saved=within.stream, skipped=((6, 13), (15, 17)))
    kept.remove(15)
    kept.remove(16)
    assert read(later, 2) == [everything[position] for position in kept[8:16]]


def test_a_warmup_of_the_batch_size():
    """Two ranks read the samples in the order of one rank, and a stream resumes between the stages."""
    warmup, everything = (BatchStage(2, 1, 2), BatchStage(3, 2, 4)), read(batches(Letters()), 6)
    batch, sizes = Batch(1, 3, 6, 6, warmup=warmup), [2, 2, 4, 6, 6]

    def reader(rank: int, step: int, saved: StreamState | None) -> TaskBatches:
        positions = Positions(batch, rank, 2, sum(sizes[:step]), end=None, step=step)
        return stream_batches(StreamData(Letters(), config_of()), list, positions, saved, rank == 0, False)

    saved: dict[int, StreamState | None] = {0: None}
    for start in range(4):
        readers = [reader(rank, start, saved[start]) for rank in range(2)]
        for step in range(start, len(sizes)):
            steps = [next(found) for found in readers]
            assert {found.num_samples for found in steps} == {sizes[step]}
            micros = zip(*(found.microbatches for found in steps), strict=True)
            items = [item for pair in micros for micro in pair for item in micro.data]
            begin = sum(sizes[:step])
            assert items == everything[begin : begin + sizes[step]]
            saved.setdefault(step + 1, steps[0].stream)


def test_what_is_a_stream():
    class Torch(IterableDataset[Any]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            return iter(range(3))

    assert is_stream(Torch())
    assert is_stream(Letters())
    assert is_stream(iter([1]))
    assert not is_stream([1, 2])
    assert not is_stream(tasks.Points(3, 0))


def test_epochs_follow_each_other_within_a_step():
    stream = Letters()
    found = read(batches(stream), 3)
    assert "".join(item[0] for item in found) == "abcdeabcdeab"
    assert found[0] != found[5], "other random numbers in another epoch"
    assert stream.epochs[-3:] == [0, 1, 2]


def test_ranks_share_a_step_as_they_share_that_of_map_style_data():
    alone = read(batches(Letters()), 3)
    ranks = [[next(found) for _ in range(3)] for found in (batches(Letters(), rank=r, dp=2) for r in (0, 1))]
    dealt = [
        item
        for steps in zip(*ranks, strict=True)
        for micros in zip(*(step.microbatches for step in steps), strict=True)
        for micro in micros
        for item in micro.data
    ]
    assert dealt == alone
    assert all(step.num_samples == 4 for steps in ranks for step in steps)
    assert all(step.stream is None for step in ranks[1])


@pytest.mark.parametrize("kind", [Letters, StatefulLetters])
@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("dp", [1, 2])
def test_a_resume_continues_with_the_next_sample(kind, steps, dp):
    whole = read(batches(kind()), 8)
    before = batches(kind())
    for _ in range(steps):
        saved = next(before).stream
    assert saved is not None
    stream, read_back = kind(), StreamState(**json.loads(json.dumps(asdict(saved))))
    resumed = [batches(copy.copy(stream), rank=r, dp=dp, start=4 * steps, saved=read_back) for r in range(dp)]
    dealt = [[next(found).microbatches for found in resumed] for _ in range(8 - steps)]
    assert [
        item for step in dealt for micros in zip(*step, strict=True) for m in micros for item in m.data
    ] == (whole[4 * steps :])


def test_a_state_is_that_of_the_step_not_that_of_what_is_read_ahead():
    class Shared(StatefulLetters):
        """A stream that returns the object that it changes."""

        state: dict[str, Any]

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                self.state["at"] = self.at
                yield item

        def state_dict(self) -> dict[str, Any]:
            return self.state

    stream = Shared(10)
    stream.state = {}
    found = batches(stream)
    first, _ = next(found), next(found)
    assert first.stream.state == {"at": 3}, "before the last sample of the step"


class Reads(Letters):
    """A stream that is read by a function of the stream."""

    def __init__(self, read: Callable[[Any], Iterator[Any]], fingerprint: str | None = None) -> None:
        super().__init__()
        self.read = read
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __iter__(self) -> Iterator[Any]:
        return self.read(self)


class HasState(StatefulLetters):
    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.state_dict = state  # type: ignore[method-assign]


def go_on(stream: Letters) -> Iterator[int]:
    """Continue when the stream should start again."""
    while stream.at < stream.count:
        stream.at += 1
        yield stream.at


MISTAKES: dict[str, tuple[Any, type[Exception]]] = {
    "tensor": (HasState(lambda: {"at": torch.ones(1)}), TaskError),
    "tuple": (HasState(lambda: {"at": (1, 2)}), TaskError),
    "raises": (HasState(lambda: {}["at"]), RuntimeError),
    "consumed": (Reads(go_on), TaskError),
    "consumed in an epoch": (Reads(go_on, "own"), TaskError),
    "empty": (Reads(lambda _: iter(()), "own"), TaskError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_a_stream(mistake):
    stream, error = MISTAKES[mistake]
    with pytest.raises(error) as found:
        read(batches(stream), 2)
    said(neutral(found.value))


def neutral(error: Any) -> str:
    """Return the message and the hint of an error without numbers of lines."""
    return re.sub(r"(\.py:)\d+", r"\1N", f"{error}\n{getattr(error, 'hint', '')}")


STARTS: dict[str, tuple[Any, list[str]]] = {
    "iterator": (iter([1, 2]), []),
    "empty": (Letters(0), []),
    "raises": (Reads(lambda _: map({}.__getitem__, ["column"])), []),
    "epochs": (Letters(), ["train.epochs=2", "train.steps=null"]),
}


@pytest.mark.parametrize("mistake", STARTS)
def test_mistakes_that_are_found_at_the_start(mistake):
    stream, overrides = STARTS[mistake]
    with pytest.raises(TaskError) as found:
        StreamData(stream, config_of(*overrides))
    said(neutral(found.value))
    assert found.value.exit_code == EXIT_NO_RESTART


class Forgetful(StatefulLetters):
    """A stream that cannot restore the content of a shuffle buffer."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"] + 1


def test_a_stream_that_resumes_elsewhere_is_refused():
    saved = next(batches(Forgetful(10))).stream
    with pytest.raises(TaskError) as found:
        next(batches(Forgetful(10), start=4, saved=saved))
    said(neutral(found.value))
    assert read(batches(Letters(10), start=4, saved=saved), 1)[0][0] == "e", "without the methods it can"


def test_other_samples_at_the_position_of_the_checkpoint_are_refused():
    class Changed(Letters):
        def __iter__(self) -> Iterator[Any]:
            return (item if index < 3 else "new" for index, item in enumerate(super().__iter__()))

    saved = next(batches(Letters())).stream
    with pytest.raises(TaskError) as found:
        next(batches(Changed(), start=4, saved=saved))
    said(neutral(found.value))


def test_the_stream_of_the_docs(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "own-task.md").read_text()
    names: dict[str, Any] = {}
    exec("class Lines:" + text.partition("class Lines:")[2].partition("```")[0], names)
    (tmp_path / "lines").write_text("".join(f"{number}\n" for number in range(10)))
    whole = read(batches(names["Lines"](tmp_path / "lines")), 6)
    for steps in (1, 2, 3, 5):
        before = batches(names["Lines"](tmp_path / "lines"))
        for _ in range(steps):
            saved = next(before).stream
        after = batches(names["Lines"](tmp_path / "lines"), start=4 * steps, saved=saved)
        assert read(after, 6 - steps) == whole[4 * steps :]


@pytest.mark.slow
@pytest.mark.smoke
def test_killed_on_two_ranks_it_resumes_exactly(tmp_path):
    """The kill comes in the third epoch, while a process reads ahead, two steps after the checkpoint."""
    common = [*STREAM, "task_args.dropout=0.2", "train.steps=10"]
    common += ["checkpoint.every_steps=4", "checkpoint.async=false"]
    train(tmp_path / "whole", common, 2)
    for stateful in ("true", "false"):
        run = tmp_path / stateful
        options = [*common, f"task_args.stateful={stateful}"]
        attempt = make_attempt(run, [*options, "task_args.blocks_at=110"], 2)
        with ranks(attempt, 2):
            wait_until(lambda run=run: len(losses(run)) == 6)
        assert published(RunDir(run).checkpoints_dir)[-1].step == 4
        attempt = train(run, options, 2)
        assert losses(run) == losses(tmp_path / "whole")
        assert samples_seen(run) == list(range(16, 161, 16))
        reads_over = "skipping 26 samples of epoch 1 of the stream" in log_text(attempt)
        assert reads_over is (stateful == "false"), log_text(attempt)


@pytest.mark.slow
def test_on_another_number_of_ranks_it_sees_each_sample_once(tmp_path):
    """The curve equals the curve of the same samples as map-style data in their order."""
    same = [*("optimizer.lr=0.01", "task_args.samples=37", "train.steps=6", "data.shuffle=false")]
    map_style = [f"task={FILE}:Classify", *same]
    run_cases(tmp_path, [Case("map-style", 1, {})], map_style)
    links: list[tuple[int, dict[str, object]]] = [(2, {"dp_replicate": 2}), (1, {}), (2, {"dp_shard": 2})]
    for name in ("stateful", "read-over"):
        own = f"task_args.stateful={name == 'stateful'}".lower()
        (tmp_path / name).mkdir()
        run_chain(tmp_path / name, links, [f"task={FILE}:ClassifyStream", *same, own, "data.num_workers=1"])
        assert curve(tmp_path / name / "alone") == curve(tmp_path / "map-style")
        assert worst_difference(tmp_path / name / "chain", tmp_path / "map-style") < 1e-5, name


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_ends_the_attempt(tmp_path):
    attempt = make_attempt(tmp_path / "run", [*STREAM, "task_args.fails_at=100"], 2)
    with ranks(attempt, 2) as procs:
        codes = wait_for(procs)
    assert 1 in codes, codes
    assert re.search(r"sample 100 .*KeyError: 'column' \(.*\.py:", log_text(attempt))


@contextmanager
def ranks(attempt: AttemptDir, num_procs: int) -> Iterator[list[ForkedWorker]]:
    """Start workers that get SIGKILL at the end."""
    workers = fork_workers(attempt, num_procs)
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
