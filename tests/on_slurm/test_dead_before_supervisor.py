"""Tests jobs that end before their supervisor starts: the error output, and a retry on other nodes."""

import json
import sys

import pytest

from tests.on_slurm.login import BACKENDS, HOLD, log_of, settings
from trainkit.run.files import read_jsonl
from trainkit.run.group import RunGroup
from trainkit.run.rundir import STARTS_FOLDER, RunDir

ON_ONE = ("--nodes", "1", "--gpus-per-node", "1")
PRINTS_HOST = ("--", "sh", "-c", "echo ran on $SLURMD_NODENAME")


def setup(line: str) -> list[str]:
    """Return the ``--set`` option for one line of launch.setup."""
    return settings(f"launch.setup={json.dumps([line])}")


def killed_on(host: str) -> list[str]:
    return setup(f'if [ "$SLURMD_NODENAME" = {host} ]; then kill -9 $$; fi')


def failed_hosts(run: RunDir) -> list[str]:
    return [event["host"] for event in read_jsonl(run.events_file, ("start_failed",))]


@pytest.mark.slow(seconds=15)
def test_a_broken_node_is_left_out_by_the_requeue(login):
    bad = login.cluster.hosts[0]  # an idle cluster uses this host first
    options = (*ON_ONE, *HOLD, *killed_on(bad), *PRINTS_HOST)
    runs = [
        login.submit("--backend", backend, "--per", per, *options)
        for backend, per in zip(BACKENDS, ("gpu", "node"), strict=True)
    ]
    group = login.submit("--array", "0-1", *options).path
    # All jobs run at once. While one ends, others start on other hosts.
    held = [*map(login.job_id, runs), RunGroup(group).job_id]
    login.run(["scontrol", "release", *map(str, held)], check=True)
    for run in (*runs, RunDir(group / "0"), RunDir(group / "1")):
        login.finish(run)
        assert failed_hosts(run) == [bad]
        assert log_of(run).split()[-1] != bad
        log = run.attempt(1).supervisor_log.read_text()
        assert f"trainkit: ended on {bad} with exit code 137 " in log
        assert f" queue, without {bad}\n" in log
    assert not list(login.folder.glob(f"runs/*/{STARTS_FOLDER}/*"))


@pytest.mark.slow(seconds=20)
def test_the_environment_is_gone(login):
    venv = login.folder / "venv"
    venv.symlink_to(sys.prefix)
    options = (*ON_ONE, *HOLD, *settings(f"launch.venv={venv}"))
    runs = [login.submit(*options, *more) for more in ((), settings("requeue.on=[preempted]"))]
    venv.unlink()
    for run in runs:
        login.run(["scontrol", "release", login.job_id(run)], check=True)
    for run, count in zip(runs, (2, 1), strict=True):
        login.wait_for_job(run, "FAILED")
        status = login.status(run)
        hosts = [json.loads(file.read_text())["host"] for file in (run.path / STARTS_FOLDER).iterdir()]
        assert len(set(hosts)) == count
        assert status["host"] in hosts
        assert len(status["warnings"]) == count - 1
        assert any(f"trainkit: cannot activate {venv}" in text for text in status["batch_log"])
    assert login.trainkit("requeue", str(runs[1].path)).returncode == 0
    assert f"#SBATCH --exclude={status['host']}\n" in runs[1].script_file.read_text()
    assert login.trainkit("cancel", str(runs[1].path), "--now").returncode == 0
