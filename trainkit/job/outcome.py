"""How an attempt ended, as the supervisor saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job.decision import Cause
from trainkit.job.watch.hangs import HangRecord


@dataclass
class Outcome:
    """How an attempt ended."""

    request: str | None = None
    """The signal that asked the job to stop, if one did."""
    shell_was_told: bool = False
    """The supervisor got that signal too; at a preemption Slurm tells only the steps."""
    cause: Cause | None = None
    """What stood behind the request; None when a person wants the job to end."""
    not_started: str | None = None
    """srun's words when Slurm could not start the step."""
    hangs: list[HangRecord] = field(default_factory=list)
    """What ranks reported that came no further, read before they were ended: losing a peer moves them on."""
    lost_nodes: tuple[str, ...] = ()
    """Hosts that do not answer any more."""
    killed_node: int | None = None
    """Node rank of the agent that was killed before anything else ended."""
    has_remains: bool = False
    """srun had to be killed, so that Slurm may take the step for running still."""
    out_of_time: bool = False
    """Some were still running when the grace time was over."""
    verdict: dict[str, Any] | None = None
    """What went wrong first; None until it is judged, and when nothing did."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(node rank, exit code) in the order in which the agents ended."""

    @property
    def hung(self) -> bool:
        return bool(self.hangs)

    @property
    def exit_codes(self) -> list[int]:
        return [code for _, code in self.ends]

    @property
    def first_failure(self) -> int | None:
        """Node rank of the agent that failed first."""
        return next((rank for rank, code in self.ends if code not in (EXIT_OK, EXIT_STOPPED)), None)
