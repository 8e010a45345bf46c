"""What ``--after RUN`` stands for: the Slurm jobs of RUN that have not finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trainkit.plan.launch import Awaited
    from trainkit.rundir import RunDir
    from trainkit.rungroup import RunGroup


def find_job_ids(texts: Sequence[str]) -> list[str]:
    """The jobs that have to end well before these runs and groups have finished, newest attempts counting.

    Raises UsageError for one that has failed, is not known, or runs on this machine.
    """
    from trainkit.control.run_registry import find_run_or_group
    from trainkit.plan.launch import ids_to_wait_for
    from trainkit.rundir import RunDir

    ids: list[str] = []
    for text in texts:
        found = find_run_or_group(text)
        if isinstance(found, RunDir):
            ids += ids_to_wait_for(text, [_run(found)])
        else:
            ids += ids_to_wait_for(text, _group(found), found.job_id)
    return ids


def _run(run: RunDir) -> Awaited:
    from datetime import datetime, timezone

    from trainkit.control.jobs import job_status
    from trainkit.observe.status import read_status
    from trainkit.plan.launch import Awaited

    look = job_status([run], _warn)[0]
    status = read_status(run, look.alive, datetime.now(timezone.utc), look.job)
    return Awaited(str(run.path), status.state, status.job_id, status.reason)


def _group(group: RunGroup) -> list[Awaited]:
    from datetime import datetime, timezone

    from trainkit.observe.group import GroupFiles
    from trainkit.plan.launch import Awaited
    from trainkit.slurm.jobs import query_jobs

    look = GroupFiles(group)
    status = look.status(query_jobs(look.open_ids), datetime.now(timezone.utc))
    return [Awaited(point.run_dir, point.state, point.job_id, point.reason) for point in status.points]


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)
