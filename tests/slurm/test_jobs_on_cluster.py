"""Tests the states of jobs in a real Slurm: with accounting, without, and after Slurm forgot them."""

import re
import time
from collections.abc import Callable

import pytest

from tests.slurm.on_cluster import SLEEP, send, wait_for
from tests.support import programs
from tools.slurm_cluster.cluster import Cluster, running
from trainkit.cluster.discovery import discover_cluster
from trainkit.scheduler import JobState, expand_hosts
from trainkit.slurm.control import requeue
from trainkit.slurm.jobs import SlurmJob, query_jobs

HOSTILE_NAMES = [
    "a b",
    "'single' and \"double\"",
    "$(touch injected) `touch injected` ; touch injected & | >injected",
    "two\nlines",
    "back\\slash",
    "Größe 模型 🚀",
    "%j %x",
    "--hold",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_come_back_as_they_were_given(cluster, tmp_path, name):
    job_id = send(cluster, tmp_path, "true\n", extra_argv=[f"--job-name={name}", "--hold"])
    other = send(cluster, tmp_path, "true\n", extra_argv=["--hold"])
    jobs = query_jobs([job_id, other])
    assert (jobs[job_id].name, jobs[job_id].state) == (name, JobState.PENDING)
    assert "`scontrol release JOB`" in jobs[job_id].sentence
    assert list(jobs) == [job_id, other]
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
    job = wait_for(cluster, send(cluster, tmp_path, body), JobState.COMPLETED, JobState.FAILED)
    assert (job.state, job.exit_code, job.exit_signal, job.state.is_terminal) == (state, code, number, True)


def test_a_running_job(cluster, tmp_path):
    job_id = send(cluster, tmp_path, SLEEP, "--nodes=2", "--gpus-per-node=4")
    waiting_id = send(cluster, tmp_path, SLEEP, "--nodes=4", "--gpus-per-node=4")
    job = wait_for(cluster, job_id, JobState.RUNNING)
    assert (job.num_nodes, expand_hosts(job.nodes)) == (2, cluster.hosts[:2])
    assert (job.end_time - job.start_time).total_seconds() == 600
    assert abs(job.start_time.timestamp() - time.time()) < 60
    pending = lambda: wait_for(cluster, waiting_id, JobState.PENDING)  # noqa: E731
    programs.wait_for(lambda: pending().reason == "Resources", 30)
    assert (pending().nodes, "next in line" in pending().sentence) == ("", True)


def test_requeued_is_not_the_end(cluster, tmp_path):
    job_id = send(cluster, tmp_path, SLEEP)
    wait_for(cluster, job_id, JobState.RUNNING)
    requeue(job_id)
    seen = lifetime(cluster, job_id)
    assert seen[-2:] == [JobState.REQUEUED, JobState.RUNNING]
    assert query_jobs([job_id])[job_id].restarts == 1


def lifetime(cluster: Cluster, job_id: str, timeout_s: float = 240) -> list[JobState]:
    """Return the states of a job until it runs for the second time. Fail if one of them is an end."""
    seen: list[JobState] = []
    deadline = time.monotonic() + timeout_s
    while not (JobState.REQUEUED in seen and seen[-1] is JobState.RUNNING):
        job = query_jobs([job_id])[job_id]
        assert not job.state.is_terminal, job
        if job.state not in seen[-1:]:
            seen.append(job.state)
        assert time.monotonic() < deadline, (seen, job)
        time.sleep(0.05)
    return seen


def quickest(ask: Callable[[], dict[str, SlurmJob]], below_s: float) -> tuple[dict[str, SlurmJob], float]:
    """Return the answer, and the shortest duration of up to five queries.

    Other tests run at the same time.
    """
    times_s = []
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


def forget(cluster: Cluster) -> None:
    """Let the controller forget every job, as it does some minutes after a job's end."""
    cluster.stop_slurmctld()
    for file in (cluster.folder / "slurmctld").glob("job_state*"):
        file.unlink()
    cluster.start_slurmctld()


def wait_for_accounting(cluster: Cluster, num_ended: int) -> None:
    """Wait until accounting has the ends of this number of jobs, because accounting lags."""
    argv = ["sacct", "--allocations", "--noheader", "--format=State"]
    count = lambda: len(re.findall("COMPLETED|FAILED", cluster.run(argv, check=True).stdout))  # noqa: E731
    programs.wait_for(lambda: count() >= num_ended, 30, "accounting", 0.2)


def test_forgotten_jobs(forgetful, tmp_path):
    good = send(forgetful, tmp_path, "exit 0\n")
    bad = send(forgetful, tmp_path, "exit 7\n", '--job-name="two words"')
    array = send(forgetful, tmp_path, "exit $SLURM_ARRAY_TASK_ID\n", "--array=0-1")
    for job_id in (good, bad, f"{array}_0", f"{array}_1"):
        wait_for(forgetful, job_id, JobState.COMPLETED, JobState.FAILED)
    wait_for_accounting(forgetful, 4)
    forget(forgetful)
    jobs = query_jobs([good, bad, array, "987654"])
    assert {job_id: job.state for job_id, job in jobs.items()} == {
        good: JobState.COMPLETED,
        bad: JobState.FAILED,
        f"{array}_0": JobState.COMPLETED,
        f"{array}_1": JobState.FAILED,
        "987654": JobState.UNKNOWN,
    }
    assert (jobs[bad].exit_code, jobs[bad].name, jobs[bad].nodes) == (7, "two words", forgetful.hosts[0])
    assert jobs[bad].start_time is not None
    forgetful.stop_accounting()
    jobs, took_s = quickest(lambda: query_jobs([good]), 2.0)
    assert took_s < 2.0
    unknown = jobs[good]
    assert (unknown.state, unknown.state.is_terminal) == (JobState.UNKNOWN, False)
    assert "accounting does not" in unknown.sentence
    assert send(forgetful, tmp_path, "true\n"), "jobs need no accounting"
    found = discover_cluster()
    assert found.accounts is None
    forgetful.start_accounting()
