"""What `submit --follow` and `run` say of a run that has no recorded end."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.following import print_end
from trainkit.errors import EXIT_FAILED
from trainkit.run.record import add_slurm_attempt, claim_entry, create_job
from trainkit.run.rundir import RunDir


def test_a_job_that_ended_before_or_after_its_supervisor_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.attempt(1).create()
    create_job(run, backend="sbatch", name="x", cwd=str(tmp_path), code=None)
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    assert print_end(run) == EXIT_FAILED
    shown = f"`trainkit status {tmp_path}` shows what Slurm reports"
    assert capsys.readouterr().err == f"died: the job ended before the supervisor began; {shown}\n"
    claim_entry(run, 1, 1)
    run.attempt(1).supervisor_log.write_text("slurmstepd: error\n")
    assert print_end(run) == EXIT_FAILED
    log = run.attempt(1).supervisor_log
    assert capsys.readouterr().err == (
        f"died: the supervisor exited without recording an end; {log} ends with: slurmstepd: error\n"
    )
