"""Many runs of one config, and waiting for another run, on a machine without Slurm."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize("args", [["--sweep", "optimizer.lr=1e-4,3e-4"], ["--array", "0-3"]])
def test_many_runs_need_slurm(desk, args):
    done = desk.trainkit("submit", str(desk.config), *args)
    assert done.returncode == 2
    assert "need Slurm, but this would run on this machine" in done.stderr
    assert f"for lr in 1e-4 3e-4; do trainkit run {desk.config} --set optimizer.lr=$lr; done" in done.stderr
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sweep", "optimizer.lrr=1,2"], "unknown key optimizer.lrr"),
        (["--sweep", "seed=1,1"], "1 appears twice"),
        (["--array", "3-x"], "not the indices of a job array: '3-x'"),
        (["--array", "%3"], "limits how many tasks run at once, but names no tasks"),
        (["--sweep", "seed=1,2", "--array", "0-1"], "--sweep numbers its points itself"),
        (["--sweep", "seed=1,2", "--follow"], "--follow follows one run"),
        (["--after", "nobody"], "--after requires Slurm"),
    ],
)
def test_what_was_typed_wrong(desk, args, message):
    done = desk.trainkit("submit", str(desk.config), *args, "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["exit_code"]) == (2, 2)
    assert message in value["error"]
    assert value["hint"]
    assert not (desk.folder / "runs").exists()


def test_a_group_is_one_line_of_status_without_slurm_too(desk, tmp_path):
    from tests.support.groups import make_group

    (tmp_path / "runs").mkdir(exist_ok=True)
    group = make_group(tmp_path, {0: {"seed": 1}, 1: {"seed": 2}})
    group.path.rename(desk.folder / "runs/lr")
    done = desk.trainkit("status")
    assert done.returncode == 0
    (row,) = [line for line in done.stdout.splitlines() if "2 unknown" in line]
    assert row.startswith("runs/lr ")
    assert "the state of 2 Slurm jobs is unknown" in done.stderr
