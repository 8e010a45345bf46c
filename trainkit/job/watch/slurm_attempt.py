"""One attempt of a Slurm job as its supervisor sees it: the step that holds all ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from trainkit.errors import EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.decision import COMEBACK_SIGNAL
from trainkit.job.exit_codes import signal_exit_code
from trainkit.job.failure.records import first_exit_code
from trainkit.job.failure.verdict import first_task_end, node_of_killed_task, was_aborted
from trainkit.job.node.agent import KILL_MARGIN_S
from trainkit.job.node.preflight import SEEN_VARIABLE
from trainkit.job.node.process_group import PEER_S, ProcessGroup
from trainkit.job.node.slurm_step import slurm_job_id
from trainkit.job.node.worker_env import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from trainkit.job.outcome import Outcome
from trainkit.job.record import find_entry, is_cancelled, is_cancelled_now
from trainkit.job.watch.deleted import DeletedAttempt
from trainkit.job.watch.hangs import HangWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, read_json, read_jsonl, seconds_between
from trainkit.slurm.control import kill_step

LOOK_EVERY_S = 1.0
HEARD_S = 2.0
"""How long the first agent may take to write down a signal that Slurm has given to it."""
SRUN = 0


@dataclass(frozen=True)
class _StepEnd:
    """What is known of the end of srun without a look into the run folder, which may be away just then."""

    rank: int
    code: int
    killed: bool
    was_ending: bool
    """Whether srun had been told to end the step."""
    time: datetime


class StepWatch(ProcessGroup):
    """The srun of one attempt.

    srun ends the whole step at once on SIGTERM and SIGINT, and passes SIGUSR2 on to the tasks; so a notice
    for the ranks travels as SIGUSR2, whatever its name was here.
    """

    look_every_s = LOOK_EVERY_S

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, step: Sequence[str], seen: str) -> None:
        super().__init__()
        self.attempt = attempt
        self.plan = plan
        self.step = step
        self.seen = seen
        """What the supervisor sees of the run folder, for the agents to compare."""
        self.outcome = Outcome()
        self._hangs = HangWatch(attempt)
        self._deleted = DeletedAttempt(attempt)
        self._is_ending = False
        self._failed_s: float | None = None
        self._end: _StepEnd | None = None
        self._unheard_s: float | None = None
        """Since when there is a notice that perhaps no rank has heard."""

    def start(self) -> None:
        environ = {
            **os.environ,
            RUN_DIR_VARIABLE: str(self.attempt.run.path),
            ATTEMPT_VARIABLE: str(self.attempt.number),
            SEEN_VARIABLE: self.seen,
        }
        with self.attempt.supervisor_log.open("ab") as log:
            self.running[SRUN] = processes.start_child(
                self.step, environ=environ, output=log, keeps_mask=False
            )

    def tell(self, received: signal.Signals) -> None:
        """Nothing yet: Slurm tells the ranks too, and a second notice would hit one that is just leaving."""
        if self._unheard_s is None:
            self._unheard_s = time.monotonic()

    def told(self, received: signal.Signals) -> None:
        self.outcome.shell_was_told |= received != signal.SIGUSR2
        if self.outcome.request in (None, COMEBACK_SIGNAL):
            self.outcome.request = received.name
        self.end_within(self.plan.grace_s + 2 * KILL_MARGIN_S)

    def look_around(self) -> None:
        if self._deleted.look() or self._was_replaced():
            self._end_step()
            return
        self._pass_on()
        self._end_after_a_failure()
        if not self.outcome.hung and (hangs := self._hangs.look()):
            self.outcome.hangs = hangs
            self._end_step()

    def _was_replaced(self) -> bool:
        """Whether another start of the run has taken the next attempt, and waits for this one to leave.

        Slurm takes a host for lost whose daemon alone has died, and starts the job again elsewhere.
        """
        following = self.attempt.number + 1
        if not self.attempt.run.attempt(following).path.is_dir():
            return False  # the usual case, at the price of one look
        return "started_at" in (find_entry(self.attempt.run, following) or {})

    def _pass_on(self) -> None:
        """Tell the ranks what only this shell was told, or that a cancel came before there was a step."""
        if self._unheard_s is None:
            if self.outcome.request is None and self._is_to_save():
                self._unheard_s = time.monotonic()
            return
        if time.monotonic() < self._unheard_s + HEARD_S:
            return
        self._unheard_s = float("inf")
        if self._signal_of_the_ranks() is None and SRUN in self.running:
            os.kill(self.running[SRUN].pid, signal.SIGUSR2)
            if self.outcome.request is None:
                self.outcome.request = signal.SIGTERM.name
                self.end_within(self.plan.grace_s + 2 * KILL_MARGIN_S)

    def _is_to_save(self) -> bool:
        """Whether a person has cancelled the attempt, and not at once."""
        return is_cancelled(self.attempt) and not is_cancelled_now(self.attempt)

    def _end_after_a_failure(self) -> None:
        """End the step when a rank or its agent has failed: its peers may wait for it for ever."""
        if self._failed_s is None:
            self.outcome.killed_node = node_of_killed_task(self.attempt)
            if any(self.attempt.errors_dir.glob("rank-*.json")) or self._lost_a_task():
                self._failed_s = time.monotonic()
        elif time.monotonic() > self._failed_s + PEER_S:
            self._failed_s = float("inf")
            self._end_step()

    def _lost_a_task(self) -> bool:
        """Whether a task ended in failure that nobody asked to end; after a notice the others still save."""
        if first_task_end(self.attempt) is None:
            return False
        return self.outcome.request is None and self._signal_of_the_ranks() is None

    def _end_step(self) -> None:
        """Have srun kill what is left of the step; once is enough."""
        if SRUN in self.running and not self._is_ending:
            self._is_ending = True
            os.kill(self.running[SRUN].pid, signal.SIGTERM)
            self.end_within(KILL_MARGIN_S)

    def _kill_rest(self) -> None:
        if SRUN in self.running:
            # A host does not answer, so that srun waits. When it is killed, its tasks live on elsewhere.
            self.outcome.has_remains = True
            self._kill_tasks()
        super()._kill_rest()

    def _kill_tasks(self) -> None:
        try:
            step_id = str(read_json(self.attempt.rendezvous_file)["step_id"])
            kill_step(str(slurm_job_id()), step_id, patience_s=0.0)
        except FileNotFoundError:
            return  # they have not even met
        except (OSError, ValueError, KeyError, TrainkitError) as error:
            print(f"the tasks of the step could not be killed: {error}", flush=True)

    def lost(self, rank: int, code: int, killed: bool) -> None:
        self._end = _StepEnd(rank, code, killed, self._is_ending, datetime.now(timezone.utc))

    def settle(self) -> None:
        """Read how the step has ended, for the outcome; can be done again when the run folder was away.

        Raises OSError.
        """
        end = self._end
        if end is None:
            return
        code = end.code
        if code == EXIT_OK and was_aborted(self.attempt):
            code = signal_exit_code(signal.SIGTERM)
        # srun's code is that of whoever was killed last; what began it is in the ranks' own records.
        if not end.was_ending and not end.killed:
            self.outcome.killed_node = node_of_killed_task(self.attempt)
        began = first_exit_code(self.attempt) if code not in (EXIT_OK, EXIT_STOPPED) else None
        self.outcome.ends = [(end.rank, code if began is None else began)]
        if self.outcome.request is None:
            self.outcome.request = self._signal_of_the_ranks()
        # The agents kill what has not ended within the grace time: then srun ends with their code.
        is_late = end.killed or self._grace_is_over(end.time)
        self.outcome.out_of_time = self.outcome.request is not None and is_late

    def _signal_of_the_ranks(self) -> str | None:
        """The notice that Slurm gave to the tasks alone; the first agent wrote it down."""
        names = [event.get("signal") for event in self._signal_events()]
        strongest = [name for name in names if name != COMEBACK_SIGNAL] or names
        return str(strongest[0]) if strongest else None

    def _grace_is_over(self, now: datetime) -> bool:
        """Whether the ranks had been told to end for longer than the grace time."""
        since_s = (seconds_between(event["time"], now) or 0.0 for event in self._signal_events())
        return any(seconds >= self.plan.grace_s for seconds in since_s)

    def _signal_events(self) -> list[dict[str, Any]]:
        return [
            event
            for event in read_jsonl(self.attempt.run.events_file)
            if event.get("event") == "signal" and event.get("attempt") == self.attempt.number
        ]
