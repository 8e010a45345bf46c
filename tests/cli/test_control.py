import json
import os
import shutil
import signal
import sys
import time

import pytest
from steering import wait_for

from tests.support.programs import is_running
from trainkit.job.processes import descendants
from trainkit.run.files import read_json, write_json


def test_cancel_saves_and_ends(desk):
    run = desk.submit("--nodes", "2")
    done = desk.trainkit("cancel", "last", "--wait")
    assert done.returncode == 0
    assert "has ended" in done.stderr
    end = desk.wait_for_end(run)
    assert (end["state"], end["reason"]) == ("cancelled", "saved after SIGTERM")
    assert "asked by SIGTERM" in run.attempt(1).rank_log(1).read_text()


def test_cancel_now_kills_the_whole_tree(desk):
    desk.works("time.sleep(600)")
    run = desk.submit("--nodes", "2", "--gpus-per-node", "2")
    pid = read_json(run.job_file)["attempts"][0]["pid"]
    everything = [pid, *wait_for(lambda: len(found := descendants(pid)) == 6 and found)]
    assert desk.trainkit("cancel", str(run.path), "--now").returncode == 0
    wait_for(lambda: not any(map(is_running, everything)), 5)
    assert desk.wait_for_end(run)["state"] == "cancelled"
    assert desk.status(run)["state"] == "cancelled"


def test_cancel_while_it_starts(desk):
    for _ in range(3):
        run_dir = json.loads(desk.trainkit("submit", str(desk.config), "--nodes", "2", "--json").stdout)[
            "run_dir"
        ]
        done = desk.trainkit("cancel", run_dir, "--wait")
        assert done.returncode == 0
        assert json.loads(desk.trainkit("status", run_dir, "--json").stdout)["state"] == "cancelled"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a host another name")
def test_a_run_that_was_killed_before_its_host_got_another_name(desk):
    run = desk.submit()
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname dhcp-7; exec "$0" "$@"']
    assert desk.trainkit("cancel", str(run.path), "--wait", within=renamed).returncode == 0
    assert desk.wait_for_end(run)["state"] == "cancelled"
    run = desk.submit("--name", "other")
    pid = read_json(run.job_file)["attempts"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid))
    assert desk.trainkit("resume", str(run.path), within=renamed).returncode == 0
    assert len(read_json(run.job_file)["attempts"]) == 2


def test_a_copy_of_a_live_run_does_not_act_on_the_original(desk):
    run = desk.submit()
    copy = desk.folder / "runs/copy"
    shutil.copytree(run.path, copy, symlinks=True)
    for words in (["cancel", "--now"], ["requeue"], ["resume"]):
        done = desk.trainkit(*words, str(copy))
        assert (done.returncode, f"is a copy of runs/{run.path.name}, which" in done.stderr) == (2, True)
    assert desk.status(run)["state"] in ("starting", "running")


def test_run_of_another_host_is_not_touched(desk):
    run = desk.submit()
    job = read_json(run.job_file)
    away = {**job["attempts"][0], "host": "elsewhere", "boot_id": "another"}
    write_json(run.job_file, {**job, "attempts": [away]})
    for words in (["cancel"], ["requeue"], ["resume"]):
        done = desk.trainkit(*words, str(run.path))
        assert done.returncode == 2
        assert "it was started on elsewhere" in done.stderr
    assert desk.status(run)["state"] == "unknown"
    write_json(run.job_file, job)
    time.sleep(0.1)
    assert desk.status(run)["state"] in ("starting", "running")


