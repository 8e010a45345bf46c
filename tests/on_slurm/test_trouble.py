"""Tests dead daemons, lost answers, other jobs, failed starts, full disks and NFS: no run is lost."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm.broken_hosts import log_folder_replaced
from tests.on_slurm.broken_runs import diagnosed
from tests.on_slurm.login import ASK_SLURM_S, BACKENDS, HOLD, ON_TWO_HOSTS, Login, log_of, settings, wait_for
from tests.on_slurm.shared_disk import shared_small_disk
from tests.on_slurm.survival import events_of, time_of
from tests.support.disks import fill
from tests.support.nfs import FAST_S, mounted_by, nfs_clients
from tools.slurm_cluster.cluster import Cluster
from trainkit.errors import EXIT_STOPPED
from trainkit.run.files import read_jsonl
from trainkit.run.group import RunGroup
from trainkit.run.record import read_job
from trainkit.run.rundir import STARTS_FOLDER, RunDir

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
REFUSED = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
SAVES_SLOWLY = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGUSR2, lambda n, f: asked.append(n))
print("attempt", os.environ["TRAINKIT_JOB_ATTEMPT"], flush=True)
while not asked:
    time.sleep(0.02)
print("asked", flush=True)
time.sleep(3)
sys.exit(75)
"""


@pytest.fixture
def sbatch(login: Login) -> Callable[[str], None]:
    """Return a function that gives the sbatch of this test a body, in which `$real` is the real sbatch."""
    path, program = login.cluster.environ["PATH"], login.folder / "bin/sbatch"
    program.parent.mkdir()
    login.env["PATH"] = f"{program.parent}:{path}"

    def does(body: str) -> None:
        real = shutil.which("sbatch", path=path)
        program.write_text(f"#!/bin/bash\necho >> {login.folder}/calls\nreal={real}\n{body}\n")
        program.chmod(0o755)

    does('exec $real "$@"')
    return does


def test_an_answer_that_was_lost_is_one_job(login, sbatch):
    sbatch(f'$real "$@" > /dev/null; echo "{TIMED_OUT}" >&2; exit 1')
    for backend in BACKENDS:
        args = ("submit", str(login.config), "--json", "--backend", backend)
        done = login.trainkit(*args, "--", "echo", "ran")
        assert "checking whether Slurm" in done.stderr
        run = login.finish(RunDir(json.loads(done.stdout)["run_dir"]))
        assert log_of(run) == "ran\n"
    argv = ["squeue", "--noheader", "--states=all", "--name=small", "--format=%o"]
    jobs = [line for line in login.run(argv, check=True).stdout.splitlines() if str(login.folder) in line]
    assert (len((login.folder / "calls").read_text().splitlines()), len(jobs)) == (2, 2)


def test_a_refusal_leaves_the_run_as_it_was(login, sbatch):
    submitit = ("--backend", "submitit", "--", "true")
    run = login.finish(login.submit(*submitit))
    login.wait_until_idle()  # submitit writes a last line into the log
    sbatch(f'echo "{REFUSED}" >&2; exit 1')
    changing = {"events.jsonl", ".lock", "step.json"}
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    refused = login.trainkit("resume", str(run.path), *settings("requeue.grace_s=7", "resources.time='5'"))
    assert refused.returncode == 2
    assert "accounting/QOS policy" in refused.stderr
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {path for path in before if after.get(path) != before[path] and path.name not in changing} == set()
    assert (run.attempts_dir / "latest").resolve() == run.attempt(1).path
    assert run.attempt_numbers() == [1]
    refused = login.trainkit("submit", str(login.config), "--name", "new", *submitit)
    assert refused.returncode == 2
    assert not (login.folder / "runs/new").exists()


