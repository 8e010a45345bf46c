"""Submits a script exactly once: if sbatch's answer is lost, looks for the job before submitting again.

Each job has a unique submission token in its Slurm comment. The caller writes the token into the script
(`#SBATCH --comment=…`), so that a dry run shows the exact script.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.scheduler import base_id, expand_hosts, on_cluster, split_job
from trainkit.slurm.client import (
    FIELD,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUERY_PATIENCE_S,
    RECORD,
    SlurmRefused,
    SlurmUnreachable,
    plain_environ,
    query,
    records,
    run_slurm,
    time_of,
)
from trainkit.slurm.environment import scrubbed

SUBMIT_TIMEOUT_S = 60.0
SUBMIT_PATIENCE_S = 60.0
SETTLE_S = 10.0
"""If squeue does not list the token for this many seconds, a submission without an answer is considered
rejected. squeue would list an accepted job within seconds, because the controller handles requests in
order."""
POLL_INTERVAL_S = 1.0
CLOCK_SKEW_S = 5

_TOKEN = re.compile(r"[\w.:@/+=-]+", re.ASCII)
_JOB_ID = re.compile(r"\d+(?:;\S+)?")
_WILL_START = re.compile(
    r"Job \d+ to start at (?P<start>\S+) (?:on cluster \S+ )?(?:a )?using \d+ processors on "
    r"(?:nodes )?(?P<nodes>\S+)(?: in partition \S+)?"
)


@dataclass(frozen=True)
class Answer:
    """The answer of `sbatch --test-only`: an estimate of when and where a job would start."""

    start_time: datetime | None = None
    """The expected start time, or None if the job would not start or Slurm reports no time."""
    nodes: tuple[str, ...] = ()
    remark: str = ""
    """Slurm's explanation of why it reports no start time."""
    refused: bool = False
    """True if Slurm would reject the job."""


def submit_script(
    path: Path,
    *,
    token: str,
    cwd: Path,
    extra_argv: Sequence[str] = (),
    clusters: Sequence[str] = (),
    is_only_job: bool = True,
    notify: Callable[[str], None],
) -> str:
    """Submit a script and return the job id; for an array job, return the id of the whole array.

    If `clusters` lists several clusters, Slurm chooses the cluster where the job would start first, and the
    returned id includes that cluster's name (see `on_cluster`). `is_only_job` is True if no other job is
    submitted from this script file. If `is_only_job` is set, a lost job can be found by the path of its
    script as well as by its token. If sbatch's answer is lost, `submit_script` calls `notify` with a message
    and searches for a job with the token until it is known whether Slurm accepted the job. If sbatch prints
    more than an id, the id is verified, because a site's banner may contain numbers.

    Raises SlurmRefused with Slurm's message if Slurm rejects the script, or SlurmUnreachable if Slurm does
    not answer. If `may_have_arrived` is set in SlurmUnreachable, the job may exist; call
    `find_by_token(token)` before submitting the script again.
    """
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a token must be one word: {token!r}")
    script = str(path.absolute())
    argv, environ = ["sbatch", "--parsable", *extra_argv, script], scrubbed(os.environ)
    # The job must not inherit SLURM_CLUSTERS: by default, Slurm commands inside the job use the job's own
    # cluster.
    named = environ.pop("SLURM_CLUSTERS", "")
    names, script = ",".join(clusters) or named, script if is_only_job else ""
    clusters = names.split(",") if names else ()
    find = partial(find_by_token, token, since=time.time(), clusters=clusters, script=script, patience_s=0.0)
    give_up, pause_s = time.monotonic() + SUBMIT_PATIENCE_S, FIRST_PAUSE_S
    while True:
        try:
            printed = run_slurm(argv, SUBMIT_TIMEOUT_S, environ=environ, cwd=cwd, cluster=names)
        except SlurmUnreachable as lost:
            what = "checking whether Slurm accepted the job" if lost.may_have_arrived else "retrying"
            notify(f"{lost.message}; {what}")
            found = _find_until_known(find, script, lost, give_up)
            if found is None and time.monotonic() >= give_up:
                raise SlurmUnreachable(lost.message, lost.hint) from None
        else:
            is_id = _JOB_ID.fullmatch(printed.strip())
            return is_id[0] if is_id else _confirm(find, printed, script)
        if found is not None:
            return found
        # Slurm has not listed the job within SETTLE_S, so Slurm did not accept the job.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def cancel_command(job: str) -> str:
    """Return the command that cancels a job. `job` is an id returned by `submit_script`."""
    job_id, cluster = split_job(job)
    return f"scancel --clusters={cluster} {job_id}" if cluster else f"scancel {job_id}"


