"""Tests `--nodes auto` under several loads: it submits the request that Slurm should finish first."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.on_slurm.login import Login, wait_for
from trainkit.formats import time_text
from trainkit.run.rundir import RunDir

AUTO = ("--nodes", "auto", "--gpus-per-node", "1", "--set", "device=cpu")


@contextmanager
def maintenance(login: Login, in_minutes: int) -> Iterator[None]:
    """Reserve all hosts for an hour, beginning in some minutes."""
    when = (f"starttime=now+{in_minutes}minutes", "duration=60", "flags=maint", "users=root", "nodes=ALL")
    login.run(["scontrol", "create", "reservation", "reservationname=maintenance", *when], check=True)
    try:
        yield
    finally:
        login.run(["scontrol", "delete", "reservation=maintenance"], check=True)


@pytest.mark.slow(seconds=45)
def test_each_load_has_its_earliest_end(login):
    def chosen(*options: str) -> tuple[int, str, set[float]]:
        """Return nodes and partition of the plan, and the limits of the requests with the earliest end."""
        done = login.trainkit("check", "small.yaml", *AUTO, *options, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        ends = [offer for offer in found["offers"] if offer["end_time"] is not None]
        first = min(offer["end_time"] for offer in ends)
        sbatch = found["plan"]["slurm"]["sbatch"]
        taken = found["taken"]
        slice_ = time_text(int(taken["limit_s"])) if taken["is_slice"] else None
        assert found["config"]["resources"]["slice"] == slice_
        assert sbatch["time"] == (slice_ or found["config"]["resources"]["time"])
        best = [
            offer["limit_s"]
            for offer in ends
            if offer["end_time"] == first and offer["num_nodes"] == sbatch["nodes"]
        ]
        assert best
        return sbatch["nodes"], sbatch["partition"], {*best}

    (login.folder / "small.yaml").write_text("name: small\ntrain: {global_batch_size: 16}\n")
    high = ("--partition", "high", "--time", "60")
    assert chosen(*high) == (4, "high", {3600})
    # one slice fits before the maintenance, and the others run after it
    with maintenance(login, in_minutes=90):
        assert chosen("--partition", "high", "--time", "08:00:00") == (4, "high", {3600})
    with maintenance(login, in_minutes=30):
        assert chosen(*high, "--time-min", "20") == (4, "high", {1200})
    with login.other_job("--partition=high", "--nodes=2", "--time=10"):  # the run should wait for this job
        assert chosen(*high) == (4, "high", {3600})
    with login.other_job("--partition=low", "--nodes=4"):
        assert chosen("--partition", "low,high", "--time", "60") == (4, "high", {3600})


@pytest.mark.slow(seconds=30)
def test_the_job_has_the_nodes_that_were_chosen(login):
    with login.other_job("--partition=high", "--nodes=2"):
        given = (*AUTO, "--backend", "submitit", "--partition", "high", "--time", "60")
        words = ("--json", "--", "python", "listens.py")
        done = login.trainkit("submit", str(login.config), *given, *words)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        run = RunDir(found["run_dir"])
        assert (found["taken"]["num_nodes"], found["reason"]) == (2, None)
        assert {offer["num_nodes"] for offer in found["offers"]} >= {1, 2}
        login.wait_for_log(run, "of 2")
        # Slurm counts only the remaining nodes of a job that is completing
        job = login.cluster.job(login.job_id(run))
        assert (job["NumNodes"], job["Partition"]) == ("2", "high")
        assert login.trainkit("cancel", str(run.path)).returncode == 0
        assert login.wait_for_end(run)["state"] == "cancelled", login.logs_and_attempts(run)
    wait_for(lambda: {*login.cluster.node_states().values()} == {"idle"}, "four idle hosts")
    done = login.trainkit("resume", str(run.path), "--nodes", "auto")
    assert done.returncode == 0, done.stderr
    assert "4*" in done.stderr
    login.wait_for_log(run, "of 4", attempt=2)
