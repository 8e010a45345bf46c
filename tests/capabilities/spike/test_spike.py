"""Tests that a run with bad samples goes back and leaves them out, and continues the same in every way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support import spiky
from tests.support.programs import run_program
from tests.support.runs import (
    events,
    fork_workers,
    log_text,
    losses,
    make_attempt,
    samples_seen,
    train,
    wait_until,
)
from trainkit.run.manifest import published
from trainkit.run.rollbacks import read_rollbacks
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.xdist_group("spike")]

RULE = "{factor: 3.0, window_steps: 4, patience_steps: 3, max_rollbacks: 2}"
OPTIONS = [
    f"task={Path(spiky.__file__)}:Spiky",
    "task_args.bad=[96, 208]",  # in the steps 7 to 13
    "data.shuffle=false",
    "data.num_workers=0",
    "optimizer.lr=0.001",
    "train.steps=16",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=null",
    f"train.spike={RULE}",
]


def finish(run: Path, options: list[str], num_procs: int = 1) -> int:
    """Run attempts until the run has finished; return their number."""
    for number in range(1, 6):
        attempt = make_attempt(run, options, num_procs)
        codes = [worker.wait(timeout=180) for worker in fork_workers(attempt, num_procs)]
        assert codes in ([0] * num_procs, [75] * num_procs), log_text(attempt)
        if codes == [0] * num_procs:
            return number
    raise AssertionError("the run did not finish")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(run, OPTIONS, 2)
    return run


def test_a_run_goes_back_until_the_bad_samples_are_behind_it(whole):
    """The spike begins at step 7, and each rollback leaves out the samples of the steps since step 4."""
    found = [(item.step, item.from_step, item.skipped) for item in read_rollbacks(RunDir(whole))]
    assert found == [(4, 9, ((64, 144),)), (4, 7, ((64, 192),))]
    assert [event["step"] for event in events(whole, "rollback")] == [4, 4]
    assert samples_seen(whole) == list(range(16, 257, 16))
    assert events(whole, "training")[-1]["skipped"] == [[64, 192]]
