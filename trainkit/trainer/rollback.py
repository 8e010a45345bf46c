"""Plan and record a rollback that the ranks decide on, for example after a loss spike."""

from __future__ import annotations

from trainkit.capability import GoBack
from trainkit.formats import plural
from trainkit.run.files import utc_now
from trainkit.run.manifest import find_damage, published
from trainkit.run.rollbacks import (
    Rollback,
    SavedPosition,
    in_line,
    position_of,
    read_rollbacks,
    write_rollbacks,
)
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.checkpoint.state import TrainingState


def plan_rollback(attempt: AttemptDir, state: TrainingState, request: GoBack) -> Rollback | str:
    """Record the rollback of a run, and return it; return a description of the problem if there is none.

    The run goes back to the newest checkpoint before the requested step whose files seem to be intact, and
    leaves out all samples that were trained between this checkpoint and `state`. Only rank 0 calls this
    function. Raises OSError if the record cannot be written.
    """
    run = attempt.run
    rollbacks = read_rollbacks(run)
    # A rollback that a user requests starts the count anew.
    requested = [index for index, item in enumerate(rollbacks, 1) if not item.is_automatic]
    count = len(rollbacks) - max(requested, default=0)
    if count >= request.max_times:
        return f"the run has already gone back {plural(count, 'time')} ({request.limited_by})"
    there = in_line(published(run.checkpoints_dir), rollbacks)
    before = [one for one in there if one.step < request.before_step]
    chosen = next((one for one in reversed(before) if not find_damage(one, reads_tensors=False)), None)
    if chosen is None:
        return f"no intact checkpoint from before step {request.before_step} is left"
    saved = SavedPosition.of(chosen)
    first = position_of(saved.samples_seen - 1, saved.skipped) + 1
    stop = position_of(state.samples_seen - 1, state.skipped) + 1
    rollback = Rollback(
        chosen.step,
        state.step,
        attempt.number,
        ((first, stop),),
        request.why,
        is_automatic=True,
        time=utc_now(),
    )
    write_rollbacks(run, [*rollbacks, rollback])
    return rollback
