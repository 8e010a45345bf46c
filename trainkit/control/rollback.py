"""Plans the rollback that a user requests: the checkpoint to continue from, and the samples to leave out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainkit.control.changed_config import RunSoFar
from trainkit.errors import UsageError
from trainkit.run.files import utc_now
from trainkit.run.manifest import Checkpoint, find_damage
from trainkit.run.rollbacks import Ranges, Rollback, SavedPosition, position_of, shown_ranges

REASON = "requested with `trainkit resume`"


@dataclass(frozen=True)
class RollbackRequest:
    """The options of `trainkit resume` that request a rollback."""

    step: int | None = None
    """The step of the checkpoint to continue from; None for the newest checkpoint."""
    skipped: Ranges = ()
    """The positions of the samples to leave out."""

    @classmethod
    def of(cls, step: int | None, skipped: Ranges) -> RollbackRequest | None:
        """Return the request for a checkpoint or for leaving out samples, or None without a request."""
        return None if step is None and not skipped else cls(step, skipped)


def plan_rollback(so_far: RunSoFar, request: RollbackRequest) -> Rollback:
    """Return the rollback of a run that has ended, as it is recorded when the run resumes.

    Raises UsageError if there is no such checkpoint, if the checkpoint is damaged, if the run trained some of
    the samples before the checkpoint, or if the run does not use the built-in trainer.
    """
    run, saved = so_far.run, so_far.saved
    if so_far.plan.workload.is_command:
        raise UsageError(
            f"{run.shown} runs a command, which chooses its checkpoint and its samples itself",
            hint="omit --from-step and --skip-samples",
        )
    steps = {checkpoint.step: checkpoint for checkpoint in saved}
    step = so_far.step if request.step is None else request.step
    if step and step not in steps:
        there = f"its checkpoints are at the steps {', '.join(map(str, steps))}" if steps else "it has none"
        raise UsageError(
            f"{run.shown} has no checkpoint of step {step}",
            hint=f"{there}; `trainkit ckpt ls {run.quoted}` shows all checkpoints",
        )
    if step and (damage := find_damage(steps[step])):
        raise UsageError(
            f"{steps[step].path.name} is damaged: {damage}",
            hint=f"choose another checkpoint: {', '.join(map(str, steps))}",
        )
    first = _first_untrained(steps[step]) if step else 0
    early = [(start, min(stop, first)) for start, stop in request.skipped if start < first]
    if early:
        raise UsageError(
            f"--skip-samples contains {shown_ranges(early)} from before step {step}",
            hint=f"the positions after step {step} begin at {first}; --from-step N goes back further",
        )
    newest = max(run.attempt_numbers(), default=0)
    return Rollback(step, so_far.step, newest, request.skipped, REASON, time=utc_now())


def _first_untrained(checkpoint: Checkpoint) -> int:
    """Return the position after the last sample that was trained before a checkpoint."""
    saved = SavedPosition.of(checkpoint)
    return position_of(saved.samples_seen - 1, saved.skipped) + 1


def before(so_far: RunSoFar, rollback: Rollback) -> RunSoFar:
    """Return the state of a run without the checkpoints from which the rollback goes back."""
    return replace(so_far, saved=[one for one in so_far.saved if one.step <= rollback.step])
