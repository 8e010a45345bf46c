"""Tests the rows and plots of a summary with made-up run folders and traces."""

import csv
import io
import itertools
import json
import re
import statistics
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.benches import made_up_bench, profile_made_up, train_made_up
from tests.support.runs import run_ranks
from tests.support.said import said
from trainkit.capabilities.bench import measure, summary
from trainkit.capabilities.bench.measure import (
    Row,
    by_speed,
    measured,
    row_of,
    trace_exposed_comm_s,
    trial_row,
)
from trainkit.capabilities.bench.run_bench import Bench, BenchRun, read_bench
from trainkit.errors import UsageError
from trainkit.run.events import steps_of, training_curve
from trainkit.run.files import read_json, write_json


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return made_up_bench(tmp_path / "bench")


def point_of(bench: Bench, item: BenchRun, status: str = "finished", failure: str = "") -> Row:
    return trial_row([row_of(bench, item, status, failure)[0]])


def test_medians_leave_out_the_warm_up_and_the_profiled_steps(bench):
    run = bench.run_dir(bench.runs[0])
    train_made_up(run)
    row = measured(training_curve(run), bench.length.measured)
    said("\n".join(f"{key}: {value}" for key, value in row.items()))  # data_wait_s is of the steps 3 to 7


def test_exposed_communication_is_the_mean_of_the_ranks_in_the_last_two_steps(bench):
    item = bench.runs[0]
    run = bench.run_dir(item)
    train_made_up(run)
    # The first profiled step, 8, ends after one second. Events before that do not count.
    profile_made_up(run, 0, (0.2, 0.8), (1.5, 1.7))
    profile_made_up(run, 1, (0.5, 1.1), (2.0, 2.3))
    row, missing = row_of(bench, item, "finished", "")
    assert missing == ""
    assert row["exposed_comm_s"] == pytest.approx((0.2 / 2 + 0.4 / 2) / 2)
    _, missing = row_of(replace(bench, device="cuda"), item, "finished", "")
    said(missing)
    next(run.path.glob("**/rank-0001.json")).unlink()
    row, missing = row_of(bench, item, "finished", "")
    assert row["exposed_comm_s"] is None
    said(missing)


def test_a_run_that_ended_early_has_what_it_measured_and_no_exposed_communication(bench):
    item = bench.runs[0]
    run = bench.run_dir(item)
    train_made_up(run, num_steps=9)
    for rank in range(2):
        profile_made_up(run, rank)
    row, missing = row_of(bench, item, "failed", "rank 1 failed first")
    assert (row["steps"], row["tokens_per_s"], row["exposed_comm_s"]) == (5, 2048.0, None)
    said(missing)


def test_a_step_whose_predecessor_is_missing_tells_no_samples(bench):
    run = bench.run_dir(bench.runs[0])
    train_made_up(run)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[1::2]))
    row = measured(training_curve(run), bench.length.measured)
    assert (row["steps"], row["samples_per_s"]) == (2, None)


def test_the_csv_has_every_column_and_no_word_for_what_is_not_known(bench):
    item = bench.runs[0]
    train_made_up(bench.run_dir(item), step_s=1 / 3)
    text = summary.csv_text(
        ["layout"], [point_of(bench, item, "failed", 'rank 1 said "no, thanks",\nand left')]
    )
    (row,) = csv.DictReader(io.StringIO(text))
    assert list(row) == ["layout", *summary.COLUMNS]
    assert (row["layout"], row["status"], row["steps"]) == ("dp_shard=2", "failed", "5")
    said(row["verdict"])
    assert (row["tokens_per_s"], row["step_s"]) == ("3072", "0.333333")
    assert row["mfu"] == row["exposed_comm_s"] == row["pp_microbatches"] == ""


def test_the_table_says_below_why_one_failed(bench):
    item = bench.runs[0]
    train_made_up(bench.run_dir(item))
    rows = [point_of(bench, item), point_of(bench, bench.runs[1], "failed", "no\nmemory")]
    heading, first, second, why = summary.summary_table(["layout"], rows).splitlines()
    assert heading.split()[:4] == ["LAYOUT", "BATCH", "SAMPLES/S", "TOKENS/S"]
    assert first.split()[:4] == ["dp_shard=2", "4", "32.0", "2,048"]
    assert second.split()[-1] == "failed"
    assert why == "tp=2: no memory"


def test_a_point_is_the_median_of_its_repeats_with_their_range(tmp_path):
    bench = made_up_bench(tmp_path / "repeated", repeats=3)
    for item, step_s in zip(bench.runs, (0.5, 0.4, 0.25, 0.8, 1.0, 0.2), strict=True):
        train_made_up(bench.run_dir(item), step_s=step_s)
    trials = [[row_of(bench, item, "finished", "")[0] for item in runs] for runs in bench.trials]
    (first, _), (second, _) = by_speed(trials)
    assert [row["step_s"] for row in trials[0]] == [0.5, 0.25, 1.0]  # the repeats run one round after another
    assert (first["layout"], first["tokens_per_s"]) == ("tp=2", 2560.0)
    assert (first["tokens_per_s_min"], first["tokens_per_s_max"]) == (1280.0, 5120.0)
    assert (second["step_s"], second["repeats"], second["steps"]) == (0.5, 3, 15)
    assert second["run"] == "0 2 4"
    fastest = summary.find_fastest(bench, by_speed(trials))
    assert fastest.is_clear is False
    said(str(fastest))


def test_a_repeat_that_failed_marks_its_point(bench):
    rows = []
    for item, state in zip(bench.runs, ("finished", "failed"), strict=True):
        train_made_up(bench.run_dir(item), 10 if state == "finished" else 1)
        rows.append(row_of(bench, item, state, "no memory" if state == "failed" else "")[0])
    row = trial_row(rows)
    assert (row["status"], row["verdict"], row["repeats"]) == ("failed (1 of 2)", "no memory", 1)
    assert (row["tokens_per_s"], row["tokens_per_s_min"]) == (2048.0, None)


