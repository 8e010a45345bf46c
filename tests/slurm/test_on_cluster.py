"""trainkit.slurm against a real Slurm of several hosts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.cluster import Cluster, up
from tests.cluster.processes import Pid
from tests.slurm.test_hosts import HOST_LISTS
from trainkit.errors import UsageError
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.control import (
    Receiver,
    cancel,
    needs_srun_cpus_per_task,
    requeue,
    send_signal,
    show_config,
    version,
)
from trainkit.slurm.discover import Association, NodeType, cluster_facts, has_slurm
from trainkit.slurm.hosts import expand_hosts, expand_without_slurm
from trainkit.slurm.jobs import JobInfo, query_jobs
from trainkit.slurm.states import JobState
from trainkit.slurm.submit import find_marked, submit_script, would_start, write_batch_script

SLEEP = "sleep 600\n"
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


def write(folder: Path, body: str, mark: str, *directives: str) -> Path:
    """A batch script that carries its mark."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --comment={mark}",
        "#SBATCH --time=10",
        "#SBATCH --output=log",
        *directives,
    ]
    path = folder / f"{mark}.sbatch"
    path.write_text("\n".join(f"#SBATCH {x}" if x.startswith("--") else x for x in lines) + f"\n{body}")
    return path


def send(cluster: Cluster, folder: Path, body: str, *directives: str, mark: str = "", **more: object) -> str:
    """The id of a job that runs this."""
    mark = mark or f"trainkit:{time.monotonic_ns():x}"
    path = write(folder, body, mark, *directives)
    return submit_script(path, mark=mark, environ=cluster.environ, cwd=folder, **more)  # type: ignore[arg-type]


def wait_for(cluster: Cluster, job_id: str, *states: JobState, timeout_s: float = 60) -> JobInfo:
    """The job, when it has one of these states."""
    deadline = time.monotonic() + timeout_s
    while (job := query_jobs([job_id], environ=cluster.environ)[job_id]).state not in states:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def wait_for_text(path: Path, text: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} never said {text!r}"
        time.sleep(0.05)


def marked(cluster: Cluster, mark: str) -> list[str]:
    """Every job that was ever made with this mark."""
    argv = ["squeue", "--noheader", "--states=all", "--format=%i %r %k"]
    shown = cluster.run(argv, timeout_s=60, check=True).stdout.splitlines()
    # Slurm keeps a record of some jobs that it has refused.
    return [line.split()[0] for line in shown if mark in line.split() and "BadConstraints" not in line]


def slurmctld_pid(cluster: Cluster) -> int:
    return cluster.state.processes["slurmctld"].pid


