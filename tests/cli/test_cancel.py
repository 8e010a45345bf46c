import json
import os
import shutil
import signal
import time

import pytest
from steering import is_running, wait_for

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


def test_cancel_of_an_ended_run_says_so(desk):
    desk.works("")
    run = desk.submit()
    desk.wait_for_end(run)
    done = desk.trainkit("cancel", "small", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "ended")
    assert "has already ended" in done.stderr
    assert desk.wait_for_end(run)["state"] == "finished"


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
        assert (done.returncode, f"is a copy of {run.path}" in done.stderr) == (2, True)
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
