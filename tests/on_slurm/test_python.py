"""Tests runs of functions, started from Python on the login node, and a multirun of Hydra."""

import sys

import pytest

from tests.on_slurm import survival
from tests.on_slurm.login import wait_for
from trainkit.run.rundir import RunDir

COUNTS = """
import os, socket, sys, time
from pathlib import Path
from trainkit.api import map_array, submit
from trainkit.errors import UsageError
from trainkit.function import Requeue

class Counts:
    def __init__(self):
        self.number = self.saved_at = 0

    def __call__(self, upto):
        Path("began").touch()
        while self.number < upto or not self.saved_at:
            time.sleep(0.01)
            self.number += 1
        return self.saved_at > 0, int(os.environ["RANK"]), os.environ["TRAINKIT_JOB_ATTEMPT"]

    def checkpoint(self, upto):
        self.saved_at = self.number
        return Requeue(self, self.saved_at + 5)

if __name__ == "__main__":
    job = {"device": "cpu", "partition": "low", "requeue": {"grace_s": 20}}
    try:
        submit(len, "a", now=True, **job)
    except UsageError as error:
        print(error)
    run = submit(Counts(), 10, nodes=2, gpus_per_node=1, name="counts", **job)
    print(run.results(240), flush=True)
    print(map_array(pow, [2] * 3, range(3), limit=2, **job).results(240), flush=True)
"""


@pytest.mark.slow(seconds=30)
def test_a_function_is_preempted_and_continues(login):
    script = login.start([sys.executable, login.script(COUNTS, "counts.py")])
    run = RunDir(login.folder / "runs" / "counts")
    wait_for(lambda: all(run.attempt(1).rank_log(rank).exists() for rank in (0, 1)), "two ranks")
    wait_for(lambda: (run.path / "work" / "began").exists(), "the call")
    survival.preempt(login.cluster)
    printed, errors = script.communicate(timeout=240)
    assert script.returncode == 0, errors
    refused, _, printed = printed.partition("\n")
    assert refused.startswith("now applies only ")
    assert printed == f"{[(True, 0, '2'), (True, 1, '2')]}\n{[1, 2, 4]}\n"
    assert survival.events_of(run, "requeue_decision")[0]["cause"] == "preempted"


IDS = """
import os
from trainkit.api import map_array, submit

def ids(number):
    import submitit
    job = submitit.JobEnvironment()
    print("in the log", flush=True)
    ranks = job.global_rank, job.local_rank, job.node, job.num_tasks, job.num_nodes
    return job.job_id, job.array_task_id, len(job.hostnames), ranks, job.paths.stdout.read_text()

if __name__ == "__main__":
    options = {"device": "cpu", "partition": "low", "gpus_per_node": 2}
    group = map_array(ids, [0, 0], limit=1, name="group", **options)
    per_node = submit(ids, 0, nodes=2, per="node", **options)
    for run in [*group, per_node]:
        print(run.status.job_id, *run.results(240), flush=True)
"""


@pytest.mark.slow(seconds=20)
def test_job_environment_on_slurm(login):
    done = login.run([sys.executable, login.script(IDS, "ids.py")])
    assert done.returncode == 0, done.stderr
    found = [line.partition(" ") for line in done.stdout.splitlines()]
    log = "in the log\\n"
    *trials, (job_id, _, per_node) = found
    assert len({one for one, *_ in trials}) == 2
    for index, (one, _, shown) in enumerate(trials):
        array, _, task = one.partition("_")
        assert task == str(index)
        assert shown == " ".join(
            f"('{array}_{task}', '{task}', 1, ({rank}, {rank}, 0, 2, 1), '{log}')" for rank in range(2)
        )
    assert per_node == " ".join(
        f"('{job_id}', None, 2, ({rank}, {rank % 2}, {rank // 2}, 4, 2), '{log}')" for rank in range(4)
    )
    script = (login.folder / "runs" / "group" / "submit.sbatch").read_text()
    assert "#SBATCH --array=0-1%1" in script
