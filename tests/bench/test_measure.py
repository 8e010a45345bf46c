"""Rows of a summary, from run folders that are made up."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.support.benches import made_up_bench, profile_made_up, train_made_up
from trainkit.bench.bench_file import Bench
from trainkit.bench.measure import by_speed, measured, row_of
from trainkit.bench.summary import COLUMNS, csv_text, summary_table
from trainkit.rundir import read_metrics


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return made_up_bench(tmp_path / "bench")


def test_medians_leave_out_the_warm_up_and_the_profiled_steps(bench: Bench) -> None:
    run = bench.run_dir(bench.runs[0])
    train_made_up(run)
    row = measured(read_metrics(run), bench.length.measured)
    assert row == {
        "steps": 5,
        "samples_per_s": 32.0,
        "tokens_per_s": 2048.0,
        "tokens_per_s_per_gpu": 1024.0,
        "mfu": None,
        "step_s": 0.5,
        "data_wait_s": 0.05,  # of steps 3 to 7
        "mem_gib_peak": 1.07,
    }


def test_a_row_has_every_column(bench: Bench) -> None:
    item = bench.runs[1]
    train_made_up(bench.run_dir(item))
    row, _ = row_of(bench, item, "finished", "")
    assert row.keys() == COLUMNS.keys()
    assert (row["layout"], row["tp"], row["dp_shard"], row["device_batch_size"]) == ("tp=2", 2, 1, 4)
    assert row["loss"] == 4.0
    assert row["pp_microbatches"] is None  # there is no pipeline


def test_exposed_communication_is_the_mean_of_the_ranks_in_the_last_two_steps(bench: Bench) -> None:
    item = bench.runs[0]
    run = bench.run_dir(item)
    train_made_up(run)
    # The first of the profiled steps, 8, ends after one second: what is before does not count.
    profile_made_up(run, 0, (0.2, 0.8), (1.5, 1.7))
    profile_made_up(run, 1, (0.5, 1.1), (2.0, 2.3))
    row, missing = row_of(bench, item, "finished", "")
    assert missing == ""
    assert row["exposed_comm_s"] == pytest.approx((0.2 / 2 + 0.4 / 2) / 2)


def test_a_profile_that_is_missing_is_said(bench: Bench) -> None:
    item = bench.runs[0]
    train_made_up(bench.run_dir(item))
    profile_made_up(bench.run_dir(item), 0)
    row, missing = row_of(bench, item, "finished", "")
    assert row["exposed_comm_s"] is None
    assert "rank-0001.json cannot be read" in missing


def test_a_run_that_ended_early_has_what_it_measured_and_no_exposed_communication(bench: Bench) -> None:
    item = bench.runs[0]
    run = bench.run_dir(item)
    train_made_up(run, num_steps=9)
    for rank in range(2):
        profile_made_up(run, rank)
    row, missing = row_of(bench, item, "failed", "rank 1 failed first")
    assert (row["steps"], row["tokens_per_s"], row["exposed_comm_s"]) == (5, 2048.0, None)
    assert missing == "the run did not reach its last step"


def test_one_that_never_started_is_a_row_too(bench: Bench) -> None:
    row, _ = row_of(bench, bench.runs[0], "not started", "")
    assert row.keys() == COLUMNS.keys()
    assert (row["steps"], row["tokens_per_s"], row["loss"]) == (0, None, None)


def test_a_step_whose_predecessor_is_missing_tells_no_samples(bench: Bench) -> None:
    run = bench.run_dir(bench.runs[0])
    train_made_up(run)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[1::2]))
    row = measured(read_metrics(run), bench.length.measured)
    assert (row["steps"], row["samples_per_s"]) == (2, None)


def test_the_order_is_the_speed_and_what_failed_comes_last(bench: Bench) -> None:
    base, _ = row_of(bench, bench.runs[0], "finished", "")
    rows = [
        {**base, "layout": "failed", "status": "failed", "tokens_per_s": 9.0},
        {**base, "layout": "slow", "tokens_per_s": 1.0},
        {**base, "layout": "fast", "tokens_per_s": 5.0},
        {**base, "layout": "nothing", "status": "failed"},
    ]
    assert [row["layout"] for row in by_speed(rows)] == ["fast", "slow", "failed", "nothing"]


def test_the_csv_has_every_column_and_no_word_for_what_is_not_known(bench: Bench) -> None:
    item = bench.runs[0]
    train_made_up(bench.run_dir(item), step_s=1 / 3)
    text = csv_text([row_of(bench, item, "failed", 'rank 1 said "no, thanks",\nand left')[0]])
    (row,) = csv.DictReader(io.StringIO(text))
    assert list(row) == list(COLUMNS)
    assert (row["layout"], row["status"], row["steps"]) == ("dp_shard=2", "failed", "5")
    assert row["verdict"] == 'rank 1 said "no, thanks",\nand left'
    assert (row["tokens_per_s"], row["step_s"]) == ("3072", "0.333333")
    assert row["mfu"] == row["exposed_comm_s"] == ""


def test_the_table_says_below_why_one_failed(bench: Bench) -> None:
    item = bench.runs[0]
    train_made_up(bench.run_dir(item))
    rows = [
        row_of(bench, item, "finished", "")[0],
        row_of(bench, bench.runs[1], "failed", "x" * 200)[0],
    ]
    heading, first, second, why = summary_table(rows).splitlines()
    assert heading.split()[:4] == ["LAYOUT", "BATCH", "SAMPLES/S", "TOKENS/S"]
    assert first.split()[:4] == ["dp_shard=2", "4", "32.0", "2,048"]
    assert second.split()[-1] == "failed"
    assert why == f"tp=2: {'x' * 69}…"
