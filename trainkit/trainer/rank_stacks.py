"""The stacks of this rank: added to its file in the attempt's folder, or given to who asks for them.

They are taken in Python, by a thread that holds the interpreter's lock: other threads then stand still.
faulthandler's C handler takes them while the others run, and crashed a busy process once in some 250 times;
it is there for SIGQUIT, the last resort for a rank whose lock is never free.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from logging import getLogger
from types import FrameType

from trainkit.job.signals import StopRequest
from trainkit.rundir import AttemptDir, read_json, utc_now, write_json
from trainkit.trainer.progress import Pulse

log = getLogger(__name__)


def thread_stacks() -> dict[str, list[str]]:
    """The frames of each thread but the calling one, the innermost first; the main thread comes first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(frames, key=lambda ident: ident != main)
    # What C++ started has no name; and two threads may have the same.
    return {f"{names.get(ident, 'native')} {ident:#x}": _walk(frames[ident]) for ident in order}


def training_stack() -> list[str]:
    """The frames of the main thread, which trains, the innermost first."""
    return _walk(sys._current_frames()[threading.main_thread().ident or 0])


def _walk(innermost: FrameType) -> list[str]:
    found = []
    frame: FrameType | None = innermost
    while frame is not None:
        found.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return found


class RankStacks:
    """The stacks of one rank."""

    def __init__(self, attempt: AttemptDir, rank: int, pulse: Pulse) -> None:
        self.file = attempt.rank_stacks(rank)
        self._attempt = attempt
        self._rank = rank
        self._pulse = pulse

    def listen(self, stop: StopRequest) -> None:
        """From now on answer who asks where this rank is, and SIGQUIT."""
        try:
            self.file.parent.mkdir(exist_ok=True)
            # The C handler cannot open a file when it is called.
            faulthandler.register(signal.SIGQUIT, self.file.open("a"), all_threads=True)
        except OSError as error:
            log.error(f"stacks of this rank could not be written to {self.file} ({error})")
        threading.Thread(target=self._answer, args=(stop,), name="stacks", daemon=True).start()

    def append(self, why: str) -> None:
        """Add the stacks of all threads to the file."""
        text = [f"# {utc_now()} rank {self._rank} on {socket.gethostname()}: {why}"]
        for name, frames in thread_stacks().items():
            text += ["", f"Thread {name} (most recent call first):", *(f"  {frame}" for frame in frames)]
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write("\n".join(text) + "\n\n")

    def close(self) -> None:
        """Remove the file when nothing was written to it."""
        faulthandler.unregister(signal.SIGQUIT)
        with contextlib.suppress(OSError):
            if self.file.stat().st_size == 0:
                self.file.unlink()

    def _answer(self, stop: StopRequest) -> None:
        while True:
            stop.stacks_requested.wait()
            stop.stacks_requested.clear()
            try:
                self._reply()
            except (OSError, ValueError) as error:
                log.error(f"where this rank is could not be answered ({error})")

    def _reply(self) -> None:
        """Answer the requests in the attempt's folder; `job.stacks` says how they look."""
        for request in sorted((self.file.parent / "requests").glob("*.json")):
            reply = request.with_suffix("") / f"rank-{self._rank:04d}.json"
            if reply.exists() or read_json(request)["rank"] not in (None, self._rank):
                continue
            step, phase, _, since_s = self._pulse.position
            answer = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "how": "asked"}
            answer |= {"step": step, "phase": phase, "since_s": round(time.monotonic() - since_s, 3)}
            write_json(reply, {**answer, "threads": thread_stacks()})
