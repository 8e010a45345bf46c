"""Debuggers in ranks: `breakpoint()` in every run, `trainkit run --debug` and `trainkit debug`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Part

if TYPE_CHECKING:
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class DebugPlan(Part):
    """A run in the debugger."""

    CAPABILITY = "debugger"
    rank: int
    """The rank that is debugged; the others run on."""
    mode: str
    """``pdb``, ``post-mortem`` or ``debugpy``."""
    port: int | None = None
    """Where debugpy listens."""

    @property
    def words(self) -> str:
        """As a variable of the environment says it."""
        return " ".join(str(value) for value in (self.rank, self.mode, self.port) if value is not None)


class Debugger(Capability):
    """The capability: its part is in the plan of a run with ``--debug``."""

    name = "debugger"

    def environ(self, attempt: AttemptDir, plan: LaunchPlan) -> dict[str, str]:
        from trainkit.job.rank_debugger import DEBUG_VARIABLE, FOLDER_VARIABLE

        debug, folder = plan.part(DebugPlan), {FOLDER_VARIABLE: str(attempt.path / self.name)}
        return folder if debug is None else {**folder, DEBUG_VARIABLE: debug.words}


CAPABILITY = Debugger
