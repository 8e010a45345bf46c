"""Failures of ranks: the record of a worker that died without a word, and the verdict on an attempt."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.errors import EXIT_FAILED, EXIT_STUCK, TrainkitError
from trainkit.job.exit_codes import describe_exit, signal_exit_code
from trainkit.job.node.preflight import PreflightFailed
from trainkit.job.node.process_group import PEER_S
from trainkit.job.rank_env import own_host
from trainkit.job.watch.hangs import read_hangs
from trainkit.rundir import AttemptDir, as_utc, parse_time, read_json, seconds_between, utc_now, write_json

_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""What torch writes before the lines of a traceback where there are several ranks."""
LAUNCHER_ERROR = "ChildFailedError"
"""What torchrun raises when a rank failed; it says nothing about why."""
LAST_WORDS = 20
"""So many lines before its end, an exception is what ended the program and not one that it got over."""
FINAL = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")


@dataclass(frozen=True)
class Raised:
    """An exception that nobody caught."""

    type: str
    message: str

    @property
    def is_final(self) -> bool:
        """Whether it would be raised again if the program was started again."""
        return self.type in FINAL


def last_exception(lines: Sequence[str]) -> Raised | None:
    """The exception whose traceback ends what a program printed; None when it ended without one."""
    plain = [_RANK_PREFIX.sub("", line, count=1) for line in lines]
    launched = False
    for index in range(len(plain) - 1, 0, -1):
        found = _EXCEPTION.fullmatch(plain[index])
        if found is None or not _follows_a_traceback(plain, index):
            continue
        if found[1].endswith(LAUNCHER_ERROR):
            launched = True
        elif launched or index >= len(plain) - LAST_WORDS:
            return Raised(found[1], found[2] or "")
        else:
            return None
    return None


def _follows_a_traceback(lines: Sequence[str], index: int) -> bool:
    """Whether the lines above are indented, and one of them names a place in a file."""
    for line in reversed(lines[:index]):
        if not line.startswith(" "):
            return False
        if line.startswith('  File "'):
            return True
    return False


LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 16_384


def log_tail(path: Path) -> list[str]:
    """The last lines of a log; empty when there is none."""
    return _last_lines(path)[-LOG_TAIL_LINES:]


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()


def record_silent_death(
    attempt: AttemptDir, rank: int, node_rank: int, exit_code: int, out_of_memory: bool = False
) -> None:
    """Write the failure of a worker that left none itself (killed, out of memory, any other program)."""
    path = attempt.rank_error(rank)
    if path.exists():
        return
    write_json(
        path,
        {
            "rank": rank,
            "node_rank": node_rank,
            "host": own_host(),
            "time": utc_now(),
            "step": None,
            **_cause_of_death(attempt, rank, exit_code, out_of_memory),
            "traceback": None,
            "exit_code": exit_code,
            "log_tail": log_tail(attempt.rank_log(rank)),
        },
    )


def _cause_of_death(attempt: AttemptDir, rank: int, exit_code: int, out_of_memory: bool) -> dict[str, Any]:
    """What the end of a silent worker says beside its exit code: ``type message`` and what else is known."""
    how = describe_exit(exit_code)
    if out_of_memory:
        hint = "resources.mem asks for more, data.num_workers and train.device_batch_size need less"
        return {"type": "OutOfMemory", "message": f"killed by {how}: no memory was left", "hint": hint}
    if exit_code == EXIT_STUCK:
        hang = next((hang for hang in read_hangs(attempt) if hang.rank == rank), None)
        if hang is not None:
            return {"type": "Hang", "message": hang.words, "step": hang.step}
    raised = last_exception(_last_lines(attempt.rank_log(rank))) if exit_code == EXIT_FAILED else None
    if raised is not None:
        return {"type": raised.type, "message": raised.message, "final": raised.is_final}
    return {"type": "exit", "message": f"killed by {how}" if how.startswith("SIG") else f"ended with {how}"}


