"""Decides which checkpoints of a run are evaluated, and starts their evaluations.

`update` gathers the state of all evaluations, decides what to do, and does it while holding the queue lock.
Any number of processes may call `update`: the supervisor's follower, and `trainkit eval` on any host.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from trainkit.capabilities.evaluations.evaluations_plan import EvaluationsPlan
from trainkit.capabilities.evaluations.records import (
    BEST_BY,
    BY,
    Evaluation,
    State,
    best_of,
    folder_of,
    is_evaluating,
    queue_lock,
    read_evaluation,
    read_evaluations,
    seal_of,
    step_lock,
    write_evaluation,
)
from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import ensure_folder
from trainkit.job.processes import module_argv
from trainkit.locks import LockBusy, file_lock
from trainkit.run.events import log_event, read_events
from trainkit.run.manifest import published
from trainkit.run.pins import pin, pins, unpin
from trainkit.run.process import ProcessId
from trainkit.run.rundir import RunDir

MAX_STARTS = 2
"""Number of starts after which an evaluation fails if its process died each time."""
DIED = f"its process died {MAX_STARTS} times without a result"


@dataclass(frozen=True)
class Seen:
    """The state of a run's evaluations at one time."""

    evaluations: Mapping[int, Evaluation]
    checkpoints: Mapping[int, str | None]
    """Maps the step of each published checkpoint to the hash of its manifest."""
    alive: Collection[int]
    """Steps whose evaluation runs."""
    queued: Collection[int]
    """Steps whose evaluation has a job or process that has not begun to evaluate."""


@dataclass(frozen=True)
class Actions:
    """The decisions of one update of the queue, as steps in ascending order."""

    add: tuple[int, ...] = ()
    """Steps that are newly queued."""
    skip: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    fail: tuple[int, ...] = ()
    """Steps whose process has died too often."""


def chosen(commits: Iterable[int], every: int) -> list[int]:
    """Return every `every`-th step of the steps at which checkpoints were published, in this order."""
    return list(dict.fromkeys(commits))[every - 1 :: every]


def decide(
    seen: Seen,
    wanted: Sequence[int],
    max_waiting: int | None,
    *,
    one_at_a_time: bool,
    again: Collection[int] = (),
) -> Actions:
    """Decide what to do about the evaluations of a run.

    `wanted` are the steps to evaluate; those in `again` are evaluated even if they have a result. With
    `max_waiting`, the oldest waiting evaluations are skipped while more than `max_waiting` evaluations wait
    or run.
    """
    own = seen.evaluations
    add = [
        step for step in wanted if step in seen.checkpoints and _is_new(own.get(step), seen, step in again)
    ]
    is_open = [step for step, one in own.items() if one.is_open and step not in add]
    dead = [step for step in is_open if step not in seen.alive and step not in seen.queued]
    fail = [step for step in dead if own[step].num_starts >= MAX_STARTS]
    unstarted = [step for step in dead if step not in fail]
    waiting = sorted({*add, *unstarted, *seen.queued})
    num_left = len(waiting) + len(seen.alive)
    skip = waiting[: max(0, num_left - max_waiting)] if max_waiting is not None else []
    start = [step for step in waiting if step not in skip and step not in seen.queued]
    if one_at_a_time:
        is_busy = seen.alive or any(step not in skip for step in seen.queued)
        start = [] if is_busy else start[:1]
    return Actions(tuple(add), tuple(skip), tuple(start), tuple(fail))


def _is_new(known: Evaluation | None, seen: Seen, again: bool) -> bool:
    """Return whether to queue a checkpoint: it has no evaluation, or was saved again after its evaluation."""
    if known is None or known.is_open:
        return known is None
    return again or (known.seal is not None and known.seal != seen.checkpoints[known.step])


def wanted_steps(run: RunDir, plan: EvaluationsPlan) -> list[int]:
    """Return the steps that the config section `on_checkpoint` evaluates."""
    commits = (event.step for event in read_events(run, "checkpoint_commit"))
    return chosen((step for step in commits if step is not None), plan.every)


