"""Decide which standard input a COMMAND receives, and store its content in the run folder if needed.

For ``trainkit run``, rank 0 inherits standard input, like a program started by a shell. A job starts later
and may restart, so ``trainkit submit`` stores the content in the run folder. trainkit must not consume input
that is meant for another process, such as a shell that reads a script from the same stream.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.plan.workload import WRAPPERS, Workload

MAX_BYTES = 64_000_000
SILENCE_S = 60.0
"""Maximum number of seconds to wait for data from an open pipe."""
NOTE_AFTER_S = 2.0
_BLOCK = 1 << 20
_FILE_HINT = "write the input to a file, and pass the file to the COMMAND as an argument"


def kept_input(workload: Workload, *, streams: bool) -> tuple[bytes | None, str | None]:
    """Return (standard input to store for rank 0 of a COMMAND, message for the user); each may be None.

    With `streams`, rank 0 inherits the stream, and the content is stored only if it is complete and the
    command line shows that the COMMAND reads it. A run whose input is stored can be resumed with the same
    input. Raises UsageError if the content is too large or the stream does not end.
    """
    if not workload.is_command:
        return None, None
    shown = workload.argv[0]
    if os.isatty(0):
        note = f"warning: standard input is a terminal, so {shown}, which reads it, gets an empty input"
        return None, note if workload.reads_input else None
    found = os.fstat(0)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
        return None, None  # Standard input is a device such as /dev/null.
    is_file = stat.S_ISREG(found.st_mode)
    state = 0 if is_file else _pipe_state()
    has_ended, has_data = bool(state & (select.POLLHUP | select.POLLRDHUP)), bool(state & select.POLLIN)
    if streams:
        is_complete = found.st_size <= MAX_BYTES if is_file else has_ended
        return (_content(is_file) if workload.reads_input and is_complete else None), None
    if is_file:
        has_data = found.st_size > os.lseek(0, 0, os.SEEK_CUR)
    if not workload.reads_input and _is_shared(found):
        dropped = (
            f"note: {shown} gets no standard input, because the calling program also reads standard input"
        )
        return None, f"{dropped}; to pass input, use `< FILE` or a pipe" if has_data else None
    if not (workload.reads_input or has_data):
        open_pipe = f"note: standard input is a pipe without data, so {shown} gets no input"
        return None, None if is_file or has_ended else open_pipe
    content = _content(is_file)
    if not content:
        return None, None
    return content, f"  standard input      {len(content):,} bytes for rank 0, kept in the run folder"


def _pipe_state() -> int:
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLRDHUP)
    return next((events for _, events in poll.poll(0)), 0)


def _content(is_file: bool) -> bytes:
    """Return all of standard input; for a file, start at its current position and restore that position."""
    content = b"".join(_file_blocks() if is_file else _pipe_blocks())
    if len(content) > MAX_BYTES:
        limit = f"{MAX_BYTES / 1e6:.0f} MB"
        raise UsageError(
            f"standard input has more than {limit}, too much to store in a run folder", hint=_FILE_HINT
        )
    return content


def _file_blocks() -> Iterator[bytes]:
    position, end = os.lseek(0, 0, os.SEEK_CUR), os.lseek(0, 0, os.SEEK_CUR) + MAX_BYTES
    while position <= end and (block := os.pread(0, _BLOCK, position)):
        position += len(block)
        yield block


def _pipe_blocks() -> Iterator[bytes]:
    size, heard_s, has_said = 0, time.monotonic(), False
    while size <= MAX_BYTES:
        if not select.select([0], [], [], NOTE_AFTER_S)[0]:
            if not has_said:
                print(
                    "waiting for the end of standard input, which is stored in the run folder",
                    file=sys.stderr,
                    flush=True,
                )
            has_said = True
            if time.monotonic() > heard_s + SILENCE_S:
                raise UsageError(
                    f"standard input is still open, but no data has arrived for {SILENCE_S:g} s",
                    hint=f"{_FILE_HINT}, or add < /dev/null",
                )
            continue
        block = os.read(0, _BLOCK)
        if not block:
            return
        size, heard_s = size + len(block), time.monotonic()
        yield block


def _is_shared(found: os.stat_result) -> bool:
    """Return whether a parent process, such as a shell that executes a loop, has the same standard input."""
    pid = os.getppid()
    while pid > 1:
        try:
            process = Path("/proc", str(pid))
            own = (process / "fd/0").stat()
            fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            name = (process / "comm").read_text(errors="replace").strip()
        except OSError:
            return False  # The process belongs to another user and therefore has a different standard input.
        if name not in WRAPPERS:  # Wrappers only pass on their standard input.
            return os.path.samestat(own, found)
        pid = int(fields[1])
    return False
