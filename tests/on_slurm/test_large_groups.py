"""Tests groups with more runs than the cluster accepts in one array, or from one user at a time.

`python -m benchmarks.large_group` does the same with 300 runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.login import HOLD, Login, wait_for
from tests.on_slurm.test_groups import status, submit, wait_for_states
from tools.slurm_cluster.cluster import Cluster, running
from trainkit.run.group import RunGroup

MAX_ARRAY_SIZE = 6
MAX_JOBS = 4

pytestmark = [pytest.mark.slow(seconds=10), pytest.mark.xdist_group("large groups")]


@pytest.fixture(scope="module")
def cluster(clusters_possible: None, slurm_version: str | None) -> Iterator[Cluster]:
    """Return a cluster with small limits."""
    with running(slurm_version, num_hosts=2, options={"MaxArraySize": str(MAX_ARRAY_SIZE)}) as made:
        limit(made, MAX_JOBS)
        yield made


def limit(cluster: Cluster, max_jobs: int) -> None:
    """Limit the number of jobs that each user may have in the queue. -1 removes the limit."""
    change = ["modify", "qos", "normal", "set", f"MaxSubmitJobsPerUser={max_jobs}"]
    cluster.run(["sacctmgr", "--immediate", *change], timeout_s=30, check=True)


def test_all_run_and_each_once(login):
    waits = 'while [ ! -e "$0/go" ]; do sleep 0.2; done; echo "$SLURM_ARRAY_TASK_ID" >> "$0/ran"'
    group = submit(login, "--array", "0-7", "--", "sh", "-c", waits, str(login.folder))
    assert 1 <= len(group.trials) - len(group.unsubmitted) <= MAX_JOBS
    shown = login.trainkit("status", str(group.path))
    assert "accepts no more" in shown.stdout
    (login.folder / "go").touch()
    wait_for_states(login, group, finished=8)
    ran = (login.folder / "ran").read_text().split()
    assert sorted(map(int, ran)) == list(range(8))
    again = RunGroup(group.path)
    assert again.unsubmitted == []
    assert max(part.offset for part in again.parts) >= MAX_ARRAY_SIZE
    report = json.loads(login.trainkit("report", str(group.path), "--json", check=True).stdout)
    assert report["states"] == {"finished": 8}
    trials = {trial["index"]: Path(trial["run_dir"]).name for trial in report["points"]}
    assert trials == {index: group.run(index).path.name for index in range(8)}
    assert report["worker_hours"] > 0
    logs = [group.run(index).attempt(1).supervisor_log.read_text() for index in (0, 7)]
    assert all("finished" in log for log in logs)


def test_it_is_cancelled_as_one(login):
    cancelled_as_one(login, num_trials=15, max_jobs=MAX_JOBS)


def cancelled_as_one(login: Login, num_trials: int, max_jobs: int) -> None:
    """Cancel a group with two running trials, most of whose other trials are not submitted yet."""
    group = submit(login, "--array", f"0-{num_trials - 1}%2", "--", "python", "listens.py")
    wait_for(lambda: status(login, group)["states"].get("running", 0) == 2, "two of them run")
    done = login.trainkit("cancel", str(group.path), "--wait")
    assert done.returncode == 0, done.stderr
    now = status(login, group)
    assert set(now["states"]) <= {"cancelled", "stopped"}, now["states"]
    assert sum(now["states"].values()) == num_trials
    assert login.jobs() == []
    assert len(RunGroup(group.path).unsubmitted) >= num_trials - max_jobs


def test_what_is_left_is_submitted_by_hand(login, cluster, tmp_path):
    group = submit(login, "--array", "0-14", *HOLD, "--", "true")
    left = len(group.unsubmitted)
    refused = login.trainkit("resume", str(group.path))
    assert (refused.returncode, f"none of the {left} unsubmitted" in refused.stderr) == (2, True)
    limit(cluster, -1)
    try:
        done = login.trainkit("resume", str(group.path))
    finally:
        limit(cluster, MAX_JOBS)
    assert done.returncode == 0, done.stderr
    assert RunGroup(group.path).unsubmitted == []
    assert status(login, group)["states"] == {"pending": 15}
    login.trainkit("cancel", str(group.path), check=True)
    assert login.jobs() == []
