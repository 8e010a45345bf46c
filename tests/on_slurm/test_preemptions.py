"""Tests that ranks killed by Slurm's signal before their agents get it are no crash and no node fault."""

import os
import random
import signal

from tests.on_slurm.login import settings
from tests.on_slurm.preemptions import Shape, draw_shapes, hurry, notes_about_nodes
from tests.on_slurm.survival import preempt
from tests.support.programs import ranks_of

SEED = 5


def test_preemptions_are_neither_crashes_nor_faults_of_nodes(login):
    """The job is preempted once more than `requeue.max_crashes` allows crashes."""
    runs = [(shape, shape.submit(login)) for shape in draw_shapes(random.Random(SEED))]
    for attempt in (1, 2):
        for shape, run in runs:
            shape.wait_for_ranks(login, run, attempt)
            hurry(run)
        preempt(login.cluster)
        for shape, run in runs:
            end = login.wait_for_end(run, attempt)
            found = (end["action"], end["cause"], end["verdict"])
            assert found == ("requeue", "preempted", None), f"{shape}: {end}"
    shape, run = runs[0]
    shape.wait_for_ranks(login, run, 3)
    os.kill(ranks_of(run)[0], signal.SIGTERM)
    end = login.wait_for_end(run, 3)
    assert (end["action"], end["cause"]) == ("restart", "crash"), "the earlier preemptions say nothing of it"
    assert notes_about_nodes(login) == []


def test_what_else_ends_a_job_is_no_crash_and_a_kill_from_within_is_one(login):
    shape = Shape(2, 1, "gpu", "sbatch")
    by_person, by_itself = shape.submit(login), shape.submit(login, *settings("requeue.max_crashes=0"))
    for run in (by_person, by_itself):
        shape.wait_for_ranks(login, run, 1)
        hurry(run)
    login.run(["scancel", login.job_id(by_person)], check=True)
    end = login.wait_for_end(by_person)
    assert (end["state"], end["action"], end["verdict"]) == ("stopped", "stopped", None)
    os.kill(ranks_of(by_itself)[1], signal.SIGTERM)
    end = login.wait_for_end(by_itself)
    assert (end["state"], end["cause"]) == ("failed", "crash")
    assert (end["verdict"]["rank"], end["verdict"]["message"]) == (1, "killed by SIGTERM")
    assert notes_about_nodes(login) == []
