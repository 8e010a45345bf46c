"""Tests requeue, cancel and signals on a real cluster, and the description of the cluster."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slurm.on_cluster import SLEEP, send, wait_for, wait_for_text
from tests.slurm.test_hosts import HOST_LISTS
from trainkit.cluster.discovery import discover_cluster, has_slurm
from trainkit.cluster.model import Account, NodeKind
from trainkit.scheduler import JobState, expand_hosts
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable, run_slurm
from trainkit.slurm.control import cancel, requeue, send_signal, show_config
from trainkit.slurm.jobs import query_jobs


def test_one_task_of_an_array_is_requeued(cluster, tmp_path):
    job_id = send(cluster, tmp_path, SLEEP, "--array=0-2")
    tasks = [f"{job_id}_{task}" for task in range(3)]
    for task in tasks:
        wait_for(cluster, task, JobState.RUNNING)
    requeue(tasks[1])
    wait_for(cluster, tasks[1], JobState.REQUEUED)
    jobs = query_jobs(tasks)
    assert [jobs[task].restarts for task in tasks] == [0, 1, 0]
    cancel([tasks[0]])
    wait_for(cluster, tasks[0], JobState.CANCELLED)
    assert query_jobs([tasks[2]])[tasks[2]].state is JobState.RUNNING


def test_requeue_that_slurm_refuses(cluster, tmp_path):
    job_id = send(cluster, tmp_path, SLEEP, "--no-requeue")
    wait_for(cluster, job_id, JobState.RUNNING)
    with pytest.raises(SlurmRefused) as caught:
        requeue(job_id)
    assert "--no-requeue" in caught.value.hint
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        requeue("999999")


def test_cancel_what_there_is(cluster, tmp_path):
    job_id = send(cluster, tmp_path, SLEEP)
    cancel([job_id, "999999"])
    wait_for(cluster, job_id, JobState.CANCELLED)
    cancel([job_id])


def test_signals_reach_the_steps_alone(cluster, tmp_path):
    step = "trap 'echo step $SLURM_PROCID' USR2; echo ready; while :; do sleep 0.1; done"
    (tmp_path / "step.sh").write_text(f"{step}\n")
    body = "trap 'echo batch' USR2\nsrun -n2 bash step.sh &\nwhile :; do wait; done\n"
    job_id = send(cluster, tmp_path, body, "--ntasks=2")
    log = tmp_path / "log"
    wait_for_text(log, "ready\nready")
    send_signal([job_id], "USR2")
    wait_for_text(log, "step 0")
    wait_for_text(log, "step 1")
    assert "batch" not in log.read_text()


@pytest.mark.parametrize("text", HOST_LISTS)
def test_scontrol_and_expand_hosts_agree(cluster, text):
    """scontrol 22.05 prints nothing for a name with text after its brackets."""
    shown = cluster.run(["scontrol", "show", "hostnames", text], check=True).stdout.split()
    assert expand_hosts(text) == (shown or HOST_LISTS[text])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_they_agree_on_any_brackets(cluster, brackets):
    text = ""
    for letter, ranges in zip("abcd", brackets, strict=False):
        spans = [f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges]
        text += f"{letter}[{','.join(spans)}]"
    assert cluster.run(["scontrol", "show", "hostnames", text], check=True).stdout.split() == expand_hosts(
        text
    )


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
    assert found.name == cluster.name
    assert show_config()["ClusterName"] == cluster.name
    assert found.accounts is not None
    assert Account("research", True, None, ("normal", "short"), ("root",)) in found.accounts
    assert Account("teaching", False, None, ("normal",), ("root",)) in found.accounts


def test_no_cluster_here(cluster, monkeypatch):
    """Slurm's programs are installed, but have no configuration."""
    monkeypatch.delenv("SLURM_CONF")
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")
    assert not has_slurm()
    with pytest.raises(SlurmUnreachable) as caught:
        run_slurm(["sbatch", "--version"], 12.0)
    assert "SLURM_CONF" in caught.value.hint
