"""Tests sweeps and arrays on a real cluster: many runs, one job, and every command that takes a run."""

import json
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.on_slurm.login import ASK_TRAINKIT_S, HOLD, Login, settings, wait_for
from tests.support.runs import FAST
from trainkit.run.files import read_json, read_jsonl
from trainkit.run.group import RunGroup
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

T = TypeVar("T")
LISTENS = ("--", "python", "listens.py")
SLURM_COMMANDS = ("squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr")


def submit(login: Login, *args: str) -> RunGroup:
    """Submit a group with `trainkit submit`, and return it."""
    done = login.trainkit("submit", str(login.config), "--json", *args)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunGroup(json.loads(done.stdout)["run_dir"])


def status(login: Login, group: RunGroup, **more: Any) -> dict[str, Any]:
    done = login.trainkit("status", str(group.path), "--json", **more)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def wait_for_states(
    login: Login, group: RunGroup, timeout_s: float = 240.0, **expected: int
) -> dict[str, Any]:
    """Wait until the trials of a group have these states, and return the group's status."""

    def seen() -> dict[str, Any] | None:
        now = status(login, group)
        return now if now["states"] == expected else None

    return wait_for(seen, f"the states {expected}", timeout_s, ASK_TRAINKIT_S) or {}


def counting_calls(login: Login) -> tuple[dict[str, str], Path]:
    """Return an environment that records every call of a Slurm command, and the file of the records."""
    folder, log = login.folder / "counted", login.folder / "calls"
    folder.mkdir()
    path = login.cluster.variables["PATH"]
    for name in SLURM_COMMANDS:
        real = shutil.which(name, path=path)
        script = folder / name
        script.write_text(f'#!/bin/sh\necho {name} >> "{log}"\nexec {real} "$@"\n')
        script.chmod(0o755)
    return {"PATH": f"{folder}:{path}"}, log


def test_a_sweep_is_the_array_that_the_dry_run_shows(login):
    login.script("import os; print('lr', os.environ['LR'])")
    trials = ["--sweep", "launch.env.LR=1,2", "--sweep", "requeue.max=4"]
    args = ["--gpus-per-node", "1", "--name", "fast", *trials]
    command = ["--", "python", "script.py"]
    shown = login.trainkit("submit", str(login.config), *args, "--dry-run", *command)
    assert shown.returncode == 0, shown.stderr
    assert "2 runs: " in shown.stderr
    assert not (login.folder / "runs").exists()
    group = submit(login, *args, *command)
    assert group.job_id is not None
    assert group.script_file.read_text() == shown.stdout
    assert login.cluster.batch_script(group.job_id).decode() == shown.stdout
    seen = wait_for_states(login, group, 400.0, finished=2)
    assert [str(trial["values"]["launch.env.LR"]) for trial in seen["points"]] == ["1", "2"]
    assert [trial["job_id"] for trial in seen["points"]] == [f"{group.job_id}_0", f"{group.job_id}_1"]
    table = login.trainkit("status", "fast").stdout
    assert "runs        2: 2 finished" in table
    (row,) = [line for line in login.trainkit("status").stdout.splitlines() if line.startswith("runs/fast")]
    assert "2 finished" in row
    assert login.trainkit("logs", "fast/1").stdout == "lr 2\n"


