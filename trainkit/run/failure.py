"""The failure of a rank, a host or a job: `verdict` in end.json, and what ranks record of themselves."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, field
from typing import Any

SIGNALLED = 128
"""The exit code of a process that signal n killed is SIGNALLED + n."""


@dataclass(frozen=True)
class RankFailure:
    """A failure; None where a value is missing or unknown."""

    rank: int | None = None
    node_rank: int | None = None
    host: str | None = None
    time: str | None = None
    step: int | None = None
    type: str | None = None
    """An exception, ``exit``, ``RankKilled``, ``HostLost``, ``Hang`` or ``OutOfMemory``."""
    message: str | None = None
    exit_code: int | None = None
    hint: str | None = None
    final: bool | None = None
    """Whether a restart cannot help."""
    node: bool | None = None
    """Whether the run may work on another node."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else was recorded, such as the traceback."""

    @property
    def was_signalled(self) -> bool:
        """Whether a signal from outside killed a process; a process raises SIGABRT itself."""
        code = self.exit_code
        return code is not None and code > SIGNALLED and code != SIGNALLED + signal.SIGABRT

    @property
    def line(self) -> str:
        """It as the first failure, on one line: rank, host, step and cause."""
        if self.type == "HostLost":
            return f"host {self.host} failed first: {self.message}"
        subject = "the job" if self.rank is None else f"rank {self.rank}"
        where = f" on {self.host}" if self.host else ""
        when = "" if self.step is None else f" at step {self.step}"
        cause = self.message if self.type == "exit" else f"{self.type}: {self.message}"
        return f"{subject} failed first{where}{when}: {cause}"

    def to_dict(self) -> dict[str, Any]:
        """The failure as JSON, without what else was recorded."""
        values = asdict(self)
        del values["more"]
        optional = ("hint", "final", "node")
        return {key: value for key, value in values.items() if key not in optional or value is not None}


def signal_name(number: int) -> str:
    """The name of a signal, also of one that this machine does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
