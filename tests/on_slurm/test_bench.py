"""Tests `trainkit bench` on a real cluster: one array, one summary, one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.on_slurm.login import settings
from tests.support.runs import FAST
from trainkit.run.files import read_json, read_jsonl
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir


@pytest.mark.slow
def test_layouts_are_one_array_and_one_summary(login):
    args = ["--nodes", "1", "--gpus-per-node", "2", "--steps", "9", "--warmup", "2", "--out", "out"]
    layouts = ["--layout", "dp_shard=2", "--layout", "dp_replicate=2"]
    done = login.trainkit(
        "bench", "layouts", str(login.config), *settings(*FAST), *args, *layouts,
        "--at-once", "2", "--follow", "--json", timeout_s=300.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    group = RunGroup(value["folder"])
    assert group.record.array == "0-1%2"
    rows = {row["layout"]: row for row in value["rows"]}
    assert {row["status"] for row in rows.values()} == {"finished"}, done.stderr
    assert rows["dp_replicate=2"]["loss"] == pytest.approx(rows["dp_shard=2"]["loss"], abs=1e-4)
    assert all(row["exposed_comm_s"] > 0 for row in rows.values())
    shown = login.trainkit("status", str(group.path)).stdout
    assert "2: 2 finished" in shown
    assert "dp_replicate=2" in shown
    again = login.trainkit("bench", "layouts", "--collect", str(group.path), "--json")
    assert json.loads(again.stdout)["rows"] == value["rows"]


@pytest.mark.slow
def test_repeats_are_rounds_of_one_array(login):
    args = ["--gpus-per-node", "1", "--steps", "9", "--warmup", "2", "--out", "rounds", "--follow", "--json"]
    sweep = ["--sweep", "model.num_layers=1,0", "--repeats", "2"]
    done = login.trainkit("bench", str(login.config), *settings(*FAST), *args, *sweep, timeout_s=300.0)
    assert done.returncode == 0, done.stderr
    assert "not possible  model.num_layers=0: " in done.stderr
    value = json.loads(done.stdout)
    assert [(row["status"], row["repeats"]) for row in value["rows"]] == [("finished", 2)]
    folders = [RunDir(Path(value["folder"], str(index))) for index in range(2)]
    ends = [read_json(run.attempt(1).end_file)["time"] for run in folders]
    starts = [next(read_jsonl(run.events_file, ["started"]))["time"] for run in folders]
    assert ends[0] < starts[1]
    page = login.trainkit("report", value["folder"], "--json")
    assert page.returncode == 0, page.stderr
    report = json.loads(page.stdout)
    assert report["states"] == {"finished": 2}
    assert report["best"]["result"] == max(row["tokens_per_s_max"] for row in value["rows"])
