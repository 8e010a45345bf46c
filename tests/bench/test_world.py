"""Tests of what one GPU shows about many, with tiny models on a CPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, world
from benchmarks.gpu_parts import Bench

pytestmark = pytest.mark.slow
GIB = 2**30


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def in_this_process(monkeypatch):
    """Measure ranks in this process, which saves the start of a process."""

    def run(command, **options):
        *_, mode, folder, rank, kind = command
        rows = world.rows_of_rank(mode, Path(folder), int(rank), kind)
        return SimpleNamespace(stdout="\n".join(map(json.dumps, rows)), stderr="", returncode=0)

    monkeypatch.setattr(world.subprocess, "run", run)


def test_one_rank_of_many(tmp_path):
    world.simulated_ranks(Bench("cpu", tmp_path, 80 * GIB), (64,), ("PP 4", "gather"))
    skipped, first, last = rows_of(tmp_path)
    assert (skipped["layout"], skipped["skipped"]) == ("gather", "no GPU, or no torchao")
    assert [row["rank"] for row in (first, last)] == [0, 63]
    for row in (first, last):
        assert row["peak GB"] == pytest.approx(row["simulation GB"], rel=0.02)
        assert (row["graph breaks"], row["host syncs"]) == (0, 0)
        assert row["compute ms"] >= row["host ms"] > 0


def test_a_layout_that_does_not_fit_is_skipped_with_the_memory_that_it_needs(tmp_path):
    world.simulated_ranks(Bench("cpu", tmp_path, 1), (8,), ("TP 8",))
    [row] = rows_of(tmp_path)
    assert row["skipped"].startswith("needs 0.0 GiB, usable are 0.0 GiB")


def test_the_layouts_of_a_gpu_fit_and_have_the_ranks(tmp_path):
    bench = Bench("cuda", tmp_path, round(gpu.USABLE * 141e9))
    for num_gpus in world.SIZES:
        for name, values in world.layouts(num_gpus, "cuda").items():
            found = world.plan_that_fits(bench, num_gpus, values)
            assert isinstance(found, tuple), f"{name} on {num_gpus}: {found}"
            assert found[1].world_size == num_gpus


@pytest.mark.parametrize("name", ["FSDP, ZeRO-3", "replicate 2 x shard 4"])
@pytest.mark.usefixtures("in_this_process")
def test_an_emulated_link_sends_the_bytes_of_the_plan(tmp_path, name):
    world.emulated_network(Bench("cpu", tmp_path, 80 * GIB), (name,))
    rows = rows_of(tmp_path)
    assert [row["link GB/s"] for row in rows] == [1.0, 0.1]
    for row in rows:
        assert row["sent GB"] == pytest.approx(row["plan sent GB"], rel=0.02)
    # A CPU hides no communication, and the slow link needs at least the time of its bytes.
    assert rows[1]["step ms"] > 1000 * rows[1]["sent GB"] / 0.1


def test_two_ranks_and_one_process(tmp_path):
    world.two_ranks(Bench("cpu", tmp_path, 80 * GIB), ("FSDP",), ())
    [row] = rows_of(tmp_path)
    assert (row["case"], row["backend"], row["result"]) == ("FSDP", "gloo", "passed")
    assert 0 < row["largest difference"] < 1e-5
    assert not row["equal bits"]


def test_a_layout_that_fails_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(world.PAIRS, "FSDP", {"dp_shard": 3})
    monkeypatch.setattr("tests.support.parity._train_all", lambda *args: None)
    world.two_ranks(Bench("cpu", tmp_path, 80 * GIB), ("FSDP",), ())
    [row] = rows_of(tmp_path)
    assert row["result"] == "failed"
    assert row["error"]


@pytest.mark.usefixtures("in_this_process")
def test_a_save_of_one_rank_during_training(tmp_path):
    world.staging(Bench("cpu", tmp_path, 80 * GIB))
    assert [row["case"] for row in rows_of(tmp_path)] == ["save 1", "save 2"]


def test_host_syncs_are_counted():
    def step():
        for value in (1.0, 2.0):
            torch.tensor(value).item()

    assert world.count_syncs(step, torch.device("cpu")) == 2


def test_gathers_and_reductions_of_a_rank_without_peers():
    class Group:
        size = staticmethod(lambda: 3)

    link = world.Link(torch.device("cpu"))
    gathered = torch.zeros(6)
    gathered[2:4] = torch.tensor([1.0, 2.0])
    world.EmulatedGather(link)(gathered, gathered[2:4], Group())
    assert gathered.tolist() == [1.0, 2.0] * 3
    reduced = torch.zeros(2)
    world.EmulatedReduction(link)(reduced, torch.tensor([1.0, 2.0, 4.0, 5.0, 7.0, 8.0]), Group(), None)
    assert reduced.tolist() == [4.0, 5.0]
    assert link.num_bytes == 2 * 2 * 8


def test_the_record_has_a_table_for_each_kind_of_row():
    rows = [{"table": "A", "x": 1}, {"table": "B", "y": 2, "steps_ms": [1]}, {"table": "A", "x": 3}]
    record = {"environment": {"python": "3", "torch": "2"}, "parts": {}}
    record["parts"]["world"] = {"rows": rows, "date": "today", "seconds": 1, "commit": "abc"}
    text = gpu.markdown(record)
    assert "### A\n\n| x |\n|---|\n| 1 |\n| 3 |\n\n### B\n\n| y |\n|---|\n| 2 |\n" in text
    assert text.endswith("today, 1 s, commit abc.\n")


def test_ranks_whose_memory_differs_from_the_plan_miss_the_goal():
    parts = {"world": {"rows": [{"plan / peak": ratio} for ratio in (0.91, 1.09, 1.11)]}}
    expected = "world: the memory of 2 of 3 ranks is within 10 % of the plan (goal: all)"
    assert list(gpu.goals(parts)) == [expected]
