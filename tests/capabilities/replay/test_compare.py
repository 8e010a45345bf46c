"""Tests the result of a comparison, with records that were made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.capabilities.replay.compare import Comparison, compare
from trainkit.capabilities.replay.replay import ReplayPlan
from trainkit.capabilities.replay.steps import RunStep, find_step
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.run.events import log_event
from trainkit.run.files import append_jsonl
from trainkit.run.record import JobRecord
from trainkit.run.rundir import AttemptDir, RunDir

LAYOUT = Layout(dp_shard=4)
PLAN = launch_plan(backend="local", layout=LAYOUT, batch=Batch(2, 1, 8, 512))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """Return a run that recorded the steps 1 to 4, and a replay with the same values."""
    found = RunDir(tmp_path / "run"), RunDir(tmp_path / "copy")
    for run in found:
        attempt = run.attempt(1)
        attempt.rank_record(0).parent.mkdir(parents=True)
        attempt.plan_file.write_text(PLAN.to_text())
        attempt.config_file.write_text("name: t\ntrain: {steps: 20}\n")
        for step in range(1, 5):
            record(run, step)
            for rank in range(4):
                record_rank(attempt, rank, step)
    start(found[1], 1, 0)
    return found


def record(run: RunDir, step: int, **others: Any) -> None:
    values = {"loss": 2.0 + step, "grad_norm": 1.0 + step, "samples_seen": 8 * step}
    append_jsonl(run.metrics_file, {"step": step, "attempt": 1, **values, **others})


def record_rank(attempt: AttemptDir, rank: int, step: int, **others: Any) -> None:
    values = {"loss_sum": 3.0 * rank, "local_gradient": 5.0 + rank, "square_sum": 7.0 + rank}
    append_jsonl(attempt.rank_record(rank), {"step": step, "host": f"n{rank // 2}", **values, **others})


def replayed(folders: tuple[RunDir, RunDir], layout: Layout = LAYOUT) -> Comparison:
    run, copy = folders
    config = RunConfig.model_validate({"name": "t", "train": {"steps": 20}})
    at = RunStep(4, run.attempt(1), JobRecord(), config, PLAN, 24, 32, False)
    plan = PLAN if layout == LAYOUT else replace(PLAN, layout=layout)
    return compare(ReplayPlan(run, 4, 4, 0, at, config, plan), copy)


def test_equal(folders: tuple[RunDir, RunDir]) -> None:
    found = replayed(folders)
    assert (found.verdict, found.is_exact, found.culprit) == ("equal", True, None)
    record(folders[1], 4, loss=None, grad_norm=None)
    record(folders[0], 4, loss=None, grad_norm=None)
    assert replayed(folders).verdict == "equal", "not finite, and so again"


def test_a_step_that_was_not_recorded_is_unknown(folders: tuple[RunDir, RunDir]) -> None:
    lines = folders[0].metrics_file.read_text().splitlines(keepends=True)
    folders[0].metrics_file.write_text("".join(lines[:3]))
    assert replayed(folders).verdict == "unknown"


CASES = {
    "forward": ({2: {"loss_sum": 1.5}}, [2], ["n1"], "its loss, in the forward pass"),
    "backward": ({3: {"local_gradient": 1.5}}, [3], ["n1"], "its gradient before the reduction"),
    "shard": ({0: {"square_sum": 1.5}, 1: {"square_sum": 2.5}}, [0, 1], ["n0"], "after the reduction"),
    "both": ({1: {"local_gradient": 1.5, "square_sum": 1.5}, 2: {"square_sum": 9.5}}, [1], ["n0"], "before"),
    "all": ({rank: {"square_sum": 1.5} for rank in range(4)}, [], ["n0", "n1"], "every rank differs"),
    "none": ({}, [], ["n0", "n1"], "only the sum over all ranks"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_differs_first_is_named(folders: tuple[RunDir, RunDir], case: str) -> None:
    others, ranks, hosts, what = CASES[case]
    record(folders[0], 4, grad_norm=800.0)
    for rank, values in others.items():
        record_rank(folders[0].attempt(1), rank, 4, **values)
    found = replayed(folders)
    assert found.verdict == "different"
    assert found.first_different.step == 4
    assert (list(found.culprit.ranks), list(found.culprit.hosts)) == (ranks, hosts)
    assert what in found.culprit.what


def test_without_its_records_no_rank_is_named(folders: tuple[RunDir, RunDir]) -> None:
    record(folders[0], 4, grad_norm=800.0)
    folders[0].attempt(1).rank_record(3).unlink()
    culprit = replayed(folders).culprit
    assert (culprit.ranks, culprit.hosts) == ((), ("n0", "n1"))
    said(culprit.what)


def record_turns(attempt: AttemptDir, rank: int, step: int, **of_first: Any) -> None:
    """Replace the records of a rank with one record per turn, of the optimizers d and g."""
    attempt.rank_record(rank).unlink()
    for turn, name in enumerate("dg", 1):
        record_rank(attempt, rank, step, turn=turn, optimizer=name, **(of_first if turn == 1 else {}))


def test_each_turn_of_a_step_is_compared(folders: tuple[RunDir, RunDir]) -> None:
    record(folders[0], 4, grad_norm=800.0)
    for rank in range(4):
        record_turns(folders[1].attempt(1), rank, 4)
        record_turns(folders[0].attempt(1), rank, 4, local_gradient=1.5 if rank == 2 else 5.0 + rank)
        lines = folders[0].attempt(1).rank_record(rank).read_text().splitlines()
        last = {**json.loads(lines[1]), "loss_sum": 99.0}
        folders[0].attempt(1).rank_record(rank).write_text(f"{lines[0]}\n{json.dumps(last)}\n")
    culprit = replayed(folders).culprit
    assert (culprit.ranks, culprit.hosts) == ((2,), ("n1",))
    assert "before the reduction" in culprit.what
    assert "turn 1 of 2 (d)" in culprit.what
    record_rank(folders[1].attempt(1), 3, 4, turn=3, optimizer="d")
    assert replayed(folders).culprit.ranks == ()


def test_a_difference_that_began_in_a_step_that_was_not_logged(folders: tuple[RunDir, RunDir]) -> None:
    lines = folders[0].metrics_file.read_text().splitlines(keepends=True)
    folders[0].metrics_file.write_text("".join(lines[:2]))
    record(folders[0], 4, loss=9.0)
    for rank in range(4):
        record_rank(folders[0].attempt(1), rank, 4, loss_sum=1.5)
    culprit = replayed(folders).culprit
    assert (culprit.ranks, culprit.hosts) == ((), ("n0", "n1"))
    said(culprit.what)


def test_another_layout_is_compared_within_rounding(folders: tuple[RunDir, RunDir]) -> None:
    record(folders[1], 4, loss=6.0 + 1e-6)
    assert replayed(folders).verdict == "different"
    found = replayed(folders, Layout(dp_replicate=4))
    assert (found.verdict, found.is_exact) == ("equal", False)
    record(folders[1], 4, loss=6.5)
    found = replayed(folders, Layout(dp_replicate=4))
    assert found.verdict == "different"
    assert not found.culprit.ranks


def test_rounding_is_no_error(folders: tuple[RunDir, RunDir]) -> None:
    other = Layout(dp_shard=2, tp=2)
    for step, difference in ((1, 1e-4), (2, 2e-3), (3, 4e-2), (4, 0.2)):
        record(folders[1], step, loss=(2.0 + step) * (1 - difference))
    found = replayed(folders, other)
    assert (found.verdict, found.is_exact, found.culprit) == ("unknown", False, None)
    [difference] = found.rounding
    said(difference)
    record(folders[1], 4, loss=60.0)
    found = replayed(folders, other)
    assert (found.verdict, found.is_exact) == ("different", False)
    assert not found.culprit.ranks


def test_other_versions_round_differently(folders: tuple[RunDir, RunDir]) -> None:
    facts = {"torch": "2.8.0", "processor": "H100", "threads": 4, "data": "one"}
    start(folders[0], 1, 0, **facts)
    start(folders[1], 1, 0, **{**facts, "torch": "2.9.1", "threads": 1})
    assert replayed(folders).is_exact, "equal to the last digit all the same"
    record(folders[1], 4, loss=6.0 + 1e-6)
    found = replayed(folders)
    assert (found.verdict, found.is_exact) == ("equal", False)
    assert found.rounding == ("torch 2.9.1 instead of 2.8.0", "threads 1 instead of 4")
    start(folders[1], 1, 0, **{**facts, "data": "another"})
    with pytest.raises(UsageError, match="the training data has changed since attempt 1"):
        replayed(folders)


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_of_gpus_that_are_not_deterministic_round_differently(
    folders: tuple[RunDir, RunDir], deterministic: bool
) -> None:
    attempt = folders[0].attempt(1)
    attempt.plan_file.write_text(replace(PLAN, device="cuda").to_text())
    attempt.config_file.write_text(f"name: t\ntrain: {{steps: 20, deterministic: {deterministic}}}\n")
    record(folders[1], 4, loss=6.0 + 1e-6)
    found = replayed(folders)
    assert found.verdict == ("different" if deterministic else "equal")
    assert found.is_exact == deterministic
    assert "train.deterministic" in "".join(found.rounding) or deterministic


def test_other_settings_round_differently(folders: tuple[RunDir, RunDir]) -> None:
    folders[0].attempt(1).config_file.write_text("name: t\ntrain: {steps: 20}\nparallel: {zero: 2}\n")
    record(folders[1], 4, loss=6.0 + 1e-6)
    [difference] = replayed(folders).rounding
    said(difference)


def test_each_attempt_that_recorded_a_step_is_compared(folders: tuple[RunDir, RunDir]) -> None:
    """The first attempt flipped a bit in step 4 and died. The second attempt computed the step again."""
    run = folders[0]
    add_attempt(run, 2, step=2)
    for step in (3, 4):
        record(run, step, attempt=2)
    assert replayed(folders).verdict == "equal"
    record(run, 4, grad_norm=800.0)
    record_rank(run.attempt(1), 3, 4, local_gradient=1.5)
    found = replayed(folders)
    assert [(step.step, step.attempt, step.is_equal) for step in found.steps] == [
        *((1, 1, True), (2, 1, True), (3, 1, True), (3, 2, True), (4, 1, False), (4, 2, True))
    ]
    assert (found.culprit.ranks, found.culprit.hosts) == ((3,), ("n1",))


def start(run: RunDir, number: int, step: int, **facts: Any) -> None:
    fields = {"step": step, "total_steps": 40, "samples_seen": 8 * step, "num_samples": 1000}
    log_event(run, number, "training", **fields, **facts)


def add_attempt(run: RunDir, number: int, step: int, config: str = "", plan: LaunchPlan = PLAN) -> None:
    """Add another attempt that begins after a step."""
    attempt = run.attempt(number)
    attempt.path.mkdir()
    attempt.config_file.write_text(config or run.attempt(1).config_file.read_text())
    attempt.plan_file.write_text(plan.to_text())
    start(run, number, step)


def test_the_position_of_a_step(folders: tuple[RunDir, RunDir]) -> None:
    run = folders[0]
    with pytest.raises(UsageError, match="has not started training"):
        find_step(run, 1)
    start(run, 1, 0)
    for step in (1, 3, 4, 9, 40):
        at = find_step(run, step)
        assert (at.start, at.stop, at.attempt.number) == (8 * step - 8, 8 * step, 1)
    for step in (0, 41):
        with pytest.raises(UsageError, match=f"has no step {step}"):
            find_step(run, step)


def test_the_attempt_that_computed_a_step_last(folders: tuple[RunDir, RunDir]) -> None:
    """The second attempt, with larger batches, restarted after step 3 and died in step 5."""
    run = folders[0]
    start(run, 1, 0)
    record(run, 6)
    add_attempt(run, 2, 3, plan=replace(PLAN, batch=Batch(4, 1, 16, 1024)))
    record(run, 4, attempt=2, samples_seen=40)
    assert [find_step(run, step).attempt.number for step in (3, 4, 6, 7)] == [1, 2, 1, 2]
    assert (find_step(run, 4).start, find_step(run, 4).stop) == (24, 40)
    assert (find_step(run, 7).start, find_step(run, 7).stop) == (72, 88)
