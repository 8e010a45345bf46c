"""Tests sweeps, arrays and the queue of one machine with two pretended GPUs."""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from steering import wait_for

from trainkit.job.processes import ranks_below
from trainkit.run.files import write_json
from trainkit.run.group import RunGroup
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

FAKE = Path(__file__).parents[1] / "support" / "fake_gpus"
WORK = """
import fcntl
from pathlib import Path

PLACE = Path({folder!r})
gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
in_use = open(PLACE / f"gpu-{{gpu}}", "a")
try:
    fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (PLACE / "shared").touch()
    sys.exit(78)
name = os.environ.get("SLURM_ARRAY_TASK_ID", Path(RUN_DIR).name)
while not asked and not (PLACE / "end").exists() and not (PLACE / f"end-{{name}}").exists():
    time.sleep(0.02)
if asked:
    sys.exit(75)
if RANK == 0:
    with (PLACE / "done").open("a") as done:
        done.write(name + "\\n")
"""


@pytest.fixture
def workstation(desk, tmp_path):
    """Provide a desk with two GPUs, whose runs end once a file `end`, or `end-NAME` for one run, exists."""
    desk.config.write_text(desk.config.read_text().replace("device: cpu", "device: auto"))
    desk.environ |= {"PYTHONPATH": f"{FAKE}:{desk.environ['PYTHONPATH']}", "FAKE_GPUS": "2"}
    desk.works(WORK.format(folder=str(tmp_path)))
    return desk


def submit(desk, *args: str) -> Path:
    # A COMMAND needs no torch for GPUs.
    done = desk.trainkit("submit", str(desk.config), *args, "--", sys.executable, str(desk.worker), code=0)
    return Path(done.stdout.splitlines()[0])


def status(desk, path: Path) -> dict:
    return json.loads(desk.typed("status", str(path), "--json").stdout)


def done(desk) -> list[str]:
    file = desk.folder / "done"
    return file.read_text().split() if file.exists() else []


def has_begun(run: RunDir, attempt: int = 1) -> bool:
    log = run.attempt(attempt).rank_log(0)
    return log.exists() and "rank 0" in log.read_text()


def kill(run: RunDir) -> None:
    """Kill the supervisor of a run, and wait until it has ended."""
    entry = read_job(run).newest
    os.kill(entry.pid, signal.SIGKILL)
    wait_for(lambda: entry.alive() is False)


@pytest.mark.slow(seconds=30)
def test_a_sweep_survives_whatever_is_killed_and_runs_each_point_once(workstation):
    desk, seeds = workstation, ",".join(map(str, range(5)))
    group = RunGroup(submit(desk, "--gpus-per-node", "1", "--sweep", f"seed={seeds}", "--array", "%2"))
    zero, one, two, three = map(group.run, range(4))
    wait_for(lambda: has_begun(zero) and has_begun(one))
    assert status(desk, group.path)["states"] == {"running": 2, "pending": 3}
    (desk.folder / "end-0").touch()
    wait_for(lambda: has_begun(two))

    # If a rank is killed, its supervisor restarts it. If a supervisor is killed, the next trial takes its
    # GPU.
    (rank,) = ranks_below(read_job(one).newest.pid)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: has_begun(one, attempt=2))
    kill(two)
    wait_for(lambda: has_begun(three))
    assert status(desk, group.path)["states"] == {"died": 1, "running": 2, "pending": 1, "finished": 1}

    # The records refer to processes of an earlier boot of the machine.
    process = RunGroup(group.path).record.process
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: process.alive() is False)
    kill(one)
    kill(three)
    for file in (group.sweep_file, *(run.job_file for run in (one, two, three))):
        write_json(file, json.loads(file.read_text().replace(process.boot_id, "another boot")))
    found = status(desk, group.path)
    assert found["states"] == {"died": 4, "finished": 1}
    assert found["points"][4]["reason"].partition("`")[2].startswith(f"trainkit resume {group.path}`")

    (desk.folder / "end").touch()
    desk.trainkit("resume", str(group.path), code=0)
    wait_for(lambda: len(done(desk)) == 5)
    wait_for(lambda: status(desk, group.path)["states"] == {"finished": 5})
    assert Counter(done(desk)) == {str(index): 1 for index in range(5)}
    assert not (desk.folder / "shared").exists()
    assert desk.typed("report", str(group.path)).returncode == 0


@pytest.mark.slow(seconds=10)
def test_a_group_is_cancelled_and_resumed(workstation):
    desk = workstation
    group = RunGroup(submit(desk, "--array", "0-2"))
    wait_for(lambda: has_begun(group.run(0)))
    refused = desk.typed("resume", str(group.path), code=2)
    assert f"runs/{group.path.name} is running" in refused.stderr
    waiting = desk.trainkit("cancel", f"{group.path}/1")
    assert f"runs/{group.path.name}/1 has not started" in waiting.stderr
    cancelled = desk.trainkit("cancel", str(group.path), "--wait", code=0)
    assert "1 run ended, 2 runs" in cancelled.stderr
    assert status(desk, group.path)["states"] == {"cancelled": 3}
    (desk.folder / "end").touch()
    refused = desk.typed("resume", str(group.path), "--nodes", "2")
    assert "error: --nodes " in refused.stderr
    assert desk.trainkit("resume", str(group.path)).returncode == 0
    wait_for(lambda: status(desk, group.path)["states"] == {"finished": 3})
    refusal = f"error: all runs of runs/{group.path.name} have finished"
    # the process must exit first
    wait_for(lambda: refusal in desk.trainkit("resume", str(group.path)).stderr)
    assert (done(desk), [read_job(group.run(index)).newest.attempt for index in range(3)]) == (
        ["0", "1", "2"],
        [2, 1, 1],
    )


@pytest.mark.slow(seconds=10)
def test_single_runs_wait_for_gpus_and_for_each_other(workstation):
    desk = workstation
    first = RunDir(submit(desk, "--name", "first"))
    wait_for(lambda: has_begun(first))
    second = RunDir(submit(desk, "--name", "second"))
    wait_for(lambda: status(desk, second.path)["state"] == "pending")
    reason = f"waits for 2 GPUs (0 free, in use by {first.path})"
    assert status(desk, second.path)["reason"] == reason
    assert "is already pending" in desk.trainkit("requeue", str(second.path)).stderr
    third = RunDir(submit(desk, "--name", "third", "--after", "first"))
    wait_for(lambda: status(desk, third.path)["reason"] == f"waits for {first.path} to finish")
    assert "from the queue" in desk.trainkit("cancel", str(second.path)).stderr
    assert status(desk, second.path)["state"] == "cancelled"
    (desk.folder / "end").touch()
    wait_for(lambda: status(desk, third.path)["state"] == "finished")
    assert done(desk) == ["first", "third"]
    assert not (desk.folder / "shared").exists()