def test_requeue_of_a_live_run_comes_back_by_itself(desk):
    run = desk.submit("--nodes", "2")
    done = desk.trainkit("requeue", "last", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["attempt"] == 2
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    assert read_json(run.attempt(1).end_file)["reason"] == "saved after SIGUSR2; resumes (restart 1)"
    assert desk.status(run)["attempt"] == 2


def test_requeue_twice(desk):
    run = desk.submit()
    for _ in range(2):
        assert desk.trainkit("requeue", str(run.path)).returncode == 0
    wait_for(lambda: desk.status(run)["attempt"] >= 2)
    assert desk.trainkit("cancel", str(run.path), "--wait").returncode == 0
    assert desk.status(run)["state"] == "cancelled"


def test_cancel_of_an_ended_run_says_so_and_requeue_keeps_config_and_plan(desk):
    desk.works("")
    run = desk.submit()
    desk.wait_for_end(run)
    done = desk.trainkit("cancel", "small", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "ended")
    assert "has already ended" in done.stderr
    assert desk.wait_for_end(run)["state"] == "finished"
    done = desk.trainkit("requeue", "small")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(run.path)
    desk.wait_for_end(run, attempt=2)
    for name in ("config.yaml", "plan.json"):
        assert (run.attempt(2).path / name).read_bytes() == (run.attempt(1).path / name).read_bytes()


def test_logs_follow_a_run_over_its_attempts(desk):
    run = desk.submit()
    reader = desk.start("logs", str(run.path), "-f")
    first = reader.stdout.readline()
    desk.trainkit("requeue", str(run.path))
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    desk.trainkit("cancel", str(run.path), "--wait")
    shown, _ = reader.communicate(timeout=120)
    assert (first + shown).splitlines() == [
        "attempt 1 rank 0",
        "asked by SIGTERM",
        "attempt 2 rank 0",
        "asked by SIGTERM",
    ]


SPY = """#!{python}
import json, sys
assert sys.argv[1:4] == ["dump", "--json", "--pid"]
pid = int(sys.argv[-1])
rank = [line for line in open(f"/proc/{{pid}}/environ").read().split("\\0") if line.startswith("RANK=")][0]
if rank == "RANK=3":
    sys.exit("Error: Permission Denied")
place = "read" if rank == "RANK=2" else "gather"
frames = [{{"name": place, "filename": "/x/site-packages/torch/a.py", "line": 7}}]
main = {{"thread_id": 5, "thread_name": "MainThread", "os_thread_id": pid, "frames": frames}}
other = {{"thread_id": 6, "thread_name": "data", "os_thread_id": 1, "frames": frames}}
print(json.dumps([other, main]))
"""


@pytest.fixture
def spied(desk):
    """A desk where a program stands in for py-spy: rank 2 reads, rank 3 cannot be seen, the others wait."""
    folder = desk.folder / "bin"
    folder.mkdir()
    (folder / "py-spy").write_text(SPY.format(python=sys.executable))
    (folder / "py-spy").chmod(0o755)
    desk.environ["PATH"] = f"{folder}:{desk.environ['PATH']}"
    return desk


def test_ranks_at_the_same_place_are_shown_together(spied):
    run = spied.submit("--nodes", "2", "--gpus-per-node", "2")
    spied.wait_for_log(run, "rank 3", rank=3)
    done = spied.trainkit("stacks", "last")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" on ")[0] for line in lines if line.startswith("rank")] == [
        "rank 2",
        "ranks 0-1",
        "rank 3",
    ]
    assert lines[1] == "    read (torch/a.py:7)"
    assert lines[-1].endswith("py-spy: Error: Permission Denied")
    assert "data" not in done.stdout
    only = spied.trainkit("stacks", "last", "--rank", "2").stdout
    assert only.startswith("rank 2 on ")
    assert "  thread data 0x6" in only
    assert list(run.attempt(1).stacks_dir.iterdir()) == [], "nothing of the question is left"
    value = json.loads(spied.trainkit("stacks", "last", "--json").stdout)
    assert (value["run_dir"], value["attempt"]) == (str(run.path), 1)
    assert (value["groups"], value["silent"]) == ([[2], [0, 1]], [])
    assert [reply["rank"] for reply in value["replies"]] == [0, 1, 2, 3]
    assert value["replies"][2]["threads"]["MainThread 0x5"] == ["read (/x/site-packages/torch/a.py:7)"]
    assert value["replies"][3]["problem"] == "py-spy: Error: Permission Denied"


def test_what_cannot_be_asked(spied):
    run = spied.submit()
    done = spied.trainkit("stacks", "last", "--rank", "7", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"] == "the run has no rank 7"
    spied.trainkit("cancel", "last", "--now")
    spied.wait_for_end(run)
    done = spied.trainkit("stacks", "last")
    assert done.returncode == 2
    assert "is not running" in done.stderr
    assert "hint: `trainkit status" in done.stderr
    assert spied.trainkit("stacks", "nothing").returncode == 2
