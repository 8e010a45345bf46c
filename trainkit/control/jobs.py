"""Steers the job of a run, whoever carries it: a supervisor on this machine, or Slurm."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from trainkit.control import local
from trainkit.errors import SlurmError, TrainkitError, UsageError
from trainkit.job.record import (
    KILLED,
    Liveness,
    add_slurm_entry,
    find_entry,
    is_exiting,
    is_slurm,
    newest_entry,
    submission_token,
    waiting_follow_ups,
)
from trainkit.job.record import liveness as local_liveness
from trainkit.rundir import RunDir, log_event, read_json, utc_now, write_json
from trainkit.slurm.conf_file import cluster_name, other_cluster
from trainkit.slurm.control import Receiver, cancel, kill_step, send_signal
from trainkit.slurm.jobs import JobInfo, query_jobs
from trainkit.slurm.states import JobState
from trainkit.slurm.submit import find_marked

ASK_EVERY_S = 10.0
"""Slurm's controller answers a whole cluster: a command that waits asks no more often."""
ASK_SOON_S = 1.0


def slurm_job(entry: Mapping[str, Any]) -> JobInfo | None:
    """What Slurm knows about the job of an entry; None when it has forgotten it.

    Raises UsageError for a job of a cluster that is not asked from here.
    """
    refuse_elsewhere(entry)
    job_id = str(entry["job_id"])
    return query_jobs([job_id]).get(job_id)


def refuse_elsewhere(record: Mapping[str, Any]) -> None:
    """Raise UsageError when the job of a record is on a cluster that is not asked from here."""
    cluster = other_cluster(record)
    if cluster is not None:
        raise UsageError(
            f"job {record['job_id']} is on the cluster {cluster}, and Slurm asks {cluster_name()} from here",
            hint=f"log in there, or `export SLURM_CLUSTERS={quote(cluster)}`",
        )


def liveness(entry: Mapping[str, Any]) -> Liveness:
    """Whether the job of an entry is there: running, or waiting to run."""
    if not is_slurm(entry):
        return local_liveness(entry)
    job = slurm_job(entry)
    # What squeue does not list does not run, whatever became of it.
    return Liveness.ALIVE if is_there(job) else Liveness.GONE


def is_there(job: JobInfo | None) -> bool:
    """Whether Slurm has the job in its queue, running or not."""
    return job is not None and not job.is_terminal and job.state is not JobState.UNKNOWN


@dataclass(frozen=True)
class JobStatus:
    """What can be seen of a run's newest job from here."""

    alive: bool | None
    """None when this host cannot know."""
    job: JobInfo | None = None
    """What Slurm knows; None for a local run, and when Slurm cannot be asked."""


def job_status(runs: Sequence[RunDir], warn: Callable[[str], None]) -> list[JobStatus]:
    """A look at each run, with one question to Slurm for all of them; a Slurm that is away is warned of."""
    return looks(runs, ask_slurm(slurm_ids(runs), warn))


def slurm_ids(runs: Iterable[RunDir]) -> list[str]:
    """The newest jobs of those runs that are on Slurm and have not written how they ended.

    Those that wait to go on after them too.
    """
    pairs = ((run, newest_entry(run)) for run in runs)
    return [
        job_id
        for run, entry in pairs
        if entry is not None and is_slurm(entry) and not is_exiting(run, entry) and not other_cluster(entry)
        for job_id in (str(entry["job_id"]), *waiting_follow_ups(run))
    ]


def ask_slurm(ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, JobInfo] | None:
    """What Slurm knows about these jobs; None, and a warning, when it is away."""
    try:
        return query_jobs(ids)
    except TrainkitError as error:
        warn(f"{error.message}: what Slurm does with {len(ids):,} of these runs is not known")
        return None


def looks(runs: Iterable[RunDir], jobs: Mapping[str, JobInfo] | None) -> list[JobStatus]:
    """A look at each run; `jobs` is what `ask_slurm` gave."""
    return [_look(run, newest_entry(run), jobs) for run in runs]


def _look(run: RunDir, entry: Mapping[str, Any] | None, jobs: Mapping[str, JobInfo] | None) -> JobStatus:
    if entry is None:
        return JobStatus(None)
    if not is_slurm(entry):
        return JobStatus(
            {Liveness.ALIVE: True, Liveness.GONE: False, Liveness.UNKNOWN: None}[local_liveness(entry)]
        )
    if jobs is None or other_cluster(entry):
        return JobStatus(None)
    job = jobs.get(str(entry["job_id"]))
    if not is_there(job):
        # Nobody has asked for follow-ups of a run that has written its end.
        job = next((item for item in map(jobs.get, waiting_follow_ups(run)) if is_there(item)), job)
    return JobStatus(is_there(job), job)


def live_entry(run: RunDir, what: str) -> dict[str, Any] | None:
    """The newest attempt's entry when its job is there, None when it has ended.

    Raises UsageError when this host cannot know; `what` is the command that needs to.
    """
    entry = newest_entry(run)
    if entry is None or not is_slurm(entry):
        return local.live_entry(run, what)
    try:
        return entry if liveness(entry) is Liveness.ALIVE else _following(run, entry)
    except SlurmError:
        if is_exiting(run, entry):
            return None
        raise


