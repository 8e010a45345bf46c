"""Starts the runs of a group that have not started, or not finished."""

from __future__ import annotations

from shlex import quote

from trainkit.backends.jobs import refuse_copied_group
from trainkit.backends.slurm.group_parts import recover_parts, submit_parts
from trainkit.errors import UsageError, print_note
from trainkit.formats import plural
from trainkit.launch.create import start_group
from trainkit.run.end import read_newest_end
from trainkit.run.group import RunGroup


def resume_group(group: RunGroup) -> str:
    """Start the runs of a group that have not started, on this machine also others that have not finished.

    Returns its job id, on Slurm that of the newest array. Raises UsageError if its process may still be there
    and if there is none to start.
    """
    path, process = group.word, group.record.process
    if process is None:
        return _submit_left(group)
    alive = process.alive()
    if alive is None:
        raise UsageError(
            f"cannot tell from here whether {group.shown} is running: it was started on {process.host}",
            hint=f"run `trainkit resume {quote(str(group.path))}` on that host",
        )
    if alive and group.has_process():
        raise UsageError(
            f"{group.shown} is running as {group.job_id}", hint=f"`trainkit cancel {path}` cancels its runs"
        )
    ends = (read_newest_end(group.run(index).path) for index in group.points)
    if all(end is not None and end.state == "finished" for end in ends):
        raise UsageError(
            f"all runs of {group.shown} have finished", hint=f"`trainkit status {path}` shows them"
        )
    group.update(cancelled_at=None)
    return start_group(group)


def _submit_left(group: RunGroup) -> str:
    path = group.word
    refuse_copied_group(group, "resume")
    recover_parts(group)
    if not group.left:
        hint = f"`trainkit resume {path}/INDEX` resumes one of them"
        raise UsageError(f"all runs of {group.shown} are submitted", hint=hint)
    group.update(cancelled_at=None)
    if not submit_parts(group, print_note):
        raise UsageError(
            f"Slurm takes none of the {plural(len(group.left), 'run')} that are left of {group.shown} now",
            hint="the jobs of the group submit them as they end",
        )
    return group.job_ids[-1]
