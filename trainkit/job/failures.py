"""Failures of ranks: the record of a worker that died without a word, and the verdict on an attempt."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

from trainkit.errors import EXIT_FAILED, TrainkitError
from trainkit.job.decision import describe_exit, signal_exit_code
from trainkit.job.preflight_error import PreflightFailed
from trainkit.rundir import AttemptDir, read_json, utc_now, write_json

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 16_384


def log_tail(path: Path) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-LOG_TAIL_LINES:]


def record_silent_death(attempt: AttemptDir, rank: int, node_rank: int, exit_code: int) -> None:
    """Write the failure of a worker that left none itself (killed, out of memory, plain exit)."""
    path = attempt.rank_error(rank)
    if path.exists():
        return
    how = describe_exit(exit_code)
    write_json(
        path,
        {
            "rank": rank,
            "node_rank": node_rank,
            "host": socket.gethostname(),
            "time": utc_now(),
            "step": None,
            "type": "exit",
            "message": f"killed by {how}" if how.startswith("SIG") else f"ended with {how}",
            "traceback": None,
            "exit_code": exit_code,
            "log_tail": log_tail(attempt.rank_log(rank)),
        },
    )


def record_refusal(attempt: AttemptDir, rank: int, node_rank: int, error: TrainkitError) -> None:
    """Write why a rank was not started."""
    write_json(
        attempt.rank_error(rank),
        {
            "rank": rank,
            "node_rank": node_rank,
            "host": socket.gethostname(),
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

    Its keys: ``rank node_rank host time step type message exit_code final``; `final` says that starting
    again cannot help.

    A rank that was killed comes before any exception: its peers may notice its closed connections
    before its agent can write the record. None when no rank left a record.
    """
    first = _first_record(attempt)
    if first is None:
        return None
    keys = ("rank", "node_rank", "host", "time", "step", "type", "message", "exit_code")
    return {**{key: first.get(key) for key in keys}, "final": bool(first.get("final"))}


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
    return min(
        records, key=lambda record: (not _was_killed(record), str(record.get("time") or "~")), default=None
    )


def _was_killed(record: dict[str, Any]) -> bool:
    """Whether a rank died of a signal that came from outside; abort is one that a rank sends itself."""
    code = record.get("exit_code")
    return isinstance(code, int) and code > 128 and code != signal_exit_code(signal.SIGABRT)


def agent_verdict(node_rank: int | None, reason: str) -> dict[str, Any]:
    """The verdict when no rank left a record: the job failed outside its workers."""
    return {
        "rank": None,
        "node_rank": node_rank,
        "host": socket.gethostname(),
        "time": utc_now(),
        "step": None,
        "type": "exit",
        "message": reason if node_rank is None else f"{reason} (agent of node {node_rank})",
    }