def test_the_controller_is_restarted_while_jobs_save_to_come_back(login):
    command = [*ON_TWO_HOSTS, "--", "python", login.script(SAVES_SLOWLY)]
    runs = [login.submit("--backend", backend, *command) for backend in BACKENDS]
    job_ids = [login.job_id(run) for run in runs]
    for run in runs:
        for rank in range(2):
            login.wait_for_log(run, "attempt 1", rank)
        assert login.trainkit("requeue", str(run.path)).returncode == 0
    login.cluster.restart_slurmctld()
    for run in runs:
        assert (end := login.wait_for_end(run))["action"] == "requeue", end
        assert end["reason"].startswith("saved after SIGUSR2; ")
        for rank in range(2):
            login.wait_for_log(run, "attempt 2", rank, attempt=2)
    assert [login.job_id(run) for run in runs] == job_ids
    assert login.trainkit("cancel", str(runs[1].path), "--now").returncode == 0
    assert login.wait_for_end(runs[1], 2)["state"] == "cancelled"


def test_a_cluster_without_accounting(login):
    login.cluster.stop_accounting()
    lost = login.submit(*HOLD, "--", "true")
    login.run(["scancel", login.job_id(lost)], check=True)
    assert login.status(lost)["state"] == "cancelled"
    # The job id is changed, as if squeue had forgotten the job.
    lost.job_file.write_text(lost.job_file.read_text().replace(f'"{login.job_id(lost)}"', '"99999"'))
    status = login.status(lost)
    assert status["state"] == "died"
    assert "accounting does not" in status["reason"]
    assert login.trainkit("status").returncode == 0


def test_the_log_folder_is_deleted_before_the_start(login):
    """Newer versions of Slurm create the folder and start the run. Slurm 22.05 does not start the job."""
    run = login.submit(*HOLD, "--", "echo", "ran")
    shutil.rmtree(run.attempt(1).logs_dir)
    login.run(["scontrol", "release", login.job_id(run)], check=True)
    if login.slurm_version == "22.05":
        login.wait_for_job(run, "FAILED")
        a_job_without_a_log_is_explained_and_resumes(login, run)
    else:
        assert login.wait_for_job(run, "FAILED", "COMPLETED")["JobState"] == "COMPLETED"
        login.finish(run)
        assert (login.status(run)["state"], log_of(run)) == ("finished", "ran\n")
        assert run.attempt(1).supervisor_log.exists()


def test_a_log_that_no_version_of_slurm_can_open(login):
    run = log_folder_replaced(login)
    a_job_without_a_log_is_explained_and_resumes(login, run)


def a_job_without_a_log_is_explained_and_resumes(login: Login, run: RunDir) -> None:
    """Check that `status` explains a job that Slurm failed before its start, and that its advice works."""
    assert login.cluster.job(login.job_id(run))["ExitCode"] == "0:53"
    status = login.status(run)
    words = "Slurm reports FAILED; Slurm could not open the log of the job and did not start the job"
    assert (status["state"], status["reason"], status["step"]) == ("died", words, None)
    found = diagnosed(login, run, 1)
    assert (found["name"], status["warnings"]) == ("log-not-opened", [])
    assert f"`trainkit resume runs/{run.name}` " in found["advice"][0]
    words = "resume", str(run.path), *settings("resources.extra.hold=false")
    shown = login.trainkit(*words, "--dry-run")
    assert run.attempt_numbers() == [1]
    resumed = login.trainkit(*words)
    assert resumed.returncode == 0, resumed.stderr
    # The plan says when a host failed, which only the resume records, so the hash of the plan differs.
    scripts = (re.sub(r":[0-9a-f]{32}\b", "", text) for text in (run.script_file.read_text(), shown.stdout))
    assert len({*scripts}) == 1
    assert login.wait_for_end(run, 2)["state"] == "finished"


def test_a_full_disk_at_submit(login):
    with shared_small_disk(login.cluster, login.folder / "disk", "1m") as disk:
        for leave_bytes in (0, 16_000, 40_000):
            filler = fill(disk, leave_bytes)
            args = ["--run-dir", str(disk / "run"), *HOLD, "--", "true"]
            done = login.trainkit("submit", str(login.config), *args)
            assert done.returncode == 2, (leave_bytes, done.stderr)
            assert "No space left" in done.stderr
            assert "hint: " in done.stderr
            assert login.jobs() == []
            assert list(disk.iterdir()) == [filler]
            filler.unlink()


