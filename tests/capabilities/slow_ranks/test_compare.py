"""Tests ranks that delay the others: which ranks are reported, when, and when none is."""

import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import wait_for
from tests.support.runs import fork_workers, make_attempt
from tests.support.runs import wait_for as wait_for_workers
from trainkit.capabilities.slow_ranks.compare import Slowdown, SlowRanks
from trainkit.capability import TimedRanks
from trainkit.plan.launch import Layout
from trainkit.run.events import read_metrics
from trainkit.run.files import read_jsonl
from trainkit.trainer.step_clock import WINDOW, Times, typical_times

STEP_S = 0.2
HOSTS = [f"node{rank}" for rank in range(1024)]


def ranks_of(layout: Layout, *, on_gpu: bool) -> SlowRanks:
    return SlowRanks(TimedRanks(layout, HOSTS, WINDOW, on_gpu))


def add_steps(
    ranks: SlowRanks, steps: range, size: int, slow: dict[int, tuple[float, float]], *, seed: int = 0
) -> list[Slowdown]:
    """Add steps with 1 ms of data wait and 20 ms of compute per rank, plus the delays in `slow`."""
    draw = random.Random(seed)

    def times() -> Iterator[Times]:
        for rank in range(size):
            data_s, compute_s = slow.get(rank, (0.0, 0.0))
            yield 0.001 + data_s, 0.02 * draw.uniform(0.9, 1.1) + compute_s

    step_s = STEP_S + max(map(sum, slow.values()), default=0.0)
    return add(ranks, [(step, list(times()), step_s) for step in steps])


def add(ranks: SlowRanks, steps: Sequence[tuple[int, list[Times], float]]) -> list[Slowdown]:
    """Add steps, each with the times of all ranks. The ranks report at the end of a window."""
    found: list[Slowdown] = []
    window: list[list[Times]] = []
    for step, times, step_s in steps:
        window.append(times)
        reported: list[float] = []
        if step % WINDOW == 0:
            reported = [value for of_rank in zip(*window, strict=True) for value in typical_times(of_rank)]
            window = []
        found += ranks.compare(step, reported, step_s)
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 64, 1024])
def test_a_slow_rank_is_named_within_30_steps_and_when_it_is_over(size: int) -> None:
    ranks, slow = ranks_of(Layout(dp_shard=size), on_gpu=True), size - 1
    assert add_steps(ranks, range(1, 51), size, {}) == []
    [found] = add_steps(ranks, range(51, 81), size, {slow: (0.0, 0.015)})
    assert (found.rank, found.is_over, found.phase, found.since_step) == (slow, False, "compute", 51)
    assert 1.5 < found.ratio < 2.0
    assert add_steps(ranks, range(81, 121), size, {slow: (0.0, 0.015)}) == []  # the rank was already reported
    [over] = add_steps(ranks, range(121, 151), size, {})
    assert (over.rank, over.is_over) == (slow, True)


def test_a_window_that_a_resume_cut_off_is_not_judged() -> None:
    ranks = ranks_of(Layout(dp_shard=4), on_gpu=True)
    slow_at_first = {1: (0.0, 5.0)}
    assert add_steps(ranks, range(39, 41), 4, slow_at_first) == []
    assert add_steps(ranks, range(41, 51), 4, slow_at_first) == []
    assert add_steps(ranks, range(51, 101), 4, {}) == []


def test_which_ranks_are_slow_and_why() -> None:
    ranks = ranks_of(Layout(dp_replicate=4), on_gpu=True)
    [found] = add_steps(ranks, range(1, 41), 4, {2: (0.05, 0.01)})
    assert (found.rank, found.phase) == (2, "data")
    ranks = ranks_of(Layout(dp_shard=8), on_gpu=True)
    found = add_steps(ranks, range(1, 41), 8, {1: (0.0, 0.02), 5: (0.0, 0.03)})
    assert [item.rank for item in found] == [1, 5]


def test_one_long_step_or_window_is_not_a_slow_rank() -> None:
    ranks = ranks_of(Layout(dp_shard=4), on_gpu=True)
    usual, long = (0.001, 0.02), (0.001, 5.02)
    steps = []
    for step in range(1, 401):
        is_long = step % WINDOW == 1
        steps.append((step, [long if is_long and rank == step % 4 else usual for rank in range(4)], STEP_S))
    assert add(ranks, steps) == []
    ranks = ranks_of(Layout(dp_shard=4), on_gpu=True)
    add_steps(ranks, range(1, 11), 4, {})
    for start in range(11, 200, 2 * WINDOW):
        assert add_steps(ranks, range(start, start + WINDOW), 4, {1: (0.0, 0.05)}) == []
        assert add_steps(ranks, range(start + WINDOW, start + 2 * WINDOW), 4, {}) == []


