"""Tests `trainkit drill` on a real cluster: the usual scenarios through Slurm, and a real requeue."""

import json
from typing import Any

import pytest

from tests.on_slurm.login import Login
from tests.support.two_lines import two_lines
from trainkit.run.files import read_jsonl
from trainkit.run.rundir import RunDir

TIMEOUT_S = 1200.0


def drill(login: Login, *args: str, nodes: str = "2") -> dict[str, Any]:
    """Run a drill whose scenarios all pass, and return its results by scenario."""
    shape = ("--nodes", nodes, "--gpus-per-node", "1")
    done = login.trainkit("drill", str(login.config), "--json", *shape, *args, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return {result["scenario"]: result for result in json.loads(done.stdout)["scenarios"]}


def ends(run_dir: str) -> list[tuple[str, str]]:
    """Return the action and cause of every restart of a run."""
    return [
        (event["action"], event["cause"])
        for event in read_jsonl(RunDir(run_dir).events_file)
        if event["event"] == "requeue_decision"
    ]


@pytest.mark.slow(seconds=45)
def test_a_command_survives_all_that_can_be_tried(login):
    command = ("--", "python", login.script(two_lines(steps=100), "train.py"))
    found = drill(login, *command)
    tried = {name: result for name, result in found.items() if result["state"] != "skipped"}
    assert {name: result["state"] for name, result in tried.items()} == dict.fromkeys(
        ("signal", "rank", "node", "requeue"), "passed"
    )
    assert {result["curve"] for result in tried.values()} == {"equal"}
    assert (tried["signal"]["num_recomputed"], tried["requeue"]["num_recomputed"]) == (0, 0)
    assert ends(tried["signal"]["run_dir"]) == [("requeue", "asked")]
    assert ends(tried["requeue"]["run_dir"]) == [("requeue", "preempted")]
    # The ranks of the other node wait for the dead ranks, and only Slurm reports that these are dead.
    assert ends(tried["rank"]["run_dir"]) == ends(tried["node"]["run_dir"]) == [("restart", "crash")]
    assert not (login.folder / ".state").exists()  # the user's list of runs
