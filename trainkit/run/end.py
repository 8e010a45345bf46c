"""end.json: how an attempt ended, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.run.files import read_json
from trainkit.run.rundir import AttemptDir

RESUME_ACTIONS = ("restart", "requeue", "resubmit", "follow_up")
"""The actions in end.json after which the run resumes without a command."""


ACTIONS = ("finished", "stopped", "failed", *RESUME_ACTIONS)
"""The values of `action` in end.json."""


KILLED = "killed by cancel --now"
"""The reason, in end.json, of an end without a save."""


WITHOUT_RECORD = "ended without a record"


def read_end(attempt: AttemptDir) -> dict[str, Any] | None:
    """The content of end.json; None while the attempt runs and if its supervisor was killed."""
    try:
        end = read_json(attempt.end_file)
    except (OSError, ValueError):
        return None
    return end if isinstance(end, dict) else None


def will_resume(end: Mapping[str, Any]) -> bool:
    """Whether the run resumes automatically after this end.json."""
    return end.get("action") in RESUME_ACTIONS


def is_guessed(end: Mapping[str, Any]) -> bool:
    """Whether a later start of the job wrote this end.json, since the attempt left no record of its end."""
    return str(end.get("reason")).startswith(WITHOUT_RECORD)


def end_line(attempt: int, action: str, reason: str) -> str:
    """The line of its log with which an attempt ends: what Slurm writes below it is about a later one."""
    return f"attempt {attempt}: {action}: {reason}"


def is_end_line(line: str, attempt: int) -> bool:
    """Whether a line of a log is the `end_line` of an attempt."""
    return line.startswith(tuple(end_line(attempt, action, "") for action in ACTIONS))