class Queue:
    """The queue of the evaluations of a run, as used by one process."""

    def __init__(self, run: RunDir, plan: EvaluationsPlan, notify: Callable[[str], None]) -> None:
        self.run, self.plan, self._notify = run, plan, notify
        self._children: list[subprocess.Popen[bytes]] = []
        self.refusal: TrainkitError | None = None
        """The error with which Slurm has refused a job. After a refusal, this process submits no other."""

    def update(
        self, wanted: Sequence[int], max_waiting: int | None, *, again: Collection[int] = ()
    ) -> dict[int, Evaluation]:
        """Start and skip evaluations as necessary, and return all evaluations of the run by step.

        The steps in `again` are evaluated even if they have been evaluated. Raises OSError if the run folder
        cannot be read or written, and SlurmError if Slurm does not answer.
        """
        with queue_lock(self.run):
            seen = self._gather()
            is_here = self.plan.sbatch is None
            self._act(seen, decide(seen, wanted, max_waiting, one_at_a_time=is_here, again=again))
            found = read_evaluations(self.run)
            keep_best(self.run, self.plan, found.values())
            return found

    def _gather(self) -> Seen:
        self._children = [child for child in self._children if child.poll() is None]
        evaluations = read_evaluations(self.run)
        checkpoints = {one.step: seal_of(one) for one in published(self.run.checkpoints_dir)}
        alive = {step for step, one in evaluations.items() if one.is_open and is_evaluating(self.run, step)}
        others = [one for step, one in evaluations.items() if one.is_open and step not in alive]
        in_slurm = _jobs_in_queue(one.job_id for one in others if one.job_id is not None)
        queued = {
            one.step
            for one in others
            if (one.job_id in in_slurm if one.job_id is not None else _may_run(one.process))
        }
        return Seen(evaluations, checkpoints, alive, queued)

    def _act(self, seen: Seen, actions: Actions) -> None:
        for step in actions.add:
            self._add(step, seen.checkpoints[step])
        for step in actions.fail:
            self._end(step, "failed", DIED)
        for step in actions.skip:
            newest = max((*actions.add, *actions.start, *seen.queued, *seen.alive), default=step)
            why = f"max_waiting is {self.plan.max_waiting}, and the checkpoint of step {newest} is newer"
            self._end(step, "skipped", why, job_id=self._job_of(seen, step))
        for step in actions.start:
            self._start(step)

    def _job_of(self, seen: Seen, step: int) -> str | None:
        known = seen.evaluations.get(step)
        return None if known is None else known.job_id

    def _add(self, step: int, seal: str | None) -> None:
        ensure_folder(folder_of(self.run, step), 0o700)
        # LockBusy means that the process of the last evaluation is about to exit, and UsageError means that
        # the checkpoint was deleted in the meantime.
        with suppress(LockBusy, UsageError), file_lock(step_lock(self.run, step), 0.0, quiet=True):
            pin(self.run, step, BY)
            new = Evaluation(step, command=self.plan.command, export=self.plan.export, seal=seal)
            write_evaluation(self.run, new)

    def _change(self, step: int, change: Callable[[Evaluation], Evaluation | None]) -> Evaluation | None:
        """Change an evaluation unless a process is evaluating; return the new state if it has changed."""
        with suppress(LockBusy, FileNotFoundError), file_lock(step_lock(self.run, step), 0.0, quiet=True):
            known = read_evaluation(self.run, step)
            changed = None if known is None else change(known)
            if changed is not None:
                write_evaluation(self.run, changed)
            return changed
        return None

    def _end(self, step: int, state: State, reason: str, job_id: str | None = None) -> None:
        if self._change(step, lambda one: replace(one, state=state, reason=reason)) is None:
            return  # A process has begun to evaluate.
        unpin(self.run, step, BY)
        if job_id is not None:
            from trainkit.capabilities.evaluations.jobs import cancel_job

            cancel_job(job_id)
        report(self.run, f"evaluation_{state}", step=step, reason=reason)

    def _start(self, step: int) -> None:
        if self.plan.sbatch is None:
            self._change(step, self._with_process)
        elif self.refusal is None:
            try:
                self._change(step, self._with_job)
            except TrainkitError as error:
                self.refusal = error
                self._notify(error.message)
                report(self.run, "evaluation_not_submitted", step=step, reason=error.message)

    def _with_process(self, one: Evaluation) -> Evaluation:
        argv = module_argv("trainkit.capabilities.evaluations.evaluator", str(self.run.path), str(one.step))
        with (folder_of(self.run, one.step) / "evaluator.log").open("ab") as log:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=os.environ
            )
        self._children.append(child)
        return replace(one, num_starts=one.num_starts + 1, process=ProcessId.of(child.pid))

    def _with_job(self, one: Evaluation) -> Evaluation:
        from trainkit.capabilities.evaluations.jobs import submit_job

        assert self.plan.sbatch is not None
        job_id = submit_job(self.run, one.step, one.num_starts + 1, self.plan.sbatch, self._notify)
        return replace(one, num_starts=one.num_starts + 1, job_id=job_id, process=None)


def _may_run(process: ProcessId | None) -> bool:
    """Return False if there is no process or it has ended; a process on another host may still run."""
    return process is not None and process.alive() is not False


def _jobs_in_queue(job_ids: Iterable[str]) -> Collection[str]:
    if not (named := list(job_ids)):
        return ()
    from trainkit.capabilities.evaluations.jobs import jobs_in_queue

    return jobs_in_queue(named)


def keep_best(run: RunDir, plan: EvaluationsPlan, evaluations: Iterable[Evaluation]) -> None:
    """Pin the best checkpoint so far, and unpin the one before; the caller must hold the `queue_lock`."""
    if plan.metric is None:
        return
    there = {checkpoint.step for checkpoint in published(run.checkpoints_dir)}
    best = best_of((one for one in evaluations if one.step in there), plan.metric, plan.mode)
    if best is None:
        return
    pinned = [step for step, holders in pins(run).items() if BEST_BY in holders]
    if best.step not in pinned:
        with suppress(UsageError):  # The checkpoint was deleted in the meantime.
            pin(run, best.step, BEST_BY, metric=plan.metric, value=best.metrics[plan.metric])
    for step in pinned:
        if step != best.step:
            unpin(run, step, BEST_BY)


def report(run: RunDir, event: str, **values: object) -> None:
    """Log an event about an evaluation for the newest attempt."""
    log_event(run, run.latest_number() or 1, event, **values)
