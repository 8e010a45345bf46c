"""How an attempt ended, as the supervisor saw it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.errors import EXIT_OK, EXIT_STOPPED


@dataclass
class Outcome:
    """How an attempt ended."""

    request: str | None = None
    """The signal that asked the job to stop, if one did."""
    out_of_time: bool = False
    """Some were still running when the grace time was over."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(node rank, exit code) in the order in which the agents ended."""

    @property
    def exit_codes(self) -> list[int]:
        return [code for _, code in self.ends]

    @property
    def first_failure(self) -> int | None:
        """Node rank of the agent that failed first."""
        return next((rank for rank, code in self.ends if code not in (EXIT_OK, EXIT_STOPPED)), None)
