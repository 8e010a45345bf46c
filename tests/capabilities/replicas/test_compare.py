"""Tests the comparison of replicas: a single flipped bit is found, and its rank is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import wait_for_all
from tests.support.runs import TIMEOUT_S, events, fork_workers, log_text, make_attempt
from trainkit.capabilities.replicas import Replicas
from trainkit.capabilities.replicas.compare import differing
from trainkit.capabilities.replicas.replicas_plan import ReplicasPlan
from trainkit.errors import EXIT_NO_RESTART, EXIT_OK
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.run.events import read_events
from trainkit.run.manifest import published
from trainkit.run.process import own_host
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.metrics import bit_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_every_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.arange(-30, 30).to(dtype).view(6, 10).t()  # not contiguous
    plain = torch.view_as_real(tensor)[..., 1] if dtype.is_complex else tensor
    size = plain.element_size()
    words = plain.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    [before] = bit_sums([tensor])
    for bit in range(8 * size):
        mask = -(1 << bit) if bit == 8 * size - 1 else 1 << bit
        words[3, 4] ^= mask
        assert bit_sums([tensor]) != [before], bit
        words[3, 4] ^= mask
    assert bit_sums([tensor]) == [before]


@pytest.mark.parametrize(
    ("layout", "checksums", "expected"),
    [
        (Layout(dp_replicate=3), [7, 7, 7], {}),
        (Layout(dp_replicate=3), [7, 8, 7], {1: 0}),
        (Layout(dp_replicate=3), [8, 7, 7], {0: 1}),
        (Layout(dp_replicate=2), [7, 8], {1: 0}),
        # Only ranks with equal shards are compared: 0 with 2, and 1 with 3.
        (Layout(dp_replicate=2, dp_shard=2), [7, 8, 7, 8], {}),
        (Layout(dp_replicate=2, dp_shard=2), [7, 8, 7, 9], {3: 1}),
        (Layout(dp_replicate=2, pp=2), [7, 7, 8, 8], {}),
        (Layout(dp_replicate=2, pp=2), [7, 6, 8, 8], {1: 0}),
        (Layout(dp_replicate=2, tp=2), [7, 8, 7, 8], {}),
    ],
)
def test_the_rank_that_differs_from_most_replicas_is_named(
    layout: Layout, checksums: list[int], expected: dict[int, int]
) -> None:
    assert differing(checksums, layout) == expected


def flips(rank: int, of: Callable[[Any], torch.Tensor]) -> None:
    """Flip the lowest bit of an element of a tensor of a rank's last weight in step 2."""
    from trainkit.trainer import loop

    update = loop.Trainer._update_state

    def flipped(self: Any, batch: Any, report: Any) -> None:
        update(self, batch, report)
        if self.world.rank == rank and self.state.step == 2:
            of(self.built.weights[-1]).view(-1)[5] ^= 1

    loop.Trainer._update_state = flipped  # type: ignore[method-assign]


def shard_of_rank_3() -> None:
    flips(3, lambda weight: weight.param.detach().to_local().view(torch.int32))


def lower_half_of_rank_1() -> None:
    flips(1, lambda weight: weight.lower)


def run(
    folder: Path, num_procs: int, first: Callable[[], None], *options: str
) -> tuple[AttemptDir, list[int]]:
    common = ["train.steps=3", "train.global_batch_size=16", "replicas.compare_every=1", "data.num_workers=0"]
    attempt = make_attempt(folder / "run", [*common, *options], num_procs)
    workers = fork_workers(attempt, num_procs, first=first)
    return attempt, wait_for_all([worker.proc for worker in workers], TIMEOUT_S)


@pytest.mark.slow(seconds=10)
def test_a_flipped_bit_of_a_shard_is_a_warning(tmp_path: Path) -> None:
    attempt, codes = run(tmp_path, 4, shard_of_rank_3, "parallel.dp_replicate=2", "parallel.dp_shard=2")
    assert codes == [EXIT_OK] * 4, log_text(attempt)
    found = [
        {key: event[key] for key in ("step", "rank", "host", "device", "than")}
        for event in events(tmp_path / "run", "replica_differs")
    ]
    same = {"rank": 3, "host": own_host(), "device": "cpu", "than": 1}
    assert found == [{"step": 2, **same}, {"step": 3, **same}]
    host = own_host()
    line = (
        f"after step 2, weights of replicas differ, which were equal after step 1: "
        f"rank 3 ({host}, cpu) from rank 1 ({host})"
    )
    assert attempt.rank_log(0).read_text().count(line) == 1
    assert attempt.rank_log(3).read_text().count("differ") == 0
    [event, _] = read_events(RunDir(tmp_path / "run"), "replica_differs")
    assert Replicas().past(event) == f"the weights of rank 3 on {host} (cpu) differed from rank 1 at step 2"


@pytest.mark.slow(seconds=8)
def test_a_flipped_bit_can_stop_the_run(tmp_path: Path) -> None:
    """The lower halves of bf16 weights are compared too. The state of the step is not saved."""
    options = ("parallel.dp_replicate=2", "precision.dtype=bf16", "checkpoint.every_steps=1")
    attempt, codes = run(tmp_path, 2, lower_half_of_rank_1, *options, "replicas.on_difference=stop")
    assert codes == [EXIT_NO_RESTART] * 2, log_text(attempt)
    assert [checkpoint.step for checkpoint in published(attempt.run.checkpoints_dir)] == [1]
    assert [event["rank"] for event in events(tmp_path / "run", "replica_differs")] == [1]


def part_of(folder: Path, num_procs: int, *options: str) -> ReplicasPlan | None:
    return LaunchPlan.read(make_attempt(folder / "run", options, num_procs).plan_file).part(ReplicasPlan)


def test_only_replicas_are_compared(tmp_path: Path) -> None:
    assert part_of(tmp_path, 2, "parallel.dp_replicate=2") == ReplicasPlan(1000, "warn")
    assert part_of(tmp_path, 2, "parallel.dp_replicate=2", "replicas.compare_every=null") is None
    assert part_of(tmp_path, 2, "parallel.dp_shard=2") is None