def test_stages_of_a_pipeline_are_not_compared() -> None:
    ranks = ranks_of(Layout(pp=2, dp_shard=2), on_gpu=True)
    last = {2: (0.0, 0.1), 3: (0.0, 0.1)}  # the last stage has the head
    assert add_steps(ranks, range(1, 101), 4, last) == []
    [found] = add_steps(ranks, range(101, 141), 4, {**last, 2: (0.0, 0.3)})
    assert found.rank == 2


def test_the_slowest_rank_is_known_without_being_slow() -> None:
    ranks = ranks_of(Layout(pp=2, dp_shard=3), on_gpu=True)
    add_steps(ranks, range(1, 11), 6, {})
    assert ranks.values == {}, "the first window starts up"
    times = [(0.001, 0.020), (0.001, 0.022), (0.001, 0.021), (0.0, 0.1), (0.003, 0.1), (0.0, 0.1)]
    assert add(ranks, [(step, times, STEP_S) for step in range(11, 41)]) == []
    assert ranks.values == {
        "slowest_rank": 4,  # 3 ms behind the other ranks of its stage
        "slowest_host": "node4",
        "slowest_rank_s": 0.103,
        "other_ranks_s": 0.1,
    }


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_named_in_an_undisturbed_run(seed: int) -> None:
    ranks = ranks_of(Layout(dp_shard=16), on_gpu=True)
    assert add_steps(ranks, range(1, 1001), 16, {}, seed=seed) == []


def test_short_steps_are_not_judged_by_a_moment() -> None:
    ranks = ranks_of(Layout(dp_shard=4), on_gpu=True)
    times = [(0.001, 0.002), (0.001, 0.002), (0.001, 0.002), (0.001, 0.02)]
    steps = [(step, times, 0.0251) for step in range(1, 1001)]
    assert add(ranks, steps[:120]) == []
    [found] = add(ranks, steps[120:130])  # three seconds after the warm-up
    assert (found.rank, found.since_step) == (3, 11)


def test_on_cpus_sharded_ranks_are_not_compared() -> None:
    assert add_steps(ranks_of(Layout(dp_shard=4), on_gpu=False), range(1, 101), 4, {1: (0.0, 0.1)}) == []
    found = add_steps(ranks_of(Layout(dp_replicate=4), on_gpu=False), range(1, 101), 4, {1: (0.0, 0.1)})
    assert [item.rank for item in found] == [1]


SLOW = """
import os, time
from pathlib import Path
from tests.support.tasks import Classify, Points
def wait_if_slow(phase):
    if os.environ["RANK"] == "1" and Path(__file__).with_name(phase).exists():
        time.sleep(0.02)
class SlowPoints(Points):
    def __getitem__(self, index):
        wait_if_slow("data")
        return super().__getitem__(index)
class Task(Classify):
    def train_dataset(self):
        return SlowPoints(64, 0)
    def loss(self, model, batch):
        wait_if_slow("compute")
        return super().loss(model, batch)
"""


@pytest.mark.slow(seconds=20)
def test_a_rank_that_is_slow_for_a_while_is_named_with_its_phase(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "data").touch()
    options = ["train.steps=100000", "parallel.dp_replicate=2", "data.num_workers=0"]
    batch = ["train.device_batch_size=8", f"task={tmp_path / 'slow.py'}:Task"]
    attempt = make_attempt(tmp_path / "run", [*options, *batch], 2)
    run, workers = attempt.run, fork_workers(attempt, 2)

    def of_rank_1(name: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(run.events_file, [name]) if event["rank"] == 1]

    def wait_until(is_true: Callable[[], object]) -> None:
        wait_for(lambda: is_true() or any(worker.poll() is not None for worker in workers), 240)

    try:
        wait_until(lambda: of_rank_1("slow_rank"))
        last = read_metrics(run)[-1]
        (tmp_path / "data").unlink()
        wait_until(lambda: of_rank_1("slow_rank_over"))
        begins = read_metrics(run)[-1]["step"]
        (tmp_path / "compute").touch()
        wait_until(lambda: len(of_rank_1("slow_rank")) == 2)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        wait_for_workers(workers)
    loads, computes = of_rank_1("slow_rank")
    assert (loads["phase"], loads["host"]) == ("data", socket.gethostname())
    assert loads["own_s"] > 8 * 0.02 > loads["usual_s"]
    assert (last["slowest_rank"], last["slowest_host"]) == (1, loads["host"])
    assert last["slowest_rank_s"] > 8 * 0.02 > last["other_ranks_s"]
    assert computes["phase"] == "compute"
    assert computes["ratio"] > 1.4
    assert begins - WINDOW < computes["since_step"] <= computes["step"]
    assert attempt.rank_log(0).read_text().count(f"rank 1 on {loads['host']} has been slow since") == 2