def test_steps_that_vary_have_a_spread(bench):
    records = [
        {"step": step, "step_s": float(step), "samples_seen": step, "data_wait_s": 0.0}
        for step in range(1, 12)
    ]
    row = measured(list(steps_of(records)), range(1, 12))
    assert (row["step_s"], row["step_s_p10"], row["step_s_p90"]) == (6.0, 2.0, 10.0)
    assert row["tokens_per_s"] is None  # the task counts no tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "at least one run has no value for a swept key"),
        ({"keys": ["tp"]}, "at least one run has no value for a swept key"),
        ({"version": 1}, "version is 1, but this version of trainkit supports 2"),
        ({"runs": []}, "its list of runs differs from the list in sweep.json"),
    ],
)
def test_a_bench_whose_parts_do_not_fit_is_refused(bench, changes, message):
    file = bench.folder / "bench.json"
    write_json(file, {**read_json(file), **changes})
    with pytest.raises(UsageError, match=message):
        read_bench(bench.folder)


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    pytest.importorskip("matplotlib")
    bench = made_up_bench(tmp_path / "bench")
    train_made_up(bench.run_dir(bench.runs[0]))
    return [
        trial_row([row_of(bench, bench.runs[0], "finished", "")[0]]),
        trial_row([row_of(bench, bench.runs[1], "failed", "no memory")[0]]),
    ]


def test_plots_of_the_quantities_that_are_known(tmp_path, rows):
    folder = tmp_path / "plots"
    folder.mkdir()
    (folder / "mfu.png").write_bytes(b"old")  # the plot is deleted, because the value is no longer known
    written, empty = summary.write_plots(["layout"], rows, folder)
    assert empty == ["mfu", "exposed_comm_s"]
    assert [file.stem for file in written] == [name for name in summary.PLOTS if name not in empty]
    assert sorted(folder.iterdir()) == sorted(written)
    for file in written:
        head = file.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", head[16:])
        assert width > 500
        assert height > 100
    heights = []
    for count in (1, 10):
        many = [{**rows[0], "layout": f"layout {index}"} for index in range(count)]
        (file, *_) = summary.write_plots(["layout"], many, tmp_path / f"plots-{count}")[0]
        heights.append(struct.unpack(">I", file.read_bytes()[20:24])[0])
    assert heights[1] > 2 * heights[0]


def event(line: str) -> dict[str, Any]:
    """Return a complete event of a trace: CATEGORY:THREAD NAME and seconds. The trace has microseconds."""
    kind, name, start_s, end_s = line.split()
    category, _, thread = kind.partition(":")
    times = {"ts": float(start_s) * 1e6, "dur": (float(end_s) - float(start_s)) * 1e6}
    pid = 0 if category == "kernel" else 7
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": int(thread), **times}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "baseTimeNanoseconds": 0}


TRACES = re.findall(
    r"^(\S+) (\S+) (.*)\n((?: .*\n)*)", Path(__file__).with_name("traces.txt").read_text(), re.M
)
"""Device, exposed seconds and name of each trace, and its events. Thread 7 trains, thread 9 is of gloo."""


@pytest.mark.parametrize(
    ("device", "seconds", "name", "lines"), TRACES, ids=[name for _, _, name, _ in TRACES]
)
def test_exposed_communication(device, seconds, name, lines):
    events = [event(line.partition("#")[0]) for line in lines.splitlines()]
    expected = None if seconds == "unknown" else pytest.approx(float(seconds))
    assert trace_exposed_comm_s(trace(*events), device) == expected


def test_a_trace_is_read_without_what_takes_most_of_its_space():
    found = trace(
        {**event("cpu_op:7 aten::mm 0 3"), "args": {"Input Dims": [[1, 2], [3, 4]], "ph": "none"}},
        {**event("user_annotation:9 gloo:all_reduce 1 5"), "args": {"Process Group Name": "0"}},
        event("kernel:7 ncclDevKernel_AllReduce 1 2"),
        event("cuda_runtime:7 cudaLaunchKernel 0 1"),
    )
    read = json.loads(json.dumps(found), object_hook=measure.keep_needed)
    for device in ("cpu", "cuda"):
        assert trace_exposed_comm_s(read, device) == trace_exposed_comm_s(found, device)
    assert trace_exposed_comm_s(read, "cpu") == pytest.approx(2.0)
    assert "args" not in json.dumps(read)
    assert "cudaLaunchKernel" not in json.dumps(read)


@pytest.mark.slow
def test_a_trace_of_torch_is_understood(tmp_path):
    run_ranks(late_all_reduce, 2, tmp_path)


def late_all_reduce(world: Any, folder: Path) -> None:
    """Rank 1 arrives 0.3 s late at a collective, so rank 0 waits for 0.3 s and rank 1 does not wait."""
    import torch
    import torch.distributed as dist

    values = torch.ones(1000)
    dist.all_reduce(values)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        begins = []
        for _ in range(5):  # one measurement may be wrong, because the process lost its core for a moment
            dist.barrier()
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            begins.append(time.time())
            if world.rank == 1:
                time.sleep(0.3)
            dist.all_reduce(values)
    file = folder / f"{world.rank}.json"
    profile.export_chrome_trace(str(file))
    found = json.loads(file.read_text())
    since = [trace_exposed_comm_s(found, "cpu", begin) for begin in begins]
    assert None not in since
    seconds = statistics.median(a - b for a, b in itertools.pairwise([*since, 0.0]))
    assert (seconds > 0.25) == (world.rank == 0), f"rank {world.rank}: {seconds}"
