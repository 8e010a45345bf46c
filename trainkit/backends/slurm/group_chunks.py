"""Submits a group's trials to Slurm in chunks. Each chunk is one job array.

Chunks are needed because Slurm limits both the array size and the number of jobs. The command that starts a
group submits as many trials as Slurm accepts. Each job in the group submits further trials when it ends, and
so does `trainkit resume GROUP`.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from trainkit.errors import TrainkitError, UsageError
from trainkit.formats import plural
from trainkit.locks import LockBusy, file_lock
from trainkit.plan.launch import LaunchPlan
from trainkit.quoting import log_path
from trainkit.run.files import write_atomic
from trainkit.run.group import Chunk, RunGroup
from trainkit.run.history import PlanRecord
from trainkit.run.rundir import RunDir, submission_token
from trainkit.scheduler import array_spec, split_job
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.control import cancel, show_config
from trainkit.slurm.submit import find_by_token, submit_script
from trainkit.trust import read_trusted

DEFAULT_MAX_ARRAY_SIZE = 1001
LOCK = ".parts.lock"
RETRY_S = 2.0
TASK = "${SLURM_ARRAY_TASK_ID:?}"
"""The placeholder for the name of the trial's folder in a group's batch script."""
_MAX_TASKS = re.compile(r"(?:^|,)max_array_tasks=(?P<count>\d+)")
_NO_ROOM = re.compile(r"(?:QOS|Assoc)\w*Submit\w*Limit|MaxJobCount|job submit limit")
"""Matches sbatch's error messages about a job limit of the user, the account or the cluster."""


def next_chunk(unsubmitted: Sequence[int], size: int, max_size: int) -> tuple[int, list[int]]:
    """Return the index offset and the trials for the next chunk, at most `size` of the unsubmitted trials.

    The index of an array task must be below `max_size`, Slurm's MaxArraySize.
    """
    offset = 0 if unsubmitted[0] < max_size else unsubmitted[0]
    return offset, [index for index in unsubmitted[:size] if index - offset < max_size]


def submit_chunks(
    group: RunGroup,
    notify: Callable[[str], None],
    *,
    size: int | None = None,
    patience_s: float = 0.0,
) -> int:
    """Submit trials in chunks until all are submitted or Slurm accepts no more; return the number submitted.

    The first chunk has at most `size` trials. If Slurm rejects a chunk because of a limit on jobs, the chunk
    is halved. If Slurm rejects even a chunk with a single trial because of a limit on jobs, the submission is
    retried for `patience_s` seconds. If all jobs in a group end at the same time, only one of them submits
    trials; the others exit, which frees room for new jobs. Does nothing while another process submits trials,
    or if the group has been cancelled.

    If a submission fails and the group has no job yet, raises TrainkitError. If a submission fails and the
    group already has a job, `notify` is called with the error message, and the trials stay unsubmitted.
    """
    try:
        with file_lock(group.path / LOCK, 0.0):
            group.read_again()  # another process may have submitted chunks in the meantime
            return _submit(group, notify, size, time.monotonic() + patience_s)
    except LockBusy:
        return 0


def _submit(group: RunGroup, notify: Callable[[str], None], size: int | None, until_s: float) -> int:
    if group.record.parts:
        _recover_last(group)
    if not group.unsubmitted:
        return 0
    config = show_config(next(iter(clusters_of(group)), ""))
    max_size = int(config.get("MaxArraySize") or DEFAULT_MAX_ARRAY_SIZE)
    found = _MAX_TASKS.search(config.get("SchedulerParameters", ""))
    most = min(max_size, int(found["count"])) if found else max_size
    size, count = min(size or most, most), 0
    while size and (unsubmitted := group.unsubmitted) and group.record.cancelled_at is None:
        parts, (offset, indices) = group.record.parts, next_chunk(unsubmitted, size, max_size)
        part = Chunk(indices[-1], offset)
        try:
            # Record the chunk before its job can start, because the job derives the names of the trials'
            # folders from the record.
            group.update(parts=[*parts, part])
            job = _sbatch(group, part, indices, notify)
        except (TrainkitError, OSError) as error:
            if not (isinstance(error, SlurmUnreachable) and error.may_have_arrived):
                with suppress(OSError):  # if this fails, `recover_chunks` finds the chunk later
                    group.update(parts=parts)
            has_room = not (isinstance(error, SlurmRefused) and _NO_ROOM.search(error.sentence))
            most = size = 0 if has_room else len(indices) // 2
            if not has_room and not size and not count and time.monotonic() < until_s:
                time.sleep(RETRY_S)
                most = size = 1
                continue
            if not size and not parts:
                raise
            if has_room:
                notify(f"{plural(len(unsubmitted), 'run')} of {group.path} not submitted yet: {error}")
        else:
            try:
                _note_job(group, parts, part, job)
            except OSError as error:
                job_id = split_job(job)[0]
                message = f"{job_id} was submitted, but {group.path} cannot be written: {error.strerror}"
                hint = "free some disk space; `trainkit status` will then find the job"
                raise SlurmUnreachable(message, hint, may_have_arrived=True) from error
            count += len(indices)
            size = min(2 * size, most)
            if group.record.cancelled_at is not None:
                # Another command cancelled the group before this job was recorded, and therefore did not
                # cancel this job.
                cancel(group.jobs[-1:])
    return count


