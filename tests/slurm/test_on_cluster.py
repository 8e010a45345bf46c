"""Tests submissions, states, requeues and signals of jobs on a real cluster, and its description."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slurm.test_hosts import HOST_LISTS
from tests.support import programs
from tools.slurm_cluster.cluster import Cluster, running
from trainkit.cluster.discovery import discover_cluster
from trainkit.cluster.model import Account, NodeKind
from trainkit.scheduler import JobState, expand_hosts
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.control import cancel, requeue, show_config
from trainkit.slurm.jobs import SlurmJob, query_jobs
from trainkit.slurm.submit import submit_script

SLEEP = "sleep 2400\n"


def send(folder: Path, body: str, *directives: str, token: str = "", **more: object) -> str:
    """Submit a job that runs `body`, and return its id."""
    token = token or f"trainkit:{time.monotonic_ns():x}"
    lines = [f"--comment={token}", "--time=10", "--output=log", *directives]
    path = folder / f"{token}.sbatch"
    path.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), body]))
    return submit_script(path, token=token, cwd=folder, **{"notify": print, **more})  # type: ignore[arg-type]


def wait_for(job_id: str, *states: JobState) -> SlurmJob:

    def asked() -> SlurmJob | None:
        job = query_jobs([job_id])[job_id]
        return job if job.state in states else None

    found: SlurmJob = programs.wait_for(asked, 240, f"{states} of job {job_id}", 0.1)
    return found


def jobs_with_token(cluster: Cluster, token: str) -> list[str]:
    argv = ["squeue", "--noheader", "--states=all", "--format=%i %r %k"]
    shown = cluster.run(argv, timeout_s=240, check=True).stdout.splitlines()
    # Slurm records some of the jobs that it has refused.
    return [line.split()[0] for line in shown if token in line.split() and "BadConstraints" not in line]


def test_a_controller_that_hangs_gets_the_job_once(cluster, tmp_path):
    """sbatch gives up after 10 s, and the controller executes the request when it continues."""
    controller = cluster.state.processes["slurmctld"].pid
    os.kill(controller, signal.SIGSTOP)
    timer = threading.Timer(14, os.kill, (controller, signal.SIGCONT))
    timer.start()
    try:
        job_id = send(tmp_path, SLEEP, token="trainkit:hang")
    finally:
        timer.join()
    time.sleep(2)
    assert jobs_with_token(cluster, "trainkit:hang") == [job_id]


@pytest.mark.parametrize(
    ("option", "sentence", "hint"),
    [
        ("--partition=nope", "Invalid partition name specified", "sinfo -s"),
        ("--account=nope", "Invalid account or account/partition combination specified", "--account"),
        ("--qos=nope", "Invalid qos specification", "--qos"),
        ("--gres=gpu:9", "Requested node configuration is not available", "sinfo -o "),
        ("--constraint=nope", "Invalid feature specification", "%f"),
        ("--reservation=nope", "Requested reservation is invalid", "scontrol show reservation"),
        ("--array=0-20000", "Invalid job array specification", "MaxArraySize"),
        ("--nope", "unrecognized option '--nope'", "sbatch --help"),
        ("--nodelist=nope", "Invalid node name specified", "sinfo -N"),
    ],
)
def test_refusals(cluster, tmp_path, option, sentence, hint):
    with pytest.raises(SlurmRefused) as caught:
        send(tmp_path, SLEEP, extra_argv=[option])
    assert sentence in caught.value.sentence.splitlines()
    assert hint in caught.value.hint


def test_names_come_back_as_they_were_given(cluster, tmp_path):
    names = [
        "a b",
        "'single' and \"double\"",
        "$(touch injected) `touch injected` ; touch injected & | >injected",
    ]
    names += ["two\nlines", "back\\slash", "Größe 模型 🚀", "%j %x", "--hold"]
    ids = [send(tmp_path, "true\n", extra_argv=[f"--job-name={name}", "--hold"]) for name in names]
    jobs = query_jobs(ids)
    assert {job_id: job.name for job_id, job in jobs.items()} == dict(zip(ids, names, strict=True))
    assert {job.state for job in jobs.values()} == {JobState.PENDING}
    assert not list(tmp_path.rglob("injected"))


@pytest.mark.parametrize(
    ("body", "state", "code", "number"),
    [
        ("exit 0\n", JobState.COMPLETED, 0, None),
        ("exit 75\n", JobState.FAILED, 75, None),
        ("kill -9 $$\n", JobState.FAILED, 0, 9),
    ],
)
def test_ends(cluster, tmp_path, body, state, code, number):
    job = wait_for(send(tmp_path, body), JobState.COMPLETED, JobState.FAILED)
    assert (job.state, job.exit_code, job.exit_signal, job.state.is_terminal) == (state, code, number, True)


def test_a_running_job(cluster, tmp_path):
    job_id = send(tmp_path, SLEEP, "--nodes=2", "--gpus-per-node=4")
    waiting_id = send(tmp_path, SLEEP, "--nodes=4", "--gpus-per-node=4")
    job = wait_for(job_id, JobState.RUNNING)
    assert (job.num_nodes, expand_hosts(job.nodes)) == (2, cluster.hosts[:2])
    assert (job.end_time - job.start_time).total_seconds() == 600
    assert abs(job.start_time.timestamp() - time.time()) < 60
    programs.wait_for(lambda: wait_for(waiting_id, JobState.PENDING).reason == "Resources", 30)


def test_requeued_is_not_the_end(cluster, tmp_path):
    """Only one task of an array is requeued. Another one, which is cancelled, has ended."""
    job_id = send(tmp_path, SLEEP, "--array=0-2")
    tasks = [f"{job_id}_{task}" for task in range(3)]
    for task in tasks:
        wait_for(task, JobState.RUNNING)
    requeue(tasks[1])
    seen: list[JobState] = []

    def runs_again() -> bool:
        job = query_jobs([tasks[1]])[tasks[1]]
        assert not job.state.is_terminal, job
        seen.append(job.state)
        return JobState.REQUEUED in seen and job.state is JobState.RUNNING

    programs.wait_for(runs_again, 240, "the second start", 0.05)
    cancel([tasks[0], "999999"])
    wait_for(tasks[0], JobState.CANCELLED)
    cancel([tasks[0]])
    jobs = query_jobs(tasks)
    assert [jobs[task].restarts for task in tasks] == [0, 1, 0]
    assert jobs[tasks[2]].state is JobState.RUNNING


def test_scontrol_and_expand_hosts_agree(cluster):
    """scontrol 22.05 prints nothing for a name with text after its brackets."""
    for text, hosts in HOST_LISTS.items():
        shown = cluster.run(["scontrol", "show", "hostnames", text], check=True).stdout.split()
        assert expand_hosts(text) == (shown or hosts)


SPAN = st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 3))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(SPAN, min_size=1, max_size=3), min_size=1, max_size=4))
def test_they_agree_on_any_brackets(cluster, brackets):
    text = ""
    for letter, ranges in zip("abcd", brackets, strict=False):
        spans = [f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges]
        text += f"{letter}[{','.join(spans)}]"
    shown = cluster.run(["scontrol", "show", "hostnames", text], check=True).stdout.split()
    assert shown == expand_hosts(text)


def test_discover_cluster(cluster):
    found = discover_cluster()
    low, debug = found.partition(None), found.partition("debug")
    assert low is not None
    assert debug is not None
    assert [partition.name for partition in found.partitions] == ["low", "high", "debug"]
    assert (low.name, low.max_time_s, low.default_time_s, low.max_nodes) == ("low", 86400, 600, None)
    assert low.num_nodes == 4
    assert low.nodes == tuple(NodeKind(2, 8, 64000, {"h100": 4}, (rack,)) for rack in ("rack1", "rack2"))
    assert (debug.max_nodes, debug.max_time_s, debug.is_default) == (1, 300, False)
    assert found.name == cluster.name == show_config()["ClusterName"]
    assert found.accounts is not None
    assert Account("research", True, None, ("normal", "short"), ("root",)) in found.accounts
    assert Account("teaching", False, None, ("normal",), ("root",)) in found.accounts


def quickest(ask: Callable[[], dict[str, SlurmJob]], below_s: float) -> tuple[dict[str, SlurmJob], float]:
    """Return the answer, and the shortest duration of up to five queries, as other tests run meanwhile."""
    times_s: list[float] = []
    while True:
        begin = time.monotonic()
        answer = ask()
        times_s.append(time.monotonic() - begin)
        if times_s[-1] < below_s or len(times_s) == 5:
            return answer, min(times_s)


@pytest.fixture(scope="module")
def forgetful(clusters_possible):
    """Return a separate cluster, whose controller can be made to forget its jobs."""
    with running(num_hosts=1) as made:
        yield made


def test_forgotten_jobs(forgetful, tmp_path):
    """A controller forgets every job some minutes after its end."""
    good = send(tmp_path, "exit 0\n")
    bad = send(tmp_path, "exit 7\n", '--job-name="two words"')
    array = send(tmp_path, "exit $SLURM_ARRAY_TASK_ID\n", "--array=0-1")
    ids = (good, bad, f"{array}_0", f"{array}_1")
    for job_id in ids:
        wait_for(job_id, JobState.COMPLETED, JobState.FAILED)
    argv = ["sacct", "--allocations", "--noheader", "--format=State"]
    ended = lambda: re.findall("COMPLETED|FAILED", forgetful.run(argv, check=True).stdout)  # noqa: E731
    programs.wait_for(lambda: len(ended()) >= len(ids), 30, "accounting, which lags", 0.2)
    forgetful.stop_slurmctld()
    for file in (forgetful.folder / "slurmctld").glob("job_state*"):
        file.unlink()
    forgetful.start_slurmctld()
    jobs = query_jobs([good, bad, array, "987654"])
    states = (JobState.COMPLETED, JobState.FAILED, JobState.COMPLETED, JobState.FAILED, JobState.UNKNOWN)
    found = {job_id: job.state for job_id, job in jobs.items()}
    assert found == dict(zip((*ids, "987654"), states, strict=True))
    assert (jobs[bad].exit_code, jobs[bad].name, jobs[bad].nodes) == (7, "two words", forgetful.hosts[0])
    assert jobs[bad].start_time is not None
    forgetful.stop_accounting()
    jobs, took_s = quickest(lambda: query_jobs([good]), 2.0)
    assert took_s < 2.0
    assert (jobs[good].state, jobs[good].state.is_terminal) == (JobState.UNKNOWN, False)
    assert discover_cluster().accounts is None
    assert send(tmp_path, "true\n"), "jobs need no accounting"
    forgetful.start_accounting()
