"""`trainkit bench` on a real cluster: one array, one summary, one page."""

from __future__ import annotations

import json

import pytest

from tests.on_slurm.login import Login, settings
from tests.support.runs import FAST
from trainkit.rungroup import RunGroup


@pytest.mark.slow
def test_layouts_are_one_array_and_one_summary(login: Login) -> None:
    args = ["--nodes", "1", "--gpus-per-node", "2", "--steps", "9", "--warmup", "2", "--out", "out"]
    layouts = ["--layout", "dp_shard=2", "--layout", "tp=2"]
    done = login.trainkit(
        "bench", "layouts", str(login.config), *settings(*FAST), *args, *layouts, "--follow", "--json",
        timeout_s=300.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    group = RunGroup(value["folder"])
    assert group.record["array"] == "0-1%1"
    rows = {row["layout"]: row for row in value["rows"]}
    assert {row["status"] for row in rows.values()} == {"finished"}, done.stderr
    assert rows["tp=2"]["loss"] == pytest.approx(rows["dp_shard=2"]["loss"], abs=1e-4)
    assert all(row["exposed_comm_s"] > 0 for row in rows.values())
    shown = login.trainkit("status", str(group.path)).stdout
    assert "2: 2 finished" in shown
    assert "tp=2" in shown
    again = login.trainkit("bench", "layouts", "--collect", str(group.path), "--json")
    assert json.loads(again.stdout)["rows"] == value["rows"]


@pytest.mark.slow
def test_settings_with_repeats_are_one_array_one_summary_and_one_page(login: Login) -> None:
    args = ["--nodes", "1", "--gpus-per-node", "1", "--steps", "9", "--warmup", "2", "--out", "settings"]
    sweep = ["--sweep", "model.num_layers=1,0,2", "--repeats", "2"]
    done = login.trainkit(
        "bench", "settings", str(login.config), *settings(*FAST), *args, *sweep,
        "--at-once", "2", "--follow", "--json", timeout_s=300.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert RunGroup(value["folder"]).record["array"] == "0-3%2"
    assert "not possible  model.num_layers=0: " in done.stderr
    assert {(row["model.num_layers"], row["status"], row["repeats"]) for row in value["rows"]} == {
        (1, "finished", 2),
        (2, "finished", 2),
    }
    assert value["fastest"]["is_clear"] in (True, False)
    page = login.trainkit("report", value["folder"], "--sweep", "--json")
    assert page.returncode == 0, page.stderr
    report = json.loads(page.stdout)
    assert report["states"] == {"finished": 4}
    assert report["best"]["result"] == max(row["tokens_per_s_max"] for row in value["rows"])
