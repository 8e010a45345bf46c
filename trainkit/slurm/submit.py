"""Submits a script once and only once: when the answer is lost, the job is looked for before anything else.

A job carries its *mark*, a word that nobody else has, in its comment. The caller writes it into the script
(`#SBATCH --comment=…`), so that what is shown is what runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainkit.slurm.client import (
    FIELD,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUERY_PATIENCE_S,
    RECORD,
    SlurmRefused,
    SlurmUnreachable,
    ask_slurm,
    plain_environ,
    query,
    records,
    run_slurm,
    scrubbed,
    time_of,
)
from trainkit.slurm.hosts import expand_hosts
from trainkit.slurm.job_id import base_id, checked_job_id

SUBMIT_TIMEOUT_S = 60.0
SUBMIT_PATIENCE_S = 60.0
SETTLE_S = 10.0
"""How long squeue has to deny a mark before a lost submission counts as never accepted. The controller takes
requests in the order in which they came: what it accepted before squeue's question shows within seconds."""
LOOK_EVERY_S = 1.0
CLOCK_SKEW_S = 5

_MARK = re.compile(r"[\w.:@/+=-]+", re.ASCII)
_JOB_ID = re.compile(r"(?P<job_id>\d+)(?:;\S+)?")
_WILL_START = re.compile(
    r"Job (?P<job_id>\d+) to start at (?P<start>\S+) (?:a )?using (?P<cpus>\d+) processors on (?:nodes )?"
    r"(?P<nodes>\S+)(?: in partition (?P<partition>\S+))?"
)


@dataclass(frozen=True)
class _Sought:
    """What tells a job from all others: its mark, or its script where a site's plugin rewrites comments."""

    mark: str
    script: str = ""
    since: float = 0.0

    def is_found(self, comment: str, command: str, submitted: str) -> bool:
        """Whether a job is the one, and not one of an earlier run of the same name."""
        # Slurm without a time is one that is too old to tell: then the mark has to do.
        recent = int(submitted) >= int(self.since) - CLOCK_SKEW_S if submitted.isdigit() else not self.since
        return recent and (self.mark in comment.split() or (bool(self.script) and command == self.script))


@dataclass(frozen=True)
class WouldStart:
    """What `sbatch --test-only` expects. It accepts a time limit above the partition's."""

    start_time: datetime | None
    nodes: list[str]
    partition: str
    num_cpus: int
    message: str
    """Slurm's own sentence, with the time of this machine's time zone."""


def submit_script(
    path: Path,
    *,
    mark: str,
    environ: Mapping[str, str],
    cwd: Path,
    timeout_s: float = SUBMIT_TIMEOUT_S,
    extra_argv: Sequence[str] = (),
    patience_s: float = SUBMIT_PATIENCE_S,
    is_only_job: bool = True,
    notify: Callable[[str], None] | None = None,
) -> str:
    """Submits the script and returns the job id (of an array: that of the whole array).

    `environ` is scrubbed first. `is_only_job` says that no other job has this script. When the answer is
    lost, the mark is looked up until it is known whether the job exists; `notify` gets a sentence when that
    begins. Raises SlurmRefused with Slurm's sentence, and SlurmUnreachable: with `may_have_arrived` it is
    open whether the job exists, and `find_marked(mark)` has to answer before the script is submitted again.
    """
    environ = scrubbed(environ)
    script = path.absolute()
    argv = ["sbatch", "--parsable", *extra_argv, str(script)]

    def submit() -> str:
        return _job_id(run_slurm(argv, timeout_s, environ=environ, cwd=cwd))

    return submit_once(
        submit,
        mark=mark,
        environ=environ,
        script=str(script) if is_only_job else "",
        patience_s=patience_s,
        notify=notify,
    )


def submit_once(
    submit: Callable[[], str],
    *,
    mark: str,
    environ: Mapping[str, str],
    script: str = "",
    patience_s: float = SUBMIT_PATIENCE_S,
    notify: Callable[[str], None] | None = None,
) -> str:
    """The id of the one job that there is in the end, whatever became of the answers to `submit`.

    `submit` gives a job id or raises SlurmRefused or SlurmUnreachable; it is called again when Slurm denies
    for long enough that it has the job. For all else see `submit_script`.
    """
    if not _MARK.fullmatch(mark):
        raise ValueError(f"a mark has to be one word: {mark!r}")
    sought = _Sought(mark, script, time.time())
    give_up = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return submit()
        except SlurmUnreachable as lost:
            if notify is not None:
                notify(_what_now(lost))
            found = _look_until_known(sought, lost, give_up, environ)
        if found is not None:
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _what_now(lost: SlurmUnreachable) -> str:
    if lost.may_have_arrived:
        return f"{lost.message}; looking whether the job was accepted"
    return f"{lost.message}; trying again"


