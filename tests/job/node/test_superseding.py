import pytest

from trainkit.job.node.agent import superseding_attempt
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    for number in (1, 2, 3):
        run.attempt(number).create()
    return run


def meet(run, number):
    write_json(run.attempt(number).rendezvous_file, {"port": 1})


def test_the_newest_goes_on(run):
    meet(run, 1)
    meet(run, 2)
    meet(run, 3)
    assert superseding_attempt(run.attempt(3)) is None


def test_an_attempt_that_waits_in_a_queue_takes_no_place(run):
    meet(run, 1)
    assert superseding_attempt(run.attempt(1)) is None


@pytest.mark.parametrize("number", [2, 3])
def test_ranks_that_have_met_elsewhere(run, number):
    meet(run, 1)
    meet(run, number)
    assert superseding_attempt(run.attempt(1)) == number
