"""Keeps a command's output pipes open for processes that are still saving after the reader exited."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.job.processes import link_of, proc_file
from trainkit.run.process import PROC

DEAD_READER_S = 3.0
"""Seconds to keep a pipe open after its reader has exited. If a stop signal killed the reader, the signal may
reach the agent slightly later."""


@dataclass
class _Pipe:
    log: Path
    reader: int
    """The agent's own file descriptor for the pipe's read end."""
    others: dict[int, str]
    """Maps the pid of each other process that reads the pipe to the /proc link of its file descriptor."""
    unread_since_s: float | None = None


class OutputPipes:
    """The output pipes of processes that handle a stop signal, for example pipes to `tee`.

    Slurm may signal every process in a step, which kills `tee`. Without `tee`, the next line that a saving
    process prints would raise BrokenPipeError. To prevent a BrokenPipeError, the agent keeps its own read end
    of the pipe open. After the stop signal, the agent copies the content of pipes that have no other reader
    to the rank's log.
    """

    def __init__(self) -> None:
        self._pipes: dict[str, _Pipe] = {}

    def hold(self, writers: Iterable[int], tree: Collection[int], log: Path) -> None:
        """Open the pipes that `writers` write to and other processes in `tree` read from."""
        ends = {(pid, fd): link_of(pid, f"fd/{fd}") for pid in writers for fd in (1, 2)}
        new = {link for link in ends.values() if link.startswith("pipe:") and link not in self._pipes}
        if not new:
            return
        readers: dict[str, dict[int, str]] = {}
        for pid in tree:
            for end, link in _reading_ends(pid, new):
                readers.setdefault(link, {})[pid] = end
        for (pid, fd), link in ends.items():
            if link in readers and link not in self._pipes:
                with contextlib.suppress(OSError):  # the process has just exited
                    own = os.open(PROC / str(pid) / "fd" / str(fd), os.O_RDONLY | os.O_NONBLOCK)
                    self._pipes[link] = _Pipe(log, own, readers[link])

    def poll(self, *, has_stop_signal: bool) -> bool:
        """Copy pipes that have lost their reader to the log, or close them if there was no stop signal.

        Returns whether any pipes remain open.
        """
        is_unread = False
        for link, pipe in list(self._pipes.items()):
            if any(link_of(pid, end) == link for pid, end in pipe.others.items()):
                continue
            pipe.unread_since_s = pipe.unread_since_s or time.monotonic()
            # Without a stop signal, the writer must see the broken pipe as usual, for example if the reader
            # is `head`.
            is_recent = time.monotonic() < pipe.unread_since_s + DEAD_READER_S
            is_open = _append(pipe) if has_stop_signal else is_recent
            is_unread |= is_open
            if not is_open:
                os.close(pipe.reader)
                del self._pipes[link]
        return is_unread


def _reading_ends(pid: int, links: Collection[str]) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):  # the process has exited
        for file in (PROC / str(pid) / "fd").iterdir():
            if (link := link_of(pid, f"fd/{file.name}")) in links:
                flags = proc_file(pid, f"fdinfo/{file.name}").partition(b"flags:")[2].split()
                if flags and int(flags[0], 8) & os.O_ACCMODE == os.O_RDONLY:
                    yield f"fd/{file.name}", link


def _append(pipe: _Pipe) -> bool:
    """Append a pipe's content to the log; return whether more content may follow."""
    with contextlib.suppress(BlockingIOError):
        while read := os.read(pipe.reader, 65536):
            with (
                contextlib.suppress(OSError),
                pipe.log.open("ab") as log,
            ):  # writing fails on a full disk
                log.write(read)
        return False
    return True
