"""Lets users debug ranks, with `breakpoint()` in any run, `trainkit run --debug` or `trainkit debug`."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Part

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.history import PlanRecord
    from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class DebugPlan(Part):
    """Part of the launch plan for a run with ``--debug``."""

    CAPABILITY = "debugger"
    rank: int
    """The rank to debug, which is the only rank that runs with a debugger."""
    mode: str
    """One of ``pdb``, ``post-mortem`` and ``debugpy``."""
    port: int | None = None
    """Port on which debugpy listens; None unless `mode` is ``debugpy``."""

    @property
    def words(self) -> str:
        """Return the plan as the value of an environment variable: `RANK MODE [PORT]`."""
        return " ".join(str(value) for value in (self.rank, self.mode, self.port) if value is not None)


class Debugger(Capability):
    """Provides the debugger for ranks. Only the launch plans of runs with ``--debug`` have a `DebugPlan`."""

    name = "debugger"
    at_start = f"{Path(__file__).parent}/rank_start.py"

    def environ(self, attempt: AttemptDir, plan: LaunchPlan) -> dict[str, str]:
        from trainkit.capabilities.debugger.rank_debugger import DEBUG_VARIABLE, FOLDER_VARIABLE

        debug, folder = plan.part(DebugPlan), {FOLDER_VARIABLE: str(attempt.path / self.name)}
        return folder if debug is None else {**folder, DEBUG_VARIABLE: debug.words}

    def waits(self, plan: PlanRecord) -> str:
        if self.name in plan.parts:
            return "run with --debug"
        return "a rank is waiting at breakpoint() for `trainkit debug`, or is being debugged"

    def in_trainer(
        self, plan: LaunchPlan, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[Exception], None] | None:
        from trainkit.capabilities.debugger.rank_debugger import TERMINAL_VARIABLE, mode_of_rank, stop_at

        mode = mode_of_rank()
        if not os.environ.get("PYTHONBREAKPOINT") and mode not in ("off", "debugpy"):
            terminal = os.environ.get(TERMINAL_VARIABLE) if plan.world_size == 1 and not mode else None
            sys.breakpointhook = lambda *args, **kwargs: stop_at(sys._getframe(1), terminal, unwatched)

        def stop(error: Exception) -> None:
            from bdb import BdbQuit

            if not isinstance(error, BdbQuit):
                traceback.print_exception(error)
                stop_at(error.__traceback__, around=unwatched)

        return stop if mode == "post-mortem" else None


CAPABILITY = Debugger