def _sbatch(group: RunGroup, part: Chunk, indices: Sequence[int], notify: Callable[[str], None]) -> str:
    """Submit the newest chunk of a group; return the id of the chunk's job array."""
    number, limit = len(group.record.parts), group.record.array.partition("%")[2]
    token, script = submission_token(RunDir(group.path), number), group.script_of(part)
    tasks = [index - part.offset for index in indices]
    spec = array_spec(tasks, int(limit) if limit else None)
    options = [f"--array={spec}"] if spec != group.record.array else []
    if number > 1:
        request = LaunchPlan.from_dict(group.record.plan).slurm
        assert request is not None
        options.append(f"--comment={request.comment(token)}")
    text = read_trusted(group.script_file)
    if part.offset:
        if TASK not in text:
            hint = f"use {TASK} in your submit.sbatch.j2, as trainkit's own template does"
            raise UsageError(
                f"{group.script_file} does not contain {TASK}, which names the folder of a trial", hint=hint
            )
        write_atomic(script, text.replace(TASK, f"$(({TASK} + {part.offset}))"))
        logs = log_path(str(group.logs_dir))
        options.append(f"--output={logs}/{group.log_file('%a', part.offset).name}")
    if number > 1 and limit:  # the limit on concurrent trials applies to all arrays of the group together
        options.append(f"--dependency=afterany:{group.record.parts[-2].job_id}")
    return submit_script(
        script,
        token=token,
        cwd=group.path,
        extra_argv=options,
        clusters=clusters_of(group),
        is_only_job=number == 1,
        notify=notify,
    )


def clusters_of(group: RunGroup) -> Sequence[str]:
    """Return the clusters to which a group's next array may go.

    All arrays go to the cluster of the first array.
    """
    if group.job_id is None:
        return PlanRecord(group.record.plan).record("slurm").texts("clusters")
    return (group.record.other_cluster,) if group.record.other_cluster else ()


def _note_job(group: RunGroup, known: Sequence[Chunk], part: Chunk, job: str) -> None:
    """Record the job of a group's newest chunk, and the cluster if Slurm returned one."""
    job_id, cluster = split_job(job)
    named = {"cluster": cluster} if cluster else {}
    group.update(parts=[*known, replace(part, job_id=job_id)], job_id=group.job_id or job_id, **named)


def recover_chunks(group: RunGroup) -> None:
    """Look up the newest chunk by its token if Slurm never acknowledged its submission.

    If Slurm does not know the chunk and none of its trials has begun, its trials are considered unsubmitted.
    Does nothing while another process submits chunks. Raises SlurmUnreachable if Slurm does not answer.
    """
    if group.record.process is not None or (group.parts and group.parts[-1].job_id is not None):
        return
    with suppress(LockBusy, PermissionError), file_lock(group.path / LOCK, 0.0):
        group.read_again()
        _recover_last(group)


def _recover_last(group: RunGroup) -> None:
    record = group.record
    *known, part = group.parts or [Chunk(sys.maxsize)]
    if part.job_id is not None:
        return
    token, script = submission_token(RunDir(group.path), len(known) + 1), group.script_of(part)
    try:
        since = script.stat().st_mtime
    except FileNotFoundError:  # the script was never written, so no job was submitted
        job = None
    else:
        job = find_by_token(token, since=since, clusters=clusters_of(group))
    first = known[-1].last if known else -1
    if job is not None:
        _note_job(group, known, part, job)
    elif record.parts and not any(group.run(i).path.exists() for i in group.trials if first < i <= part.last):
        group.update(parts=known)