def record_refusal(attempt: AttemptDir, rank: int, node_rank: int, error: TrainkitError) -> None:
    """Write why a rank was not started."""
    write_json(
        attempt.rank_error(rank),
        {
            "rank": rank,
            "node_rank": node_rank,
            "host": own_host(),
            "time": utc_now(),
            "step": None,
            "type": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "traceback": None,
            "exit_code": error.exit_code,
            # Another node may do better.
            **({"node": True} if isinstance(error, PreflightFailed) and error.is_node else {}),
        },
    )


def find_verdict(attempt: AttemptDir) -> dict[str, Any] | None:
    """The failure that came first, without its traceback.

    Its keys: ``rank node_rank host time step type message exit_code final node``; `final` says that starting
    again cannot help, `node` that another node may do better.

    A rank that was killed comes before any exception: its peers may notice its closed connections
    before its agent can write the record. Those that were killed later went down with the step.
    None when no rank left a record.
    """
    first = _first_record(attempt)
    if first is None:
        return None
    keys = ("rank", "node_rank", "host", "time", "step", "type", "message", "exit_code")
    return {
        **{key: first.get(key) for key in keys},
        **{key: bool(first.get(key)) for key in ("final", "node")},
    }


def first_exit_code(attempt: AttemptDir) -> int | None:
    """The exit code of the failure that came first; None when no rank left a record."""
    first = _first_record(attempt)
    if first is None:
        return None
    code = first.get("exit_code")
    return code if isinstance(code, int) and code else EXIT_FAILED


def _first_record(attempt: AttemptDir) -> dict[str, Any] | None:
    records = []
    for path in sorted(attempt.errors_dir.glob("rank-*.json")):
        try:
            record = read_json(path)
        except (OSError, ValueError):
            continue  # cut off by a crash; the others still tell
        if isinstance(record, dict):
            records.append(record)
    records.sort(key=lambda record: str(record.get("time") or "~"))
    killed = (one for one in records if _was_killed(one) and _later_s(records[0], one) < PEER_S / 2)
    return next(killed, records[0] if records else None)


def _later_s(first: dict[str, Any], second: dict[str, Any]) -> float:
    """How much later the second record was written; 0 when one of them does not know when."""
    return seconds_between(first.get("time"), parse_time(second.get("time"))) or 0.0


def _was_killed(record: dict[str, Any]) -> bool:
    """Whether a rank died of a signal that came from outside; abort is one that a rank sends itself."""
    code = record.get("exit_code")
    return isinstance(code, int) and code > 128 and code != signal_exit_code(signal.SIGABRT)


def host_verdict(attempt: AttemptDir, lost: Sequence[str]) -> dict[str, Any]:
    """The verdict when hosts were lost: what the ranks on the others saw follows from that."""
    try:
        hosts = list(read_json(attempt.rendezvous_file)["hosts"])
    except (OSError, ValueError, KeyError):
        hosts = []
    more = f", and {', '.join(lost[1:])} neither" if len(lost) > 1 else ""
    return {
        "rank": None,
        "node_rank": hosts.index(lost[0]) if lost[0] in hosts else None,
        "host": lost[0],
        "time": utc_now(),
        "step": None,
        "type": "HostLost",
        "message": f"it does not answer any more{more}",
        "exit_code": None,
        "final": False,
    }


def dead_host_verdict(host: str, died_at: datetime | None) -> dict[str, Any]:
    """The verdict on an attempt of which nobody is left to tell, not even on its first host."""
    reason = "its host died, or its supervisor was killed"
    time = {} if died_at is None else {"time": as_utc(died_at)}
    return {**agent_verdict(None, reason), "host": host or None, "type": "HostLost", **time}


def agent_verdict(node_rank: int | None, reason: str, exit_code: int | None = None) -> dict[str, Any]:
    """The verdict when no rank left a record: the job failed outside its workers."""
    return {
        "rank": None,
        "node_rank": node_rank,
        "host": own_host(),
        "time": utc_now(),
        "step": None,
        "type": "exit",
        "message": reason if node_rank is None else f"{reason} (agent of node {node_rank})",
        "exit_code": exit_code,
        "final": False,
    }