def _confirm(find: Callable[..., str | None], printed: str, script: str) -> str:
    """Return the id of an accepted job if sbatch printed anything besides the id.

    Raises SlurmUnreachable if Slurm lists no job with the token and no new job with one of the printed ids.
    """
    shown = f"{printed.strip()[:200]!r}"
    lost = SlurmUnreachable(
        f"sbatch printed more than a job id, and Slurm does not list a job with the id: {shown}"
        if printed.strip()
        else "sbatch did not print a job id, and Slurm does not list a new job with this script",
        hint="`squeue --me` shows whether the job exists",
        may_have_arrived=True,
    )
    found = _find_until_known(find, script, lost, time.monotonic() + SUBMIT_PATIENCE_S)
    if found is None:  # the site may have replaced the job's Slurm comment
        found = find(
            printed=[line.strip() for line in printed.splitlines() if _JOB_ID.fullmatch(line.strip())]
        )
    if found is None:
        raise lost
    return found


def _find_until_known(
    find: Callable[[], str | None], script: str, lost: SlurmUnreachable, give_up: float
) -> str | None:
    """Search for a submitted job until it is found; return its id, or None if Slurm did not accept it.

    Raises SlurmUnreachable if Slurm still does not answer at the time `give_up`.
    """
    settle_s = SETTLE_S if lost.may_have_arrived else 0.0
    missing_since: float | None = None
    while True:
        try:
            found = find()
        except SlurmUnreachable:
            missing_since = None
            if time.monotonic() >= give_up:
                if lost.may_have_arrived:
                    what = f"{script or 'the job'} may or may not have been submitted ({lost.message})"
                    raise SlurmUnreachable(
                        f"sbatch's answer was lost and Slurm cannot be queried: {what}",
                        hint="once `scontrol ping` shows that the controller is up, check with `squeue --me`",
                        may_have_arrived=True,
                    ) from None
                raise lost from None
        else:
            now = time.monotonic()
            missing_since = now if missing_since is None else missing_since
            if found is not None:
                return found
            if now - missing_since >= settle_s:
                return None
        time.sleep(POLL_INTERVAL_S)


def find_by_token(
    token: str,
    *,
    since: float = 0.0,
    clusters: Sequence[str] = (),
    script: str = "",
    printed: Sequence[str] = (),
    patience_s: float = QUERY_PATIENCE_S,
) -> str | None:
    """Return the id of this user's newest job with the token (for an array, the array's id), or None.

    Jobs submitted before `since` (Unix seconds) are ignored: if a run folder was deleted and created again,
    older jobs have the same token. A site's plugin may rewrite comments, so a job also matches by its
    `script`, or by an id in `printed`. squeue still lists a job for some minutes after the job has ended.
    Raises SlurmUnreachable if Slurm does not answer.
    """
    layout = FIELD.join(("%F", "%V", "%k", "%o")) + RECORD
    argv = ["squeue", "--me", "--noheader", "--states=all", f"--format={layout}"]
    away: SlurmUnreachable | None = None
    for cluster in clusters or ("",):
        try:
            found = query(argv, environ=scrubbed(os.environ), patience_s=patience_s, cluster=cluster)
        except SlurmUnreachable as error:
            away = error  # a different cluster may have accepted the job
            continue
        for job_id, submitted, comment, command in records(found, 4):
            # Old Slurm versions do not print the submit time, so only the token is compared.
            is_recent = int(submitted) >= int(since) - CLOCK_SKEW_S if submitted.isdigit() else not since
            is_printed = on_cluster(base_id(job_id), cluster) in printed
            if is_recent and (token in comment.split() or (script and command == script) or is_printed):
                return on_cluster(base_id(job_id), cluster)
    if away is not None:
        raise away
    return None


