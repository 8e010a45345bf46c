"""Tests that ranks killed by Slurm's signal before their agents get it are no crash and no node fault."""

import os
import random
import signal

from tests.on_slurm.preemptions import draw_shapes, hurry, notes_about_nodes
from tests.on_slurm.survival import preempt
from tests.support.programs import ranks_of

SEED = 5


def test_preemptions_are_neither_crashes_nor_faults_of_nodes(login):
    """After the preemption, a second crash would exceed `requeue.max_crashes`, a first one does not."""
    runs = [(shape, shape.submit(login)) for shape in draw_shapes(random.Random(SEED))]
    for shape, run in runs:
        shape.wait_for_ranks(login, run, 1)
        hurry(run)
    preempt(login.cluster)
    for shape, run in runs:
        end = login.wait_for_end(run)
        found = (end["action"], end["cause"], end["verdict"])
        assert found == ("requeue", "preempted", None), f"{shape}: {end}"
    (shape, by_itself), (other, by_person) = runs[:2]
    shape.wait_for_ranks(login, by_itself, 2)
    os.kill(ranks_of(by_itself)[0], signal.SIGTERM)
    end = login.wait_for_end(by_itself, 2)
    assert (end["action"], end["cause"]) == ("restart", "crash"), "the preemption says nothing of it"
    assert (end["verdict"]["rank"], end["verdict"]["message"]) == (0, "killed by SIGTERM")
    other.wait_for_ranks(login, by_person, 2)
    hurry(by_person)
    login.run(["scancel", login.job_id(by_person)], check=True)
    end = login.wait_for_end(by_person, 2)
    assert (end["state"], end["action"], end["verdict"]) == ("stopped", "stopped", None)
    assert notes_about_nodes(login) == []