def test_a_disk_that_gets_full_while_it_runs(login):
    with shared_small_disk(login.cluster, login.folder / "disk", "1m") as disk:
        run = login.submit_listeners(*ON_TWO_HOSTS, "--backend", "submitit", "--run-dir", str(disk / "run"))
        filler = fill(disk)
        done = login.trainkit("cancel", str(run.path), "--wait")
        assert "not be recorded" in done.stderr
        assert login.wait_for_job(run, "FAILED")["ExitCode"] == f"{EXIT_STOPPED}:0"
        assert [log_of(run, rank).splitlines()[-1] for rank in range(2)] == ["asked by SIGTERM"] * 2
        filler.unlink()
        status = login.status(run)
        assert status["state"] == "died"
        assert "exit code 75" in status["reason"]
        assert login.trainkit("resume", str(run.path)).returncode == 0
        login.wait_for_log(run, "attempt 2 rank 0", attempt=2)
        login.trainkit("cancel", str(run.path), "--now")
        login.wait_until_idle()


MOUNT = """
import sys
from pathlib import Path
from tests.support.nfs import mount
mount(int(sys.argv[1]), Path(sys.argv[2]))
"""
FAILS_ONCE = """
import os, sys, time
print("started at", time.time(), flush=True)
time.sleep(5)  # long enough for the agents to look at the run folder
sys.exit(int(os.environ["TRAINKIT_JOB_ATTEMPT"] == "1"))
"""


