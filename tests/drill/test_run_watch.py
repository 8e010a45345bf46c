"""A drill's run as it is looked at from outside."""

from __future__ import annotations

import pytest

from tests.support.runs import make_attempt
from trainkit.drill.run_watch import RunWatch
from trainkit.run.record import add_slurm_attempt
from trainkit.run.rundir import RunDir
from trainkit.slurm.client import SlurmUnreachable


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = make_attempt(tmp_path / "run").run
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    return run


def test_a_run_of_which_slurm_says_nothing_is_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller can be away for as long as nothing is heard of the run."""
    looks: list[None] = []

    def away(entry: object) -> None:
        raise SlurmUnreachable("Slurm does not answer")

    def over(watch: RunWatch) -> bool:
        looks.append(None)
        return len(looks) > 3

    monkeypatch.setattr("trainkit.backends.slurm.query_jobs", away)
    monkeypatch.setattr(RunWatch, "over", over)
    lines: list[str] = []
    watch = RunWatch(run, poll_s=0.01, patience_s=0.0, log_line=lines.append)
    assert not watch.until(lambda: False)
    assert not watch.is_stuck
    assert lines[0] == "unknown whether run is in the queue: Slurm does not answer"
