"""`trainkit bench` on a real cluster: an array for each kind of job, one summary, one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.on_slurm.login import ASK_SLURM_S, ASK_TRAINKIT_S, Login, settings, wait_for
from tests.support.runs import FAST
from trainkit.run.files import read_json, read_jsonl
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir


@pytest.mark.slow
def test_layouts_are_one_array_and_one_summary(login: Login) -> None:
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


def states(login: Login, folder: str) -> list[str]:
    """The states of the runs of a bench."""
    shown = login.trainkit("status", folder, "--json")
    assert shown.returncode == 0, shown.stderr
    return [run["state"] for run in json.loads(shown.stdout)["points"]]


@pytest.mark.slow
def test_sizes_of_jobs_and_repeats_are_arrays_that_run_one_after_another(login: Login) -> None:
    args = ["--gpus-per-node", "1", "--steps", "9", "--warmup", "2", "--out", "sizes", "--json"]
    sweep = ["--sweep", "resources.nodes=1,2", "--sweep", "model.num_layers=1,0", "--repeats", "2"]
    done = login.trainkit("bench", str(login.config), *settings(*FAST), *args, *sweep)
    assert done.returncode == 0, done.stderr
    assert "not possible  resources.nodes=1, model.num_layers=0: " in done.stderr
    value = json.loads(done.stdout)
    # A round of the repeats begins when the one before has ended, and so do the sizes in it.
    jobs = [login.cluster.job(array["job_id"]) for array in value["arrays"]]
    assert [job["NumNodes"].partition("-")[0] for job in jobs] == ["1", "2", "1", "2"]
    assert [array["array"] for array in value["arrays"]] == ["0%1"] * 4
    folder = value["folder"]
    ends = "array-*/0/attempts/001/end.json"
    wait_for(lambda: len(list(Path(folder).glob(ends))) == 4, "the four ends", poll_s=ASK_SLURM_S)
    assert states(login, folder) == ["finished"] * 4
    runs = json.loads(login.trainkit("status", folder, "--json").stdout)["points"]
    folders = [RunDir(run["run_dir"]) for run in runs]
    ends = [read_json(run.attempt(1).end_file)["time"] for run in folders]
    starts = [next(read_jsonl(run.events_file, ["started"]))["time"] for run in folders]
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
    collected = login.trainkit("bench", "settings", "--collect", folder, "--json")
    summary = json.loads(collected.stdout)
    assert {
        (row["resources.nodes"], row["dp_shard"], row["status"], row["repeats"]) for row in summary["rows"]
    } == {(1, 1, "finished", 2), (2, 2, "finished", 2)}
    assert summary["fastest"]["is_clear"] in (True, False)
    page = login.trainkit("report", folder, "--json")
    assert page.returncode == 0, page.stderr
    report = json.loads(page.stdout)
    assert report["states"] == {"finished": 4}
    assert report["best"]["result"] == max(row["tokens_per_s_max"] for row in summary["rows"])


@pytest.mark.slow
def test_a_cancelled_bench_starts_none_of_its_arrays(login: Login) -> None:
    args = ["--gpus-per-node", "1", "--steps", "100000", "--out", "sizes", "--json"]
    done = login.trainkit(
        "bench", str(login.config), *settings(*FAST), *args, "--sweep", "resources.nodes=1,2"
    )
    assert done.returncode == 0, done.stderr
    folder = json.loads(done.stdout)["folder"]
    wait_for(lambda: states(login, folder)[0] == "running", "the first run", poll_s=ASK_TRAINKIT_S)
    gone = login.trainkit("cancel", folder, "--wait", "--json")
    assert gone.returncode == 0, gone.stderr
    assert json.loads(gone.stdout)["state"] == "cancelled"
    login.wait_until_idle()
    assert states(login, folder) == ["cancelled"] * 2
