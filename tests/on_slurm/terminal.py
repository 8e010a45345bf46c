"""A terminal in which a test types."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program with a terminal of its own; a context manager that ends it."""

    def __init__(self, argv: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> None:
        self.screen = ""
        """What the program has printed so far, with what was typed."""
        self._keyboard, inner = os.openpty()

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        environ = {**environ, "TERM": "dumb", "PS1": "$ "}
        self.program = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=environ,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            preexec_fn=take_terminal,
        )
        os.close(inner)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._keyboard)  # a terminal that closes sends SIGHUP
        try:
            self.program.wait(timeout=90)
        except subprocess.TimeoutExpired:
            self.program.kill()
            raise

    def type(self, line: str) -> None:
        """A line and the enter key."""
        os.write(self._keyboard, line.encode() + b"\n")

    def wait_for(self, pattern: str, timeout_s: float = 30) -> re.Match[str]:
        """Wait until the screen matches a pattern; what is matched counts as read."""
        deadline_s = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.screen)):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{pattern!r} did not show within {timeout_s:g} s:\n{self.screen}"
            self._read(left_s)
        self.screen = self.screen[match.end() :]
        return match

    def ask(self, command: str) -> str:
        """What a command prints in the shell that runs here."""
        # What is typed shows on the screen too: as other words than what is printed.
        self.type(f"echo BEG''IN; {command}; echo E''ND")
        return self.wait_for(r"(?s)BEGIN\n(.*)END\n")[1].strip()

    def close(self, timeout_s: float = 20) -> int:
        """Type `exit`; the exit code of the program."""
        self.type("exit")
        deadline_s = time.monotonic() + timeout_s
        while self.program.poll() is None and time.monotonic() < deadline_s:
            self._read(0.1)
        return self.program.wait(timeout=0)

    def _read(self, timeout_s: float) -> None:
        if select.select([self._keyboard], [], [], timeout_s)[0]:
            try:
                text = os.read(self._keyboard, 65_536).decode(errors="replace")
            except OSError:
                text = ""  # the program has ended
                time.sleep(0.05)
            self.screen += ESCAPES.sub("", text).replace("\r", "")
