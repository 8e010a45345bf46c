"""`trainkit bench` on a real cluster: an array for each kind of job, one summary, one page."""

from __future__ import annotations

import json

import pytest

from tests.on_slurm.login import Login, settings, wait_for
from tests.support.runs import FAST
from trainkit.rundir import RunDir, read_json, read_jsonl
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


def states(login: Login, folder: str) -> list[str]:
    """The states of the runs of a bench."""
    shown = login.trainkit("status", folder, "--json")
    assert shown.returncode == 0, shown.stderr
    return [run["state"] for run in json.loads(shown.stdout)["points"]]


@pytest.mark.slow
def test_sizes_of_jobs_are_arrays_that_run_one_after_another(login: Login) -> None:
    args = ["--gpus-per-node", "1", "--steps", "9", "--warmup", "2", "--out", "sizes", "--json"]
    sweep = ["--sweep", "resources.nodes=1,2", "--sweep", "seed=1,2"]
    done = login.trainkit("bench", str(login.config), *settings(*FAST), *args, *sweep)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    one, two = value["arrays"]
    assert (one["array"], two["array"]) == ("0-1%1", "0-1%1")
    second = login.cluster.job(two["job_id"])
    assert second["NumNodes"].partition("-")[0] == "2"
    folder = value["folder"]
    wait_for(lambda: states(login, folder) == ["finished"] * 4, "the end of the four runs", poll_s=1.0)
    runs = json.loads(login.trainkit("status", folder, "--json").stdout)["points"]
    ends = [read_json(RunDir(run["run_dir"]).attempt(1).end_file)["time"] for run in runs]
    starts = [next(read_jsonl(RunDir(run["run_dir"]).events_file, ["started"]))["time"] for run in runs]
    assert max(ends[:2]) < min(starts[2:])
    collected = login.trainkit("bench", "settings", "--collect", folder, "--json")
    rows = json.loads(collected.stdout)["rows"]
    assert {(row["resources.nodes"], row["dp_shard"]) for row in rows} == {(1, 1), (2, 2)}
    assert {row["status"] for row in rows} == {"finished"}
    assert json.loads(login.trainkit("report", folder, "--json").stdout)["states"] == {"finished": 4}


@pytest.mark.slow
def test_a_cancelled_bench_starts_none_of_its_arrays(login: Login) -> None:
    args = ["--gpus-per-node", "1", "--steps", "100000", "--out", "sizes", "--json"]
    done = login.trainkit(
        "bench", str(login.config), *settings(*FAST), *args, "--sweep", "resources.nodes=1,2"
    )
    assert done.returncode == 0, done.stderr
    folder = json.loads(done.stdout)["folder"]
    wait_for(lambda: states(login, folder)[0] == "running", "the first run", poll_s=0.5)
    gone = login.trainkit("cancel", folder, "--wait", "--json")
    assert gone.returncode == 0, gone.stderr
    assert json.loads(gone.stdout)["state"] == "cancelled"
    login.wait_until_idle()
    assert states(login, folder) == ["cancelled"] * 2
