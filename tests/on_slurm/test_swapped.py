"""Tests a run folder that is swapped or changed while its job waits: nothing in it runs."""

import json
from pathlib import Path

from tests.on_slurm.login import HOLD, wait_for
from trainkit.errors import EXIT_NO_RESTART
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir


def replaced(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_nothing_runs_of_a_folder_that_is_not_what_was_submitted(login):
    ran = login.folder / "ran"
    ran.mkdir()

    def held(name: str, *args: str) -> RunDir:
        command = ("sh", "-c", f"touch {ran}/{name}-$SLURM_ARRAY_TASK_ID")
        return login.submit(*HOLD, "--name", name, *args, "--", *command)

    same, config, swapped, other = (held(name) for name in ("same", "config", "swapped", "other"))
    plans = {name: held(name, "--backend", name) for name in ("sbatch", "submitit")}
    group = RunGroup(held("group", "--array", "0-1").path)
    jobs = {run: login.job_id(run) for run in (same, config, swapped, *plans.values())}
    replaced(config.attempt(1).config_file, "name: config", "name: other")
    for name, run in plans.items():
        replaced(run.attempt(1).plan_file, f"{ran}/{name}", f"{ran}/planted")
    record = json.loads(group.sweep_file.read_text())
    record["points"][1]["plan"] = {"command": ["sh", "-c", f"touch {ran}/planted"]}
    group.sweep_file.write_text(json.dumps(record))
    swapped.path.rename(login.folder / "away")
    # the folder belongs to the same user, and nobody else could have written its files
    other.path.rename(swapped.path)
    login.run(["scontrol", "release", *jobs.values(), str(group.job_id)], check=True)
    login.finish(same)
    for run in (config, *plans.values()):
        end = login.wait_for_end(run)
        assert (end["state"], end["exit_code"]) == ("failed", EXIT_NO_RESTART)
        assert f"{run.path}/" in end["reason"]
        assert login.status(run)["reason"] == end["reason"]
    file = config.attempt(1).config_file
    assert str(file) in login.wait_for_end(config)["reason"]
    log = swapped.attempt(1).supervisor_log
    error = f"error: {swapped.attempt(1).config_file} differs from the file"
    wait_for(lambda: error in log.read_text(), "the log")
    logs = [group.log_file(index) for index in (0, 1)]
    wait_for(
        lambda: all("sweep.json differs from the file" in one.read_text() for one in logs),
        "the logs of the array",
    )
    login.run(["scancel", "--user=root"], check=True)  # `other` waits for its next start
    login.wait_until_idle()
    assert not swapped.attempt(1).end_file.exists(), "it is the attempt of another run, which may still run"
    assert [path.name for path in ran.iterdir()] == ["same-"]
    assert all(login.cluster.job(job)["Restarts"] == "0" for job in jobs.values())
    resumed = login.trainkit("resume", str(config.path))
    assert resumed.returncode == 0, resumed.stderr
    login.run(["scontrol", "release", login.job_id(config)], check=True)
    assert login.wait_for_end(config, attempt=2)["state"] == "finished"
