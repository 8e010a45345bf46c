"""Provides a real terminal for the input of a test: a window of a separate tmux server."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

# Continuous integration installs tmux, and the tests fail there without it.
needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None and "CI" not in os.environ, reason="tmux is not installed"
)

_NUMBERS = itertools.count()


class Tmux:
    """A shell in a window of `width` x `height` characters. The context manager ends the tmux server."""

    def __init__(
        self, folder: Path, width: int, height: int, cwd: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        # A server that is about to exit still accepts a client on its socket, so no two windows share one.
        self._socket, self._num_asked = folder / f"tmux{next(_NUMBERS)}", 0
        shell = ["env", "PS1=$ ", "bash", "--norc", "--noprofile"]
        size = ["-x", str(width), "-y", str(height)]
        self._run("new-session", "-d", *size, "-c", str(cwd), shlex.join(shell), environ=environ)
        try:
            self.wait_for(r"^\$$")
        except AssertionError:
            self._run("kill-server")
            raise

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *error: object) -> None:
        self._run("kill-server")

    def _run(self, *args: str, environ: Mapping[str, str] | None = None) -> str:
        argv = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *args]
        env = None if environ is None else dict(environ)
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"
        return done.stdout

    def keys(self, *names: str) -> None:
        """Press keys by tmux's names: ``Enter``, ``Escape``, ``C-c``, or a character."""
        self._run("send-keys", *names)

    def type(self, argv: Sequence[str]) -> None:
        """Type a command and press enter."""
        self.enter(shlex.join(argv))

    def enter(self, line: str) -> None:
        """Type a line and press enter."""
        self._run("send-keys", "-l", line)
        self.keys("Enter")

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(height))

    @property
    def screen(self) -> str:
        """Return the text in the window, with a line per row."""
        return self._run("capture-pane", "-p")

    def ask(self, command: str) -> str:
        """Return the output of a command in the shell that runs in the window."""
        # The typed command shows on the screen too, so it must differ from the printed marker.
        self._num_asked += 1
        self.enter(f"echo BEG''IN{self._num_asked}; {command}; echo E''ND{self._num_asked}")
        printed = rf"(?s)^BEGIN{self._num_asked} *\n(.*)^END{self._num_asked}\b"
        return self.wait_for(printed, options=("-J", "-S", "-"))[1].strip()

    @property
    def screen_with_colours(self) -> str:
        """Return the screen with the escape sequences of its colours."""
        return self._run("capture-pane", "-p", "-e")

    def close_window(self) -> None:
        """Close the window, as its button does. Another window keeps the server running."""
        self._run("new-window", "-d")
        self._run("kill-window", "-t", ":0")

    @property
    def is_alternate(self) -> bool:
        """Return whether a program uses the alternate screen."""
        return self._run("display-message", "-p", "#{alternate_on}").strip() == "1"

    def pid_of(self, word: str) -> int:
        """Return the process of the window's shell whose command line contains a word."""
        shell = self._run("display-message", "-p", "#{pane_pid}").strip()
        listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", shell], capture_output=True, text=True)
        return next(int(line.split()[0]) for line in listed.stdout.splitlines() if word in line)

    def wait_for(self, pattern: str, timeout_s: float = 30.0, options: Sequence[str] = ()) -> re.Match[str]:
        """Wait until the window shows a pattern. `options` of capture-pane show more of the window."""
        deadline_s = time.monotonic() + timeout_s
        while not (
            found := re.search(pattern, screen := self._run("capture-pane", "-p", *options), re.MULTILINE)
        ):
            assert time.monotonic() < deadline_s, (
                f"{pattern!r} does not show within {timeout_s:g} s:\n{screen}"
            )
            time.sleep(0.05)
        return found

    def settled(self, expected: str, view: Callable[[str], object], timeout_s: float = 10.0) -> object:
        """Wait until the view of the window equals `expected`, and return the last view at the time limit."""
        deadline_s = time.monotonic() + timeout_s
        while (seen := view(self.screen)) != view(expected) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return seen


def normalized(screen: str) -> str:
    """Return a screen without numbers, curves and their spaces, which differ between runs."""
    lines = []
    for line in screen.splitlines():
        line = re.sub(r"[▁▂▃▄▅▆▇█░]+", "~", line)
        line = re.sub(r"\d[\d.,]*(?:e-?\d+)?", "N", line)
        line = re.sub(r"\b(?:N[dhms])+N?[dhms]?\b", "T", line)
        lines.append(re.sub(r" {2,}", "  ", line).rstrip())
    return "\n".join(lines) + "\n"
