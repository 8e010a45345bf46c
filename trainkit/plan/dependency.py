"""What ``--after`` asks of Slurm: that a job starts when others have finished well. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from shlex import quote

from trainkit.errors import UsageError
from trainkit.frozen import dataclass
from trainkit.plan.launch import LaunchPlan

WAITED_FOR = ("pending", "starting", "running", "restarting", "stopping", "requeueing")
"""States of a run that may still finish."""
MAX_NAMED = 3


@dataclass(frozen=True)
class Awaited:
    """One run of what is waited for."""

    who: str
    """For people: its folder, or the point that it is."""
    state: str
    job_id: str | None
    """None for a run that never had a job."""
    reason: str | None = None


def ids_to_wait_for(text: str, runs: Sequence[Awaited], array: str | None = None) -> list[str]:
    """The Slurm jobs that have to end well before what `text` names has finished; none when it has.

    `array` is the job id of a group. Raises UsageError for what has failed, is not known, or runs on this
    machine.
    """
    open_runs = [run for run in runs if run.state != "finished"]
    wrong = [run for run in open_runs if run.state not in WAITED_FOR or run.job_id is None]
    if wrong:
        raise UsageError(_why_not(text, wrong, len(runs)), hint=_hint(wrong[0]))
    local = next((run for run in open_runs if str(run.job_id).startswith("local-")), None)
    if local is not None:
        raise UsageError(
            f"--after {text}: {local.who} runs on this machine, and Slurm cannot wait for it",
            hint=f"`trainkit logs {quote(local.who)} -f` returns when it has ended",
        )
    own = f"{array}_"
    if array is not None and open_runs and all(str(run.job_id).startswith(own) for run in runs):
        return [array]
    return [str(run.job_id) for run in open_runs]


def _why_not(text: str, wrong: Sequence[Awaited], count: int) -> str:
    first = wrong[0]
    why = f" ({first.reason})" if first.reason else ""
    if count == 1:
        return f"--after {text}: {first.who} is {first.state}{why}"
    named = ", ".join(f"{run.who} is {run.state}" for run in wrong[:MAX_NAMED])
    more = f" and {len(wrong) - MAX_NAMED:,} more" if len(wrong) > MAX_NAMED else ""
    return f"--after {text}: {named}{more}, of {count:,} runs"


def _hint(wrong: Awaited) -> str:
    if wrong.state == "unknown":
        return f"`trainkit status {quote(wrong.who)}` says why; without --after it starts at once"
    return f"`trainkit resume {quote(wrong.who)}` goes on with it; then it can be waited for"


def with_dependency(plan: LaunchPlan, texts: Sequence[str], job_ids: Sequence[str]) -> LaunchPlan:
    """The plan of a job that starts when these have ended well; `texts` are the runs as they were typed.

    Raises UsageError for a plan without Slurm.
    """
    if not texts:
        return plan
    if plan.slurm is None:
        raise UsageError(
            "--after lets a job wait in Slurm's queue, and this run would start here at once",
            hint="`trainkit logs RUN -f` returns when a run has ended",
        )
    names, verb = ", ".join(texts), "has" if len(texts) == 1 else "have"
    if not job_ids:
        reasons = {**plan.reasons, "after": f"at once: {names} finished already"}
        return dataclasses.replace(plan, reasons=reasons)
    # Without kill-on-invalid-dep: a job whose wait became hopeless stays, and `status` says that it has.
    dependency = "afterok:" + ":".join(dict.fromkeys(job_ids))
    reasons = {**plan.reasons, "after": f"{dependency}: starts when {names} {verb} finished well"}
    slurm = dataclasses.replace(plan.slurm, sbatch={**plan.slurm.sbatch, "dependency": dependency})
    return dataclasses.replace(plan, slurm=slurm, reasons=reasons)
