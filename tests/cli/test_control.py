import json
import os
import shutil
import signal
import time

import pytest
from steering import wait_for

from tests.support.json_outputs import checked
from tests.support.programs import is_running
from tests.support.said import said
from trainkit.job.processes import descendants
from trainkit.run.end import KILLED
from trainkit.run.files import read_json, utc_now, write_json
from trainkit.run.record import change_newest, mark_cancelled, read_job
from trainkit.run.rundir import RunDir, run_lock


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
    for _ in range(2):
        submitted = desk.trainkit("submit", str(desk.config), "--nodes", "2", "--json")
        run_dir = json.loads(submitted.stdout)["run_dir"]
        assert desk.trainkit("cancel", run_dir, "--wait").returncode == 0
        assert json.loads(desk.typed("status", run_dir, "--json").stdout)["state"] == "cancelled"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a host another name")
def test_a_run_that_was_killed_before_its_host_got_another_name(desk):
    run = desk.submit()
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname dhcp-7; exec "$0" "$@"']
    assert desk.trainkit("cancel", str(run.path), "--wait", within=renamed).returncode == 0
    end = desk.wait_for_end(run)
    assert (end["state"], end["reason"]) == ("cancelled", "saved after SIGTERM")
    run = desk.submit("--name", "other")
    pid = read_json(run.job_file)["attempts"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid))
    assert desk.trainkit("resume", str(run.path), within=renamed).returncode == 0
    assert len(read_json(run.job_file)["attempts"]) == 2


@pytest.mark.parametrize("options", [(), ("--no-snapshot",)])
def test_a_copy_of_a_live_run_does_not_act_on_the_original(desk, options):
    run = desk.submit(*options)
    copies = [desk.folder / "runs/copy", desk.folder / "runs/older"]
    for copy in copies:
        shutil.copytree(run.path, copy, symlinks=True)
    # The second attempt runs in the process of the first one, which the older copy does not know.
    assert desk.trainkit("requeue", str(run.path)).returncode == 0
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    shutil.rmtree(copies[0])
    shutil.copytree(run.path, copies[0], symlinks=True)
    for copy in copies:
        for words in (["cancel", "--now"], ["cancel"], ["requeue"], ["resume"], ["stacks"]):
            done = desk.typed(*words, str(copy))
            assert (done.returncode, f"copy of runs/{run.path.name}," in done.stderr) == (2, True)
    assert desk.status(run)["state"] in ("starting", "running")
    # A copy has taken the place of the original, which was moved.
    moved, pid = desk.folder / "runs/moved", read_job(run).newest.pid
    os.kill(pid, signal.SIGSTOP)  # otherwise the process sees the signal, saves and ends
    run.path.rename(moved)
    copies[0].rename(run.path)
    done = desk.trainkit("cancel", str(run.path), "--now")
    assert (done.returncode, "not the folder" in done.stderr) == (2, True)
    os.kill(pid, signal.SIGCONT)
    link = desk.folder / "link"
    link.symlink_to(moved)
    assert desk.trainkit("cancel", str(link), "--wait").returncode == 0
    assert "saved after SIG" in desk.wait_for_end(RunDir(moved), attempt=2)["reason"]


def test_the_last_request_counts_and_a_cancellation_is_never_lost(desk):
    desk.works("while not asked:\n    time.sleep(0.02)\n" + HOLDS_ITS_SAVE)
    run = desk.submit()
    saving = desk.trainkit("requeue", "small")
    assert saving.stderr.startswith(f"runs/small: local-{read_job(run).newest.pid} was asked")
    cancelled = desk.trainkit("cancel", "small", "--json")
    assert checked("cancel", cancelled.stdout)["run_dir"] == str(run.path)
    assert cancelled.stderr.startswith("runs/small: local-")
    refused = desk.trainkit("requeue", "small")
    assert (refused.returncode, "being cancelled: local-" in refused.stderr) == (2, True)
    assert desk.trainkit("cancel", "small").returncode == 0
    (run.path / "saved").touch()
    assert desk.trainkit("cancel", "small", "--wait").returncode == 0
    assert desk.status(run)["state"] == "cancelled"
    assert [entry.reason for entry in read_job(run).attempts] == ["submit"]
    # The second cancellation signals no process, because a process may take a second signal as a reason not
    # to save.
    assert run.attempt(1).rank_log(0).read_text().splitlines()[1] in ("asked 1 times", "asked 2 times")
    assert desk.trainkit("requeue", "small").returncode == 0
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)


