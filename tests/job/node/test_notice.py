"""Whom a notice is for, in real trees of small processes."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.programs import wait_for
from trainkit.job.node.notice import takers
from trainkit.job.processes import children_by_parent, proc_file, signal_all, tree_of

HANDLES = """
import signal, sys, time
for name in sys.argv[2:]:
    signal.signal(getattr(signal, name), lambda *_: None)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
WAITS = """
import signal, sys, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
threading.Thread(target=signal.sigwait, args=({signal.SIGTERM},), daemon=True).start()
open(sys.argv[1], "w").close()
time.sleep(600)
"""
FORKS = """
import os, signal, sys, time
if os.fork() == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as what a rank forks
    open(sys.argv[1], "w").close()
time.sleep(600)
"""

Tree = Callable[..., tuple[int, dict[int, signal.Signals]]]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    """Start a shell script, in which {name} is the line of a Python, and return its pid and its takers."""
    roots: list[subprocess.Popen[bytes]] = []

    def start(script: str, **bodies: tuple[str, ...]) -> tuple[int, dict[int, signal.Signals]]:
        lines = {
            name: shlex.join([sys.executable, "-I", "-c", body[0], str(tmp_path / name), *body[1:]])
            for name, body in bodies.items()
        }
        root = subprocess.Popen(["bash", "-c", script.format(**lines)])
        roots.append(root)
        wait_for(lambda: all((tmp_path / name).exists() for name in bodies))
        return root.pid, takers([root.pid], children_by_parent())

    yield start
    for root in roots:
        signal_all([pid for pid in tree_of(root.pid) if pid != root.pid], signal.SIGKILL)
        root.kill()
        root.wait()


def names(found: dict[int, signal.Signals], tmp_path: Path) -> dict[str, signal.Signals]:
    """The signals by the name of the process, of which a shell has none."""

    def name(pid: int) -> str:
        words = proc_file(pid, "cmdline").decode().split("\0")
        return next((Path(word).name for word in words if Path(word).parent == tmp_path), "shell")

    return {name(pid): number for pid, number in found.items()}


TERM, USR2 = signal.SIGTERM, signal.SIGUSR2
CRASHES = ("SIGBUS", "SIGSEGV", "SIGFPE")


@pytest.mark.parametrize(
    ("script", "bodies", "expected"),
    [
        ("{a}; true", {"a": (HANDLES, "SIGTERM", "SIGUSR2")}, {"a": TERM}),
        ("{a} | {b}", {"a": (HANDLES, "SIGUSR2"), "b": (HANDLES, "SIGHUP")}, {"a": USR2}),
        ("{a} & {b}; wait", {"a": (HANDLES, "SIGTERM"), "b": (WAITS,)}, {"a": TERM, "b": TERM}),
        ("trap true TERM; {a} & wait", {"a": (HANDLES, "SIGTERM")}, {"shell": TERM}),
        ("trap true TERM; {a}; true", {"a": (HANDLES, "SIGTERM")}, {"shell": TERM, "a": TERM}),
        ("{a}; true", {"a": (HANDLES, "SIGTERM", *CRASHES)}, {}),
        ("{a}; true", {"a": (HANDLES, "SIGTERM", "SIGILL", *CRASHES)}, {"a": TERM}),
        ("{a}; true", {"a": (FORKS,)}, {}),
    ],
    ids=["below", "pipe", "sigwait", "trap", "trap that waits", "data worker", "faulthandler", "fork"],
)
def test_takers(
    tree: Tree,
    tmp_path: Path,
    script: str,
    bodies: dict[str, tuple[str, ...]],
    expected: dict[str, signal.Signals],
) -> None:
    _, found = tree(script, **bodies)
    assert names(found, tmp_path) == expected