def test_what_is_submitted_is_what_slurm_keeps(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a b;'$(touch injected)"
    folder.mkdir()
    job_id = send(cluster, folder, "touch ran # ü $(never)\n", mark="trainkit:keep")
    assert (
        write_batch_script(job_id, environ=cluster.environ) == (folder / "trainkit:keep.sbatch").read_bytes()
    )
    done = wait_for(cluster, job_id, JobState.COMPLETED, JobState.FAILED)
    assert (done.state, done.exit_code, done.restarts) == (JobState.COMPLETED, 0, 0)
    assert (folder / "ran").exists()
    assert find_marked("trainkit:keep", environ=cluster.environ) == job_id
    assert not list(tmp_path.rglob("injected"))


def test_submitting_costs_little_more_than_sbatch(cluster: Cluster, tmp_path: Path) -> None:
    path = write(tmp_path, "true\n", "trainkit:plain")
    plain, ours = [], []
    for _ in range(5):
        begin = time.monotonic()
        cluster.run(["sbatch", "--parsable", path], cwd=tmp_path, check=True)
        plain.append(time.monotonic() - begin)
        begin = time.monotonic()
        send(cluster, tmp_path, "true\n")
        ours.append(time.monotonic() - begin)
    assert min(ours) < min(plain) + 0.2


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_come_back_as_they_were_given(cluster: Cluster, tmp_path: Path, name: str) -> None:
    job_id = send(cluster, tmp_path, "true\n", extra_argv=[f"--job-name={name}", "--hold"])
    other = send(cluster, tmp_path, "true\n", extra_argv=["--hold"])
    jobs = query_jobs([job_id, other], environ=cluster.environ)
    assert (jobs[job_id].name, jobs[job_id].state) == (name, JobState.PENDING)
    assert jobs[job_id].sentence == "is held by its user: `scontrol release JOB` lets it go"
    assert list(jobs) == [job_id, other]
    assert not list(tmp_path.rglob("injected"))


@pytest.mark.parametrize("away_s", [3, 14])
def test_a_controller_that_hangs_gets_the_job_once(cluster: Cluster, tmp_path: Path, away_s: float) -> None:
    """sbatch gives up after 10 s; its request is carried out when the controller goes on."""
    mark = f"trainkit:hang{away_s}"
    os.kill(slurmctld_pid(cluster), signal.SIGSTOP)
    timer = threading.Timer(away_s, os.kill, (slurmctld_pid(cluster), signal.SIGCONT))
    timer.start()
    try:
        job_id = send(cluster, tmp_path, SLEEP, mark=mark)
    finally:
        timer.join()
    time.sleep(2)
    assert marked(cluster, mark) == [job_id]


def test_a_controller_that_dies_with_the_request_gets_it_again(cluster: Cluster, tmp_path: Path) -> None:
    """The request is lost with the controller: nothing is in the queue afterwards, so it is sent again."""
    mark = "trainkit:dies"
    os.kill(slurmctld_pid(cluster), signal.SIGSTOP)

    def replace() -> None:
        time.sleep(2)
        cluster.stop_slurmctld(force=True)
        time.sleep(1)
        cluster.start_slurmctld()

    thread = threading.Thread(target=replace)
    thread.start()
    said: list[str] = []
    try:
        job_id = send(cluster, tmp_path, SLEEP, mark=mark, notify=said.append)
    finally:
        thread.join()
    assert marked(cluster, mark) == [job_id]
    assert said, "an answer was lost"


def test_submitting_while_the_controller_restarts(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stop_slurmctld()
    threading.Timer(3, cluster.start_slurmctld).start()
    job_id = send(cluster, tmp_path, SLEEP, mark="trainkit:restart")
    assert marked(cluster, "trainkit:restart") == [job_id]


def test_a_controller_that_is_away(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stop_slurmctld()
    with pytest.raises(SlurmUnreachable, match=r"connect failure") as caught:
        send(cluster, tmp_path, SLEEP, mark="trainkit:away", patience_s=1)
    assert (caught.value.exit_code, caught.value.may_have_arrived) == (3, False)
    begin = time.monotonic()
    with pytest.raises(SlurmUnreachable, match=r"squeue cannot reach Slurm: Unable to contact"):
        query_jobs(["1", "2"], environ=cluster.environ)
    assert time.monotonic() - begin < 20, "squeue has waited for it already"
    assert has_slurm(cluster.environ)
    assert version(cluster.environ) >= (22, 5, 0)
    cluster.start_slurmctld()
    assert marked(cluster, "trainkit:away") == []


@pytest.mark.parametrize(
    ("option", "sentence", "hint"),
    [
        ("--partition=nope", "Invalid partition name specified", "sinfo -s"),
        ("--account=nope", "Invalid account or account/partition combination specified", "--account"),
        ("--qos=nope", "Invalid qos specification", "--qos"),
        ("--gres=gpu:9", "Requested node configuration is not available", "GPUs"),
        ("--constraint=nope", "Invalid feature specification", "%f"),
        ("--reservation=nope", "Requested reservation is invalid", "scontrol show reservation"),
        ("--array=0-20000", "Invalid job array specification", "MaxArraySize"),
        ("--nope", "unrecognized option '--nope'", "sbatch --help"),
        ("--nodelist=nope", "Invalid node name specified", "sinfo -N"),
    ],
)
def test_refusals(cluster: Cluster, tmp_path: Path, option: str, sentence: str, hint: str) -> None:
    with pytest.raises(SlurmRefused) as caught:
        send(cluster, tmp_path, SLEEP, extra_argv=[option], mark="trainkit:no")
    assert sentence in caught.value.sentence.splitlines()
    assert hint in caught.value.hint
    assert marked(cluster, "trainkit:no") == []


def test_would_start(cluster: Cluster, tmp_path: Path) -> None:
    path = write(tmp_path, SLEEP, "trainkit:test", "--nodes=3")
    answer = would_start(path, environ=cluster.environ, cwd=tmp_path)
    assert (answer.nodes, answer.partition) == (cluster.hosts[:3], "low")
    assert answer.start_time is not None
    assert abs(answer.start_time.timestamp() - time.time()) < 120
    assert marked(cluster, "trainkit:test") == []
    with pytest.raises(SlurmRefused, match="Requested node configuration is not available"):
        would_start(path, environ=cluster.environ, cwd=tmp_path, extra_argv=["--partition=debug"])


@pytest.mark.parametrize(
    ("body", "state", "code", "number"),
    [
        ("exit 0\n", JobState.COMPLETED, 0, None),
        ("exit 75\n", JobState.FAILED, 75, None),
        ("kill -9 $$\n", JobState.FAILED, 0, 9),
    ],
)
def test_ends(
    cluster: Cluster, tmp_path: Path, body: str, state: JobState, code: int, number: int | None
) -> None:
    job = wait_for(cluster, send(cluster, tmp_path, body), JobState.COMPLETED, JobState.FAILED)
    assert (job.state, job.exit_code, job.exit_signal, job.is_terminal) == (state, code, number, True)


def test_a_running_job(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP, "--nodes=2", "--gpus-per-node=4")
    waiting_id = send(cluster, tmp_path, SLEEP, "--nodes=4", "--gpus-per-node=4")
    job = wait_for(cluster, job_id, JobState.RUNNING)
    assert (job.num_nodes, expand_hosts(job.nodes, cluster.environ)) == (2, cluster.hosts[:2])
    assert job.start_time is not None
    assert job.end_time is not None
    assert (job.end_time - job.start_time).total_seconds() == 600
    assert abs(job.start_time.timestamp() - time.time()) < 60
    assert job.time_left_s is not None
    assert 500 < job.time_left_s <= 600
    deadline = time.monotonic() + 30
    while (waiting := wait_for(cluster, waiting_id, JobState.PENDING)).reason != "Resources":
        assert time.monotonic() < deadline, waiting
    assert (waiting.nodes, waiting.sentence) == ("", "waits for nodes to become free; it is next in line")


def test_requeued_is_not_the_end(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP)
    wait_for(cluster, job_id, JobState.RUNNING)
    requeue(job_id, environ=cluster.environ)
    seen = lifetime(cluster, job_id)
    assert seen[-2:] == [JobState.REQUEUED, JobState.RUNNING]
    assert query_jobs([job_id], environ=cluster.environ)[job_id].restarts == 1


def test_preempted_is_not_the_end(cluster: Cluster, tmp_path: Path) -> None:
    low = send(cluster, tmp_path, SLEEP, "--partition=low", "--nodes=4", "--exclusive")
    wait_for(cluster, low, JobState.RUNNING)
    high = send(cluster, tmp_path, "sleep 1\n", "--partition=high", "--nodes=4", "--exclusive")
    seen = lifetime(cluster, low, timeout_s=120)
    assert seen[-2:] == [JobState.REQUEUED, JobState.RUNNING]
    wait_for(cluster, high, JobState.COMPLETED)


def lifetime(cluster: Cluster, job_id: str, timeout_s: float = 60) -> list[JobState]:
    """The states of a running job until it runs for the second time, none of which is an end."""
    seen: list[JobState] = []
    deadline = time.monotonic() + timeout_s
    while not (JobState.REQUEUED in seen and seen[-1] is JobState.RUNNING):
        job = query_jobs([job_id], environ=cluster.environ)[job_id]
        assert not job.is_terminal, job
        if job.state not in seen[-1:]:
            seen.append(job.state)
        assert time.monotonic() < deadline, (seen, job)
        time.sleep(0.05)
    return seen


def test_one_task_of_an_array_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP, "--array=0-2")
    tasks = [f"{job_id}_{task}" for task in range(3)]
    for task in tasks:
        wait_for(cluster, task, JobState.RUNNING)
    requeue(tasks[1], environ=cluster.environ)
    wait_for(cluster, tasks[1], JobState.REQUEUED)
    jobs = query_jobs(tasks, environ=cluster.environ)
    assert [jobs[task].restarts for task in tasks] == [0, 1, 0]
    cancel([tasks[0]], environ=cluster.environ)
    wait_for(cluster, tasks[0], JobState.CANCELLED)
    assert query_jobs([tasks[2]], environ=cluster.environ)[tasks[2]].state is JobState.RUNNING


def test_requeue_that_slurm_refuses(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP, "--no-requeue")
    wait_for(cluster, job_id, JobState.RUNNING)
    with pytest.raises(SlurmRefused) as caught:
        requeue(job_id, environ=cluster.environ)
    assert "--no-requeue" in caught.value.hint
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        requeue("999999", environ=cluster.environ)


def test_requeue_waits_for_the_controller(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP)
    wait_for(cluster, job_id, JobState.RUNNING)
    cluster.stop_slurmctld()
    threading.Timer(12, cluster.start_slurmctld).start()
    requeue(job_id, environ=cluster.environ)
    assert wait_for(cluster, job_id, JobState.REQUEUED, JobState.RUNNING).restarts == 1


def test_cancel_what_there_is(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP)
    cancel([job_id, "999999"], environ=cluster.environ)
    wait_for(cluster, job_id, JobState.CANCELLED)
    cancel([job_id], environ=cluster.environ)


def test_signals_reach_whom_they_are_for(cluster: Cluster, tmp_path: Path) -> None:
    step = "trap 'echo step $SLURM_PROCID' USR2; echo ready; while :; do sleep 0.1; done"
    (tmp_path / "step.sh").write_text(f"{step}\n")
    body = "trap 'echo batch' USR2\nsrun -n2 bash step.sh &\nwhile :; do wait; done\n"
    job_id = send(cluster, tmp_path, body, "--ntasks=2")
    log = tmp_path / "log"
    wait_for_text(log, "ready\nready")
    send_signal([job_id], "USR2", environ=cluster.environ)
    wait_for_text(log, "step 0")
    wait_for_text(log, "step 1")
    assert "batch" not in log.read_text()
    send_signal([job_id], "USR2", Receiver.BATCH, environ=cluster.environ)
    wait_for_text(log, "batch")
    assert log.read_text().count("step 0") == 1
    send_signal([job_id], "USR2", Receiver.ALL, environ=cluster.environ)
    wait_for_text(log, "batch\nbatch" if "batch\nbatch" in log.read_text() else "step 0")


@pytest.mark.parametrize("text", HOST_LISTS)
def test_scontrol_and_clustershell_agree(cluster: Cluster, text: str) -> None:
    assert expand_hosts(text, cluster.environ) == expand_without_slurm(text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_they_agree_on_any_brackets(cluster: Cluster, brackets: list[list[tuple[int, int, int]]]) -> None:
    text = ""
    for letter, ranges in zip("abcd", brackets, strict=False):
        spans = [f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges]
        text += f"{letter}[{','.join(spans)}]"
    assert expand_hosts(text, cluster.environ) == expand_without_slurm(text)


def test_ten_thousand_tasks(cluster: Cluster, tmp_path: Path) -> None:
    """Two calls of Slurm at most, below 2 s, told apart by task."""
    job_id = send(cluster, tmp_path, SLEEP, "--array=0-9999")
    wait_for(cluster, f"{job_id}_0", JobState.RUNNING)
    ids = [f"{job_id}_{task}" for task in range(10_000)]
    begin = time.monotonic()
    jobs = query_jobs(ids, environ=cluster.environ)
    assert time.monotonic() - begin < 1.0
    assert list(jobs) == ids
    assert {job.state for job in jobs.values()} == {JobState.RUNNING, JobState.PENDING}
    begin = time.monotonic()
    assert list(query_jobs([job_id], environ=cluster.environ)) == ids
    assert time.monotonic() - begin < 2.0


def test_all_of_mine(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP, mark="trainkit:mine")
    assert query_jobs(environ=cluster.environ)[job_id].name == "trainkit:mine.sbatch"
    assert job_id in query_jobs(user="root", environ=cluster.environ)
    assert job_id not in query_jobs(user="daemon", environ=cluster.environ)


def test_facts(cluster: Cluster) -> None:
    facts = cluster_facts(cluster.environ)
    low = facts.partition(None)
    assert low is not None
    assert [partition.name for partition in facts.partitions] == ["low", "high", "debug"]
    assert (low.name, low.max_time_s, low.default_time_s, low.max_nodes) == ("low", 86400, 600, None)
    assert (low.preempt_mode, low.grace_s, low.max_gpus_per_node, low.num_nodes) == ("REQUEUE", 10, 4, 4)
    racks = [NodeType(2, 2, 8, 64000, {"h100": 4}, (rack,), "") for rack in ("rack1", "rack2")]
    assert [NodeType(**{**vars(kind), "hosts": ""}) for kind in low.node_types] == racks
    debug = facts.partition("debug")
    assert debug is not None
    assert (debug.max_nodes, debug.max_time_s, debug.is_default) == (1, 300, False)
    assert (facts.name, facts.max_array_size) == (cluster.name, 10001)
    assert facts.version == version(cluster.environ)
    assert show_config(cluster.environ)["ClusterName"] == cluster.name
    assert needs_srun_cpus_per_task((22, 5, 8))
    assert facts.associations is not None
    assert Association("research", True, "", ("normal", "short"), "") in facts.associations
    assert Association("teaching", False, "", ("normal",), "") in facts.associations


def test_no_cluster_here(cluster: Cluster) -> None:
    """Slurm's programs are there, and no configuration."""
    environ = {name: value for name, value in cluster.environ.items() if name != "SLURM_CONF"}
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")
    assert not has_slurm(environ)
    with pytest.raises(SlurmUnreachable) as caught:
        version(environ)
    assert "SLURM_CONF" in caught.value.hint


@pytest.fixture(scope="module")
def forgetful(clusters_possible: None) -> Iterator[Cluster]:
    """A cluster of its own, whose controller can be made to forget."""
    made = up(owner=Pid.of(os.getpid()), num_hosts=1)
    yield made
    made.down()


def forget(cluster: Cluster) -> None:
    """The controller forgets every job, as it does some minutes after their end."""
    cluster.stop_slurmctld()
    for file in (cluster.folder / "slurmctld").glob("job_state*"):
        file.unlink()
    cluster.start_slurmctld()


def wait_for_accounting(cluster: Cluster, num_ended: int) -> None:
    """Until that many jobs have their end in accounting, which lags."""
    deadline = time.monotonic() + 30
    argv = ["sacct", "--allocations", "--noheader", "--format=State"]
    while (
        sum(cluster.run(argv, check=True).stdout.count(word) for word in ("COMPLETED", "FAILED")) < num_ended
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_forgotten_jobs(forgetful: Cluster, tmp_path: Path) -> None:
    """squeue has forgotten them: accounting tells how they ended, and without it nobody knows."""
    good = send(forgetful, tmp_path, "exit 0\n")
    bad = send(forgetful, tmp_path, "exit 7\n", '--job-name="two words"')
    array = send(forgetful, tmp_path, "exit $SLURM_ARRAY_TASK_ID\n", "--array=0-1")
    for job_id in (good, bad, f"{array}_0", f"{array}_1"):
        wait_for(forgetful, job_id, JobState.COMPLETED, JobState.FAILED)
    wait_for_accounting(forgetful, 4)
    forget(forgetful)
    jobs = query_jobs([good, bad, array, "987654"], environ=forgetful.environ)
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
    begin = time.monotonic()
    unknown = query_jobs([good], environ=forgetful.environ)[good]
    assert time.monotonic() - begin < 2
    assert (unknown.state, unknown.is_terminal) == (JobState.UNKNOWN, False)
    assert "accounting does not answer" in unknown.sentence
    assert send(forgetful, tmp_path, "true\n"), "jobs need no accounting"
    assert cluster_facts(forgetful.environ).associations is None
    forgetful.start_accounting()


def test_a_cluster_that_never_had_accounting(clusters_possible: None, tmp_path: Path) -> None:
    made = up(owner=Pid.of(os.getpid()), num_hosts=1, accounting=False)
    try:
        job_id = send(made, tmp_path, "exit 3\n")
        assert wait_for(made, job_id, JobState.FAILED).exit_code == 3
        assert cluster_facts(made.environ).associations is None
        forget(made)
        unknown = query_jobs([job_id], environ=made.environ)[job_id]
        assert unknown.state is JobState.UNKNOWN
        assert "accounting storage is disabled" in unknown.sentence
    finally:
        made.down()


def test_what_is_no_id_never_reaches_slurm(cluster: Cluster, tmp_path: Path) -> None:
    job_id = send(cluster, tmp_path, SLEEP)
    with pytest.raises(UsageError):
        cancel(["--user=root"], environ=cluster.environ)
    assert query_jobs([job_id], environ=cluster.environ)[job_id].state is not JobState.CANCELLED
