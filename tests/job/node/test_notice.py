"""Tests which processes a stop signal is forwarded to, in real trees of small processes."""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import FORWARDS, PASSES_NOTHING_ON, wait_for
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.job.node.stop_signal import CommandStopSignal, takers
from trainkit.job.processes import (
    PR_SET_CHILD_SUBREAPER,
    adopt_orphans,
    children_by_parent,
    ended,
    exit_code_of_zombie,
    is_running,
    proc_file,
    signal_all,
    tree_of,
)
from trainkit.plan.workload import Workload

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
    """Return a function that starts a shell script, and returns its pid and the processes to signal.

    A {name} in the script stands for the command line of a Python process.
    """
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
    """Return the signals by the name of their process. A shell has no name."""

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
def test_takers(tree, tmp_path, script, bodies, expected):
    _, found = tree(script, **bodies)
    assert names(found, tmp_path) == expected


COUNTS = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
open("ready", "w").write(str(os.getpid()))
while not heard:
    time.sleep(0.01)
time.sleep(0.2)
open("part", "w").write(str(len(heard)))
os.rename("part", "heard")
sys.exit(75)
"""
HANDLES_ONLY = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
SENDS_TWICE = """
$SIG{TERM} = sub { kill 'TERM', $pid; kill 'TERM', $pid };
$pid = fork or exec(@ARGV);
while (waitpid($pid, 0) < 0) {}
exit $? >> 8
"""
NODE = """
const child = require("child_process").spawn(process.argv[1], process.argv.slice(2), {stdio: "inherit"});
process.on("SIGTERM", () => child.kill("SIGTERM"));
child.on("exit", code => process.exit(code));
"""
LINE = shlex.join([sys.executable, "-I", "counts.py"])
STARTS = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
WRAPPERS = {
    "time": f"time {LINE}",
    "nice and env": f"nice env -S {shlex.quote(LINE)}",
    "a Python": f"{shlex.join([sys.executable, '-Ic', STARTS])} {LINE}",
    "a trap that forwards": FORWARDS.format(LINE),
    "a trap that passes nothing on": PASSES_NOTHING_ON.format(LINE),
    "a trap that leaves": f"trap 'exit 3' TERM; {LINE} & wait",
    "two traps": FORWARDS.format(f"bash -c {shlex.quote(PASSES_NOTHING_ON.format(LINE))}"),
    "a Python that passes nothing on": f"{shlex.join([sys.executable, '-Ic', HANDLES_ONLY])} {LINE}",
    "a perl that sends it twice": f"perl -e {shlex.quote(SENDS_TWICE)} {LINE}",
    "node": f"node -e {shlex.quote(NODE)} {LINE}",
    "timeout": f"timeout 600 {LINE}",
    "xargs": f"echo | xargs {LINE}",
    "make": f"printf 'train:\\n\\tcd . && {LINE}\\n' | make -f -",
    "unshare": f"unshare --fork {LINE}",
    "script": f"script -qec {shlex.quote(f'{LINE}; exit $?')} /dev/null",
    "su": f"su -pc {shlex.quote(f'{LINE}; exit $?')}",
}


@contextlib.contextmanager
def started(folder: Path, *argv: str, **more: Any) -> Iterator[tuple[Any, int, CommandStopSignal]]:
    """Start a member of a node; return the member, the pid of what saves below it, and its stop signal."""
    (folder / "counts.py").write_text(COUNTS)
    member, ready = subprocess.Popen(argv, cwd=folder, start_new_session=True, **more), folder / "ready"
    pids = [member.pid]
    try:
        wait_for(lambda: ready.exists() and ready.read_text())
        pids.insert(0, int(ready.read_text()))
        notice = CommandStopSignal(launch_plan(workload=Workload((argv[0],)), grace_s=2.0))
        notice.groups[member.pid] = 0
        yield member, pids[0], notice
    finally:
        signal_all([pid for pid in pids if is_running(pid)], signal.SIGKILL)
        member.wait()


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_saves_below_a_wrapper_hears_a_notice_once(tmp_path, name):
    if name.startswith("node") and shutil.which("node") is None:
        pytest.skip("node is not installed")
    if name in ("su", "unshare") and os.geteuid() != 0:
        pytest.skip(f"{name} takes root")
    with started(tmp_path, "bash", "-c", f"{WRAPPERS[name]}; exit $?") as (member, _, notice):
        notice.send({0: member})
        wait_for(lambda: not notice.poll())
        wait_for((tmp_path / "heard").exists)
        assert (tmp_path / "heard").read_text() == "1"


@pytest.fixture
def adopting_orphans() -> Iterator[None]:
    """Adopt orphaned processes, as an agent does."""
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("adopting_orphans")
@pytest.mark.parametrize("is_sent_before", [True, False])
def test_what_a_shell_has_left_is_kept_when_what_stood_above_that_fails(tmp_path, is_sent_before):
    """Slurm signals all processes, so make may see its recipe end before make itself is signalled."""
    script = f"bash -c {shlex.quote(f'{LINE}; exit $?')}; while [ ! -e go ]; do sleep 0.02; done; exit 2"
    with started(tmp_path, "bash", "-c", script) as (member, saver, notice):
        if is_sent_before:
            notice.send({0: member}, TERM)
        signal_all(children_by_parent()[member.pid], signal.SIGKILL)
        wait_for(lambda: saver in children_by_parent().get(os.getpid(), []))
        if not is_sent_before:
            assert not notice.may_be_of_notice(0, member), "it still runs"
        (tmp_path / "go").touch()
        wait_for(lambda: ended(member))
        if not is_sent_before:
            assert notice.may_be_of_notice(0, member)
            notice.send({0: member}, TERM)
        assert notice.keeps(0, member)
        os.kill(saver, TERM)
        wait_for(lambda: exit_code_of_zombie(saver) is not None)
        notice.reap_orphans()
        assert (tmp_path / "heard").read_text() == "1"
        assert notice.exit_code(0, 2, 143) == 75


@pytest.mark.usefixtures("adopting_orphans")
def test_the_crash_of_a_program_that_leaves_a_process_is_reported_at_once(tmp_path):
    """Only wrappers wait for a stop signal. A Python whose tracker handles signals does not."""
    body = f"import subprocess, sys; subprocess.Popen({shlex.split(LINE)!r}); input(); sys.exit(1)"
    argv = (sys.executable, "-I", "-c", body)
    with started(tmp_path, *argv, stdin=subprocess.PIPE) as (member, saver, notice):
        member.stdin.write(b"\n")
        member.stdin.close()
        wait_for(lambda: ended(member) and saver in children_by_parent().get(os.getpid(), []))
        assert not notice.may_be_of_notice(0, member)


def test_a_process_of_another_user_is_named_and_the_others_are_signalled(monkeypatch, capfd):
    """The process runs below `sudo`, so only root may signal it."""
    signalled = []

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        signalled.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    signal_all([1, 2], TERM)
    assert signalled == [(2, TERM)]
    said(capfd.readouterr().out)