def query_start(
    script: str,
    *,
    timeout_s: float = SUBMIT_TIMEOUT_S,
    extra_argv: Sequence[str] = (),
    clusters: Sequence[str] = (),
) -> tuple[Answer, str]:
    """Estimate when and where Slurm would start a script, given as text, without submitting it.

    Also returns Slurm's message, which contains the start time in the local time zone.

    Raises SlurmRefused if Slurm would reject the script, SlurmUnreachable if Slurm does not answer, and
    OSError if the script cannot be written to a temporary file.
    """
    environ = plain_environ(scrubbed(os.environ))
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        path = Path(folder, "submit.sbatch")
        path.write_text(script, encoding="utf-8", errors="surrogateescape")
        argv = ["sbatch", "--test-only", *extra_argv, str(path)]
        # sbatch --test-only prints the estimate to stderr.
        names = ",".join(clusters)
        printed = run_slurm(argv, timeout_s, environ, path.parent, cluster=names, with_stderr=True)
    return parse_start_estimate(printed)


def parse_start_estimate(text: str) -> tuple[Answer, str]:
    """Parse the message of `sbatch --test-only`; raise SlurmRefused if it is not an estimate."""
    match = _WILL_START.search(text)
    if match is None:
        raise SlurmRefused(f"cannot parse the output of sbatch --test-only: {text.strip()!r}", stderr=text)
    start_time = time_of(match["start"])
    shown = match["start"] if start_time is None else f"{start_time.astimezone():%Y-%m-%d %H:%M:%S}"
    answer = Answer(start_time, tuple(expand_hosts(match["nodes"])))
    return answer, match[0].replace(match["start"], shown, 1)


ASK_TIMEOUT_S = 5.0
"""Timeout in seconds of one estimate. A busy controller answers slowly."""
ENOUGH_S = 8.0
"""Seconds after which no more estimates are requested."""
AT_ONCE = 4
TOO_BUSY = "Slurm was too busy to answer"
# Slurm also prints "not available" or "busy" if nodes are only temporarily out of service. Slurm would still
# accept such a job, which would then wait in the queue.
MAY_CHANGE = re.compile(r"not available|busy")


def ask_starts(
    requests: Sequence[Sequence[str]], enough_s: float | None = None, clusters: Sequence[str] = ()
) -> list[Answer]:
    """Estimate, for each list of sbatch options, when Slurm would start a job. Queries run in parallel.

    With `enough_s`, all answers arrive within this many seconds; without it, no query begins after ENOUGH_S.
    Raises SlurmUnreachable if Slurm does not answer any query.
    """
    answered: list[Sequence[str]] = []
    lost: list[TrainkitError] = []
    give_up = time.monotonic() + (ENOUGH_S if enough_s is None else enough_s)

    def ask(options: Sequence[str]) -> Answer:
        if lost or time.monotonic() > give_up:
            return Answer(remark=TOO_BUSY)
        timeout_s = ASK_TIMEOUT_S if enough_s is None else max(0.1, round(give_up - time.monotonic(), 1))
        try:
            found, _ = query_start("#!/bin/sh\n", timeout_s=timeout_s, extra_argv=options, clusters=clusters)
        except SlurmRefused as error:
            answered.append(options)
            remark = error.sentence.splitlines()[-1] if error.sentence else error.message
            return Answer(remark=remark, refused=not MAY_CHANGE.search(remark))
        except TrainkitError as error:
            lost.append(error)
            return Answer(remark=TOO_BUSY)
        answered.append(options)
        return found

    from concurrent.futures import ThreadPoolExecutor  # most submissions need no estimate

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(ask, requests))
    if lost and not answered:
        raise lost[0]
    return answers