def _following(run: RunDir, entry: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of an attempt whose job is gone, with the job that waits to go on in its place."""
    waiting = [] if is_exiting(run, entry) else waiting_follow_ups(run)
    jobs = query_jobs(waiting)
    return next(({**entry, "job_id": job_id} for job_id in waiting if is_there(jobs.get(job_id))), None)


def recall(run: RunDir) -> None:
    """Find the job of the newest attempt where the command that submitted it never learned its id.

    Writes it into job.json; call with the lock held. Raises SlurmUnreachable when nobody can tell.
    """
    attempt = run.attempt(max(run.attempt_numbers(), default=0))
    if not attempt.script_file.exists() or attempt.end_file.exists() or find_entry(run, attempt.number):
        return
    written = attempt.script_file.stat().st_mtime
    job_id = find_marked(submission_token(run, attempt.number), since=written)
    if job_id is not None:
        backend = str(read_json(attempt.plan_file)["backend"])
        add_slurm_entry(run, attempt.number, job_id, "submit", backend)


def refuse_live(run: RunDir, what: str) -> None:
    """Raise UsageError when the run has a job that runs or waits."""
    entry = live_entry(run, what)
    if entry is not None:
        raise UsageError(
            f"{run.path} is running as {entry['job_id']}",
            hint=f"`trainkit cancel {quote(str(run.path))}` ends it; "
            f"`trainkit requeue {quote(str(run.path))}` saves and starts it again",
        )


def tell(run: RunDir, entry: Mapping[str, Any], number: signal.Signals) -> str:
    """Ask a job to save and end (SIGTERM) or to save and come back (SIGUSR2).

    Gives what was done: ``told``; ``cancelled`` or ``waiting`` for one that had not started.
    """
    if not is_slurm(entry):
        local.send(dict(entry), number)
        return "told"
    job = slurm_job(entry)
    if job is not None and job.state.is_waiting:
        if number == signal.SIGUSR2:
            return "waiting"
        cancel([str(entry["job_id"])])
        write_cancelled(run, entry, "cancelled before it started")
        return "cancelled"
    send_signal([str(entry["job_id"])], number.name, Receiver.STEPS)
    return "told"


def kill(run: RunDir, entry: Mapping[str, Any]) -> None:
    """End a job at once, without saving, and write down that it was."""
    if not is_slurm(entry):
        local.kill_job(run, dict(entry))
        return
    job_id, step_id = str(entry["job_id"]), step_of(run, entry)
    if step_id is not None:
        # Slurm gives the job that it cancels SIGTERM first, and then its ranks would begin to save.
        with contextlib.suppress(UsageError):
            kill_step(job_id, step_id)
    cancel([job_id])
    write_cancelled(run, entry, KILLED)


def step_of(run: RunDir, entry: Mapping[str, Any]) -> str | None:
    """The number of the step that the ranks of an attempt are; None where they have not met yet."""
    if "step_id" in entry:
        return str(entry["step_id"])
    try:
        found = str(read_json(run.attempt(entry["attempt"]).rendezvous_file)["step_id"])
    except (OSError, ValueError, KeyError):
        return None
    return found


def write_cancelled(run: RunDir, entry: Mapping[str, Any], reason: str) -> None:
    """Write the end of an attempt whose supervisor cannot do it."""
    attempt = run.attempt(entry["attempt"])
    end = {
        "state": "cancelled",
        "action": "stopped",
        "exit_code": 137,
        "reason": reason,
        "verdict": None,
        "time": utc_now(),
    }
    write_json(attempt.end_file, end)
    log_event(run, attempt.number, "stopped", state="cancelled", exit_code=137, reason=reason)


def wait_until_gone(run: RunDir, entry: Mapping[str, Any], timeout_s: float) -> bool:
    """Whether the job has ended within the time."""
    if not is_slurm(entry):
        return local.wait_until_gone(dict(entry), timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while not is_exiting(run, entry) and liveness(entry) is Liveness.ALIVE:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(ASK_SOON_S)
    return True


def life_watch(run: RunDir, say: Callable[[str], None] = lambda text: None) -> Callable[[], bool | None]:
    """A function that tells whether a run's newest job is there, for asking often; None when unknown.

    Slurm is asked every `ASK_EVERY_S` at most, and what a waiting job waits for is said when it changes.
    """
    asked_s, alive, said = float("-inf"), None, ""

    def ask() -> bool | None:
        nonlocal asked_s, alive, said
        entry = newest_entry(run)
        if entry is None:
            return None
        if not is_slurm(entry):
            return {Liveness.ALIVE: True, Liveness.GONE: False, Liveness.UNKNOWN: None}[local_liveness(entry)]
        if other_cluster(entry):
            return None
        waits = said != "" or alive is None
        if time.monotonic() - asked_s < (ASK_SOON_S if waits and asked_s < 0 else ASK_EVERY_S):
            return alive
        asked_s = time.monotonic()
        try:
            job = slurm_job(entry)
            alive = is_there(job)
            if not alive and not is_exiting(run, entry):
                following = filter(is_there, query_jobs(waiting_follow_ups(run)).values())
                job = next(following, job)
                alive = is_there(job)
        except SlurmError as error:
            if str(error) != said:
                said = str(error)
                say(f"{error.message}; asking again")
            return alive
        words = job.sentence if job is not None and job.state.is_waiting else ""
        if job is not None and words and words != said:
            say(f"{job.job_id} waits: {words}")
        said = words
        return alive

    return ask
