"""The standard input of a COMMAND: who may have it, and its content where a run keeps it.

Rank 0 of ``trainkit run`` inherits it, as a program of the shell would. A job starts later and may start
again, so ``trainkit submit`` stores it in the run folder. It must not take what others read from the same
stream, such as the shell of a script or of a loop.
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
"""How long a pipe that does not end may say nothing."""
NOTE_AFTER_S = 2.0
_BLOCK = 1 << 20
_FILE_HINT = "write it to a file and name that in the COMMAND"


def kept_input(workload: Workload, *, streams: bool) -> tuple[bytes | None, str | None]:
    """What of this process's standard input to keep for rank 0 of a command, and a line about it; None each.

    Where rank 0 inherits the stream (`streams`), only a program that is complete is kept, so that the run can
    be resumed. Raises UsageError for what is too large or does not end.
    """
    if not workload.is_command:
        return None, None
    shown = workload.argv[0]
    if os.isatty(0):
        note = f"warning: {shown} reads standard input, which is a terminal here: it gets an empty one"
        return None, note if workload.reads_input else None
    found = os.fstat(0)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
        return None, None  # a device such as /dev/null
    is_file = stat.S_ISREG(found.st_mode)
    state = 0 if is_file else _pipe_state()
    has_ended, has_data = bool(state & (select.POLLHUP | select.POLLRDHUP)), bool(state & select.POLLIN)
    if streams:
        is_complete = found.st_size <= MAX_BYTES if is_file else has_ended
        return (_content(is_file) if workload.reads_input and is_complete else None), None
    if is_file:
        has_data = found.st_size > os.lseek(0, 0, os.SEEK_CUR)
    if not workload.reads_input and _is_shared(found):
        dropped = f"note: standard input is left to the programs around this one: {shown} gets none"
        return None, f"{dropped}; `< FILE` or a pipe of its own passes it" if has_data else None
    if not (workload.reads_input or has_data):
        open_pipe = f"note: standard input is a pipe without data: {shown} gets none"
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
    """All of standard input; of a file from where it is, without moving that for others."""
    content = b"".join(_file_blocks() if is_file else _pipe_blocks())
    if len(content) > MAX_BYTES:
        limit = f"{MAX_BYTES / 1e6:.0f} MB"
        raise UsageError(f"standard input has more than {limit}, too much for a run folder", hint=_FILE_HINT)
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
                    "waiting for the end of standard input, which the run keeps", file=sys.stderr, flush=True
                )
            has_said = True
            if time.monotonic() > heard_s + SILENCE_S:
                raise UsageError(
                    f"standard input has not ended, and nothing has come from it for {SILENCE_S:g} s",
                    hint=f"{_FILE_HINT}, or add < /dev/null",
                )
            continue
        block = os.read(0, _BLOCK)
        if not block:
            return
        size, heard_s = size + len(block), time.monotonic()
        yield block


def _is_shared(found: os.stat_result) -> bool:
    """Whether a process around this one has the same standard input, as the shell of a loop has."""
    pid = os.getppid()
    while pid > 1:
        try:
            process = Path("/proc", str(pid))
            own = (process / "fd/0").stat()
            fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            name = (process / "comm").read_text(errors="replace").strip()
        except OSError:
            return False  # of another user, which has its own
        if name not in WRAPPERS:  # these only pass it on
            return os.path.samestat(own, found)
        pid = int(fields[1])
    return False