HOLDS_ITS_SAVE = """
while not os.path.exists(RUN_DIR + "/saved"):
    time.sleep(0.02)
print(f"asked {len(asked)} times", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("asked", "state"), [("cancel", "cancelled"), ("now", "cancelled"), ("requeue", None)]
)
def test_a_request_whose_command_was_killed_before_its_signal(desk, asked, state):
    run = desk.submit()
    with run_lock(run):
        if asked == "requeue":
            change_newest(run, requeue_requested_at=utc_now())
        else:
            mark_cancelled(run, now=asked == "now")
    if state is None:
        desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    else:
        end = desk.wait_for_end(run)
        assert (end["state"], end["reason"] == KILLED) == (state, asked == "now")


def test_run_of_another_host_or_folder_is_not_touched(desk):
    run = desk.submit()
    job = read_json(run.job_file)
    other, home = desk.folder / "runs/other", desk.folder / "runs/gone"
    shutil.copytree(run.path, other, symlinks=True)
    entry = {key: value for key, value in job["attempts"][0].items() if key != "inode"}
    write_json(other / "job.json", {**job, "attempts": [{**entry, "folder": str(home)}]})
    for words in (["cancel", "--now"], ["cancel"], ["requeue"]):
        done = desk.typed(*words, str(other))
        assert (done.returncode, f"which is {home}" in done.stderr) == (2, True)
    away = {**job["attempts"][0], "host": "elsewhere", "boot_id": "another"}
    write_json(run.job_file, {**job, "attempts": [away]})
    for words in (["cancel"], ["requeue"], ["resume"]):
        done = desk.typed(*words, str(run.path), code=2)
        said(done.stderr)
    assert desk.status(run)["state"] == "unknown"
    write_json(run.job_file, job)
    time.sleep(0.1)
    assert desk.status(run)["state"] in ("starting", "running")


def test_cancel_of_an_ended_run_says_so_and_requeue_keeps_config_and_plan(desk):
    desk.works("")
    run = desk.submit()
    desk.wait_for_end(run)
    done = desk.trainkit("cancel", "small", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "ended")
    assert "has already ended" in done.stderr
    assert desk.wait_for_end(run)["state"] == "finished"
    done = desk.trainkit("requeue", "small", code=0)
    assert done.stdout.splitlines()[0] == str(run.path)
    desk.wait_for_end(run, attempt=2)
    for name in ("config.yaml", "plan.json"):
        assert (run.attempt(2).path / name).read_bytes() == (run.attempt(1).path / name).read_bytes()


def test_a_run_is_requeued_and_cancelled_while_its_log_is_followed(desk):
    run = desk.submit("--nodes", "2")
    reader = desk.start("logs", str(run.path), "-f")
    first = reader.stdout.readline()
    done = desk.trainkit("requeue", "last", "--json", code=0)
    assert checked("requeue", done.stdout)["attempt"] == 2
    desk.wait_for_log(run, "attempt 2 rank 0", attempt=2)
    said(read_json(run.attempt(1).end_file)["reason"])
    assert "asked by SIGTERM" in run.attempt(1).rank_log(1).read_text()
    assert desk.status(run)["attempt"] == 2
    # The same run again, and a cancel right after it.
    assert desk.trainkit("requeue", str(run.path)).returncode == 0
    assert "has ended" in desk.trainkit("cancel", str(run.path), "--wait", code=0).stderr
    assert desk.status(run)["state"] == "cancelled"
    shown, _ = reader.communicate(timeout=120)
    lines = [line for attempt in (1, 2) for line in (f"attempt {attempt} rank 0", "asked by SIGTERM")]
    assert (first + shown).splitlines()[:4] == lines