def _job_id(stdout: str) -> str:
    # A site's filter may print more; Slurm's own line is the only one of this form.
    for line in stdout.splitlines():
        if match := _JOB_ID.fullmatch(line.strip()):
            return match["job_id"]
    raise SlurmUnreachable(
        f"sbatch printed no job id: {stdout.strip()!r}",
        hint="`squeue --me` tells whether the job is there",
        may_have_arrived=True,
    )


def _look_until_known(
    sought: _Sought, lost: SlurmUnreachable, give_up: float, environ: Mapping[str, str]
) -> str | None:
    """The job with this mark; None when Slurm denies it for so long that submitting again is safe."""
    settle_s = SETTLE_S if lost.may_have_arrived else 0.0
    denied_since: float | None = None
    while True:
        try:
            found = _find(sought, environ, patience_s=0.0)
        except SlurmUnreachable:
            denied_since = None
            if time.monotonic() >= give_up:
                raise _open_question(sought.script, lost) from None
        else:
            now = time.monotonic()
            denied_since = now if denied_since is None else denied_since
            if found is not None:
                return found
            if now - denied_since >= settle_s:
                if now >= give_up:
                    raise SlurmUnreachable(lost.message, lost.hint, stderr=lost.stderr)
                return None
        time.sleep(LOOK_EVERY_S)


def _open_question(script: str, lost: SlurmUnreachable) -> SlurmUnreachable:
    if not lost.may_have_arrived:
        return lost
    return SlurmUnreachable(
        f"the answer of sbatch was lost and Slurm cannot be asked: {script} may have been submitted or not "
        f"({lost.message})",
        hint="when `scontrol ping` says that the controller is up, `squeue --me` tells whether it was",
        stderr=lost.stderr,
        may_have_arrived=True,
    )


def find_marked(
    mark: str,
    *,
    since: float = 0.0,
    environ: Mapping[str, str] | None = None,
    patience_s: float = QUERY_PATIENCE_S,
) -> str | None:
    """The id of this user's job that carries the mark, or None; of an array, the id of the whole array.

    `since` (Unix seconds) leaves out jobs that were submitted before: a run folder that was removed and made
    again has the mark of the old one.
    Asks squeue, which knows jobs until some minutes after their end; raises SlurmUnreachable.
    """
    return _find(_Sought(mark, since=since), environ, patience_s)


def _find(sought: _Sought, environ: Mapping[str, str] | None, patience_s: float) -> str | None:
    layout = FIELD.join(("%F", "%V", "%k", "%o")) + RECORD
    argv = ["squeue", "--me", "--noheader", "--states=all", f"--format={layout}"]
    for job_id, submitted, comment, command in records(
        query(argv, environ=environ, patience_s=patience_s).stdout, 4
    ):
        if sought.is_found(comment, command, submitted):
            return base_id(job_id)
    return None


def would_start(
    path: Path,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    timeout_s: float = SUBMIT_TIMEOUT_S,
    extra_argv: Sequence[str] = (),
) -> WouldStart:
    """When and where Slurm would start the script, without submitting it; SlurmRefused when it would not."""
    environ = plain_environ(scrubbed(environ))
    argv = ["sbatch", "--test-only", *extra_argv, str(path.absolute())]
    answer = ask_slurm(argv, timeout_s, environ=environ, cwd=cwd)
    # The answer is on stderr.
    return parse_would_start(answer.stderr + answer.stdout)


def parse_would_start(text: str) -> WouldStart:
    """The sentence of `sbatch --test-only`."""
    match = _WILL_START.search(text)
    if match is None:
        raise SlurmRefused(
            f"sbatch --test-only gave no answer that trainkit understands: {text.strip()!r}", stderr=text
        )
    start_time = time_of(match["start"])
    shown = match["start"] if start_time is None else f"{start_time.astimezone():%Y-%m-%d %H:%M:%S}"
    return WouldStart(
        start_time=start_time,
        nodes=expand_hosts(match["nodes"]),
        partition=match["partition"] or "",
        num_cpus=int(match["cpus"]),
        message=match[0].replace(match["start"], shown, 1),
    )


def write_batch_script(job_id: str, *, environ: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the script that Slurm keeps for a job of this user, while Slurm knows the job."""
    argv = ["scontrol", "write", "batch_script", checked_job_id(job_id), "-"]
    return query(argv, environ=environ).stdout_bytes