def test_a_point_is_steered_alone(login):
    group = submit(login, "--array", "3-5", *LISTENS)
    runs = {index: group.run(index) for index in (3, 4, 5)}
    for run in runs.values():
        login.wait_for_log(run, "attempt 1 rank 0")
    assert login.trainkit("requeue", f"{group.job_id}_4").returncode == 0
    login.wait_for_log(runs[4], "attempt 2 rank 0", attempt=2)
    assert [run.attempt_numbers() for run in runs.values()] == [[1], [1, 2], [1]]
    restarts = {index: login.cluster.job(f"{group.job_id}_{index}")["Restarts"] for index in runs}
    assert restarts == {3: "0", 4: "1", 5: "0"}
    assert {entry.job_id for entry in read_job(runs[4]).attempts} == {f"{group.job_id}_4"}
    assert login.trainkit("cancel", "small/3", "--wait").returncode == 0
    assert read_json(runs[3].attempt(1).end_file)["state"] == "cancelled"
    done = login.trainkit("cancel", "small", "--wait")
    assert done.returncode == 0, done.stderr
    assert "2 runs ended" in done.stderr
    assert status(login, group)["states"] == {"cancelled": 3}
    assert "asked by" in (runs[5].attempt(1).rank_log(0)).read_text()
    # A trial continues as a separate job, and the group records this job.
    again = login.trainkit("requeue", "small/5", "--json")
    assert again.returncode == 0, again.stderr
    own_job = json.loads(again.stdout)["job_id"]
    login.wait_for_log(runs[5], "attempt 2 rank 0", attempt=2)
    trial = status(login, group)["points"][2]
    assert (trial["state"], trial["job_id"]) == (login.status(runs[5])["state"], own_job)
    assert login.trainkit("cancel", "small").returncode == 0
    wait_for_states(login, group, cancelled=3)


def quick(ask: Callable[[], T]) -> T:
    """Return the answer of a command that takes less than two seconds of processor time.

    Other tests do not affect this time much.
    """
    for _ in range(2):  # other work on the core can only make one of the two tries slower
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = ask()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        if took_s < 2.0:
            break
    assert 0.05 < took_s < 2.0
    return answer


def test_ten_thousand_tasks_in_two_seconds_and_two_calls(login):
    group = submit(login, "--array", "0-9999", *HOLD, *LISTENS)
    counted, log = counting_calls(login)
    for state in ("pending", "cancelled"):
        log.unlink(missing_ok=True)
        assert quick(lambda: status(login, group, env=counted))["states"] == {state: 10_000}
        calls = Counter(log.read_text().split())
        assert calls.total() <= 2, calls
        assert "10,000" in quick(lambda: login.trainkit("status", env=counted)).stdout
        login.trainkit("cancel", str(group.path))


def test_one_of_the_points_that_wait_is_cancelled(login):
    group = submit(login, "--array", "0-9%4", *HOLD, *LISTENS)
    text = login.trainkit("status", str(group.job_id)).stdout
    assert f"job         {group.job_id} [0-9%4], submitted" in text
    assert "scontrol release" in text
    assert login.trainkit("cancel", "small/7").returncode == 0
    assert status(login, group)["states"] == {"pending": 9, "cancelled": 1}
    done = login.trainkit("cancel", "small", "--json")
    assert json.loads(done.stdout)["num_waiting"] == 9


@pytest.mark.slow
def test_repeats_are_rounds_of_one_array(login):
    args = ["--gpus-per-node", "1", "--steps", "9", "--warmup", "2", "--out", "rounds", "--follow", "--json"]
    sweep = ["--sweep", "model.num_layers=1,0", "--repeats", "2"]
    done = login.trainkit("bench", str(login.config), *settings(*FAST), *args, *sweep, timeout_s=300.0)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *not possible +model.num_layers=0: ", done.stderr, re.MULTILINE)
    value = json.loads(done.stdout)
    assert [(row["status"], row["repeats"]) for row in value["rows"]] == [("finished", 2)]
    folders = [RunDir(Path(value["folder"], str(index))) for index in range(2)]
    ends = [read_json(run.attempt(1).end_file)["time"] for run in folders]
    starts = [next(read_jsonl(run.events_file, ["started"]))["time"] for run in folders]
    assert ends[0] < starts[1]
    page = login.trainkit("report", value["folder"], "--json")
    assert page.returncode == 0, page.stderr
    report = json.loads(page.stdout)
    assert report["states"] == {"finished": 2}
    assert report["best"]["result"] == max(row["tokens_per_s_max"] for row in value["rows"])
