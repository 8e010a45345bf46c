"""Tests that a script is submitted once, whatever happens to Slurm's controller meanwhile."""

import os
import signal
import threading
import time

import pytest

from tests.slurm.on_cluster import SLEEP, jobs_with_token, send, slurmctld_pid, write
from trainkit.slurm.client import SlurmRefused


def test_submitting_costs_little_more_than_sbatch(cluster, tmp_path):
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


@pytest.mark.parametrize("away_s", [3, 14])
def test_a_controller_that_hangs_gets_the_job_once(cluster, tmp_path, away_s):
    """sbatch gives up after 10 s, and the controller executes the request when it continues."""
    token = f"trainkit:hang{away_s}"
    os.kill(slurmctld_pid(cluster), signal.SIGSTOP)
    timer = threading.Timer(away_s, os.kill, (slurmctld_pid(cluster), signal.SIGCONT))
    timer.start()
    try:
        job_id = send(cluster, tmp_path, SLEEP, token=token)
    finally:
        timer.join()
    time.sleep(2)
    assert jobs_with_token(cluster, token) == [job_id]


def test_a_controller_that_dies_with_the_request_gets_it_again(cluster, tmp_path):
    """The request is lost with the controller and is not in the queue, so it is sent again."""
    token = "trainkit:dies"
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
        job_id = send(cluster, tmp_path, SLEEP, token=token, notify=said.append)
    finally:
        thread.join()
    assert jobs_with_token(cluster, token) == [job_id]
    assert said, "an answer was lost"


def test_submitting_while_the_controller_restarts(cluster, tmp_path):
    cluster.stop_slurmctld()
    threading.Timer(3, cluster.start_slurmctld).start()
    job_id = send(cluster, tmp_path, SLEEP, token="trainkit:restart")
    assert jobs_with_token(cluster, "trainkit:restart") == [job_id]


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
        send(cluster, tmp_path, SLEEP, extra_argv=[option], token="trainkit:no")
    assert sentence in caught.value.sentence.splitlines()
    assert hint in caught.value.hint
    assert jobs_with_token(cluster, "trainkit:no") == []