@pytest.fixture
def nfs(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Return a folder that the login node and all hosts mount at the same path, each as a separate client."""
    server, shared = tmp_path / "server", tmp_path / "home"
    server.mkdir()
    with ExitStack() as stack:
        stack.enter_context(nfs_clients(server, shared))
        for index in range(1, len(cluster.hosts) + 1):
            stack.enter_context(mounted_by(server, lambda fd, host=index: _mount(cluster, host, fd, shared)))
            stack.callback(cluster.run, ["umount", "--lazy", str(shared)], host=index)
        yield shared


def _mount(cluster: Cluster, host: int, descriptor: int, folder: Path) -> None:
    root = str(Path(__file__).parents[2])
    argv = cluster.command_line([sys.executable, "-c", MOUNT, str(descriptor), str(folder)], host, root)
    subprocess.run(argv, env=cluster.environ, pass_fds=[descriptor], check=True, timeout=30, cwd=root)


def test_a_run_starts_and_restarts_at_once(cluster, nfs):
    login = Login(cluster, nfs)
    login.script(FAILS_ONCE)
    run = login.submit("--nodes", "2", "--gpus-per-node", "1", "--", "python", "script.py")
    run = RunDir(nfs.with_name("server") / run.path.relative_to(nfs))  # the server has no cache
    login.wait_for_end(run, attempt=2)
    for attempt, started in enumerate(events_of(run, "started"), 1):
        for rank in range(2):
            began_s = float(log_of(run, rank, attempt).split("started at ")[1].split()[0])
            assert began_s - time_of(started) < FAST_S, login.logs_and_attempts(run)


ENDS_AT_THE_SECOND_TIME = """
import os, time
print("attempt", os.environ["TRAINKIT_JOB_ATTEMPT"], "rank", os.environ["RANK"], flush=True)
time.sleep(600 if os.environ["TRAINKIT_JOB_ATTEMPT"] == "1" else 0)
"""
ONLY_BY_OTHER_JOBS = ("--time", "1", *settings("requeue.on=[timeout]"))
"""Options with which a run can continue only as another job.

Slurm may not requeue the job, and one minute is too short for a restart in the allocation.
"""


def carried(run: RunDir) -> list[tuple[str, str]]:
    """Return the job and the reason of every attempt."""
    return [(entry.job_id, entry.reason) for entry in read_job(run).attempts]


def test_a_follow_up_carries_the_run_on_and_the_rest_vanish(login):
    script = login.script(ENDS_AT_THE_SECOND_TIME)
    args = [*settings("requeue.follow_ups=2"), "--", "python", script]
    runs = [login.submit("--backend", backend, *args) for backend in BACKENDS]
    jobs = [_kill_the_supervisor(login, run) for run in runs]
    for run, (first, second, _) in zip(runs, jobs, strict=True):
        end = login.wait_for_end(run, attempt=2)
        assert end["state"] == "finished", login.logs_and_attempts(run)
        assert carried(run) == [(first, "submit"), (second, "restart")]
    login.wait_until_idle()
    for run, (_, second, third) in zip(runs, jobs, strict=True):
        assert login.cluster.job(third)["JobState"] == "CANCELLED"
        assert read_job(run).follow_ups == [second, third]


def _kill_the_supervisor(login: Login, run: RunDir) -> tuple[str, str, str]:
    """Kill the supervisor once its rank has started, and return the run's job and its two chained jobs."""
    first = login.job_id(run)
    second, third = read_job(run).follow_ups
    waits = [login.cluster.job(job)["Dependency"] for job in (second, third)]
    assert waits[0] == f"afternotok:{first}(unfulfilled)"
    assert waits[1] == f"{waits[0]},afternotok:{second}(unfulfilled)"
    login.wait_for_log(run, "attempt 1 rank 0")
    # The supervisor is killed, so no process can requeue the job.
    supervisor = str(read_job(run).attempts[0].pid)
    overlapping = ["srun", f"--jobid={first}", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1"]
    login.run([*overlapping, "kill", "-KILL", supervisor])
    return first, second, third


def test_follow_ups_of_a_run_that_a_person_ends(login):
    run = login.submit(*settings("requeue.follow_ups=2", "resources.extra.hold=true"), "--", "true")
    first, second = login.job_id(run), read_job(run).follow_ups[0]
    # a person cancels the job, so the chained job replaces it, and is held too
    login.run(["scancel", first], check=True)
    wait_for(
        lambda: login.cluster.job(first)["JobState"] == "CANCELLED", "the first job's end", poll_s=ASK_SLURM_S
    )
    assert login.status(run)["state"] in ("pending", "requeueing")
    refused = login.trainkit("resume", str(run.path))
    assert (refused.returncode, f"is running as {second}" in refused.stderr) == (2, True)
    assert login.trainkit("cancel", second).returncode == 0
    assert login.jobs() == []
    assert login.status(run)["state"] == "cancelled"


def test_a_job_that_slurm_may_not_start_again_is_submitted_anew(login, sbatch):
    """sbatch prints numbers around the id of the job."""
    sbatch("printf 'Balance (SUs):\\n4821\\n'; $real \"$@\"; code=$?; echo 4822; exit $code")
    listens = ("--", "python", "listens.py")
    runs = [login.submit(*ONLY_BY_OTHER_JOBS, "--backend", backend, *listens) for backend in BACKENDS]
    group = login.submit(*ONLY_BY_OTHER_JOBS, "--array", "3-4", *listens)
    runs.append(RunDir(group.path / "4"))
    for run in runs:
        login.wait_for_log(run, "attempt 1 rank 0")
    before = [login.job_id(run) for run in runs]
    after = login.submit("--after", str(runs[0].path), "--", "true")
    for run in runs:
        assert login.trainkit("requeue", str(run.path)).returncode == 0
    for run, first in zip(runs, before, strict=True):
        login.wait_for_log(run, "attempt 2 rank 0", attempt=2)
        (_, submitted), (second, trigger) = carried(run)
        assert (submitted, trigger) == ("submit", "restart")
        assert second != first
        assert second.partition("_")[2] == first.partition("_")[2]
        assert login.wait_for_end(run)["action"] == "resubmit"
        assert _asked_of(login, second) == _asked_of(login, first)
    assert (
        login.cluster.job(login.job_id(after))["Dependency"]
        == f"afterok:{login.job_id(runs[0])}(unfulfilled)"
    )
    assert len(read_job(RunDir(group.path / "3")).attempts) == 1  # the other task is not affected
    # A second time: the files of the new job are complete.
    assert login.trainkit("requeue", str(runs[1].path)).returncode == 0
    login.wait_for_log(runs[1], "attempt 3 rank 0", attempt=3)
    for run in (after, *runs, group):
        assert login.trainkit("cancel", str(run.path), "--now").returncode == 0
    login.wait_until_idle()


def _asked_of(login: Login, job_id: str) -> dict[str, Any]:
    job = login.cluster.job(job_id)
    return {name: job[name] for name in ("JobName", "TimeLimit", "NumNodes", "Requeue", "StdOut")}


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
