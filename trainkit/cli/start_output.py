"""The output of commands that create and start a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from trainkit.run.record import AttemptRecord
from trainkit.run.rundir import RunDir


def print_copied(code: dict[str, Any] | None) -> None:
    """Print to stderr which code was copied into the run folder, if any."""
    if code is None:
        return
    files = "1 file" if code["num_files"] == 1 else f"{code['num_files']:,} files"
    click.echo(f"  code                {files} of {code['source']} copied", err=True)
    for note in code["notes"]:
        click.echo(f"  note: {note}", err=True)


def print_started(
    run: RunDir,
    name: str,
    entry: AttemptRecord,
    backend: str,
    as_json: bool,
    warnings: Sequence[str] | None = None,
) -> None:
    """Print the run folder and the job id; `entry` is the attempt's entry in job.json.

    JSON includes the `warnings` of the plan, if there is a new one.
    """
    if as_json:
        facts = {"job_id": entry.job_id, "attempt": entry.attempt, "backend": backend}
        if warnings is not None:
            facts["warnings"] = list(warnings)
        click.echo(json.dumps({"run_dir": str(run.path), "name": name, **facts}, ensure_ascii=False))
    else:
        click.echo(str(run.path))
        click.echo(entry.job_id)
