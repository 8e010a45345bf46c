"""What a rank starts hears nothing of a notice to the whole step, and all that its parents ask.

The test plays Slurm: it starts an agent, which starts a rank, and signals every process below.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from trainkit.job.node.worker_env import STARTUP_FOLDER
from trainkit.job.processes import descendants
from trainkit.job.spare_children import AGENT_VARIABLE

AGENT = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
environ = {**os.environ, "AGENT_VARIABLE": str(os.getpid())}
ready = lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGTERM, signal.SIGUSR2)]
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], env=environ, preexec_fn=ready).returncode)
""".replace("AGENT_VARIABLE", AGENT_VARIABLE)

RANK = """
import multiprocessing, os, signal, subprocess, sys, time

def nap(value):
    time.sleep(0.05)
    return value

def default():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

def says(word, code):
    signal.signal(signal.SIGTERM, lambda *_: (print(word, flush=True), os._exit(code)))
    print("ready", flush=True)
    time.sleep(300)

def waits():
    default()
    print("ready", flush=True)
    time.sleep(300)

def children():
    print("ready", flush=True)
    sys.stdin.readline()

heard = []
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
"""

POOL = """
    with multiprocessing.get_context("{method}").Pool(2, default) as pool:
        pool.map(nap, range(4))
        children()
        print(sum(pool.map(nap, range(20))), heard, flush=True)
"""

OWN_HANDLER = """
    child = multiprocessing.get_context("fork").Process(target=says, args=("its own handler", 9))
    child.start()
    child.join()
    print(child.exitcode, heard, flush=True)
"""

TERMINATED = """
    child = multiprocessing.get_context("fork").Process(target=waits)
    child.start()
    sys.stdin.readline()
    print(child.is_alive(), heard, flush=True)
    child.terminate()
    child.join()
    print(child.exitcode, flush=True)
"""

PROGRAM_OF_A_CHILD = """
    if os.fork() == 0:
        for options in ({}, {"preexec_fn": lambda: None}, {"close_fds": False}):
            program = subprocess.Popen(["/bin/sleep", "300"], **options)
            program.terminate()
            print(program.wait(), flush=True)
        os.execv("/bin/sh", ["sh", "-c", "kill -TERM $$; echo it lives"])
    print(os.WTERMSIG(os.wait()[1]), flush=True)
    print("ready", flush=True)
"""

@contextmanager
def rank(tmp_path: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """An agent and the rank that runs `body`; everything below the agent is ended with it."""
    (tmp_path / "train.py").write_text(RANK + body)
    environ = {**os.environ, "RANK": "0", "PYTHONPATH": str(STARTUP_FOLDER)}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path / "train.py")],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield agent
    finally:
        signal_step(agent, signal.SIGKILL)
        agent.communicate()


def signal_step(agent: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    """Signal every process of the step, as Slurm does, and wait until each has taken it."""
    pids = (agent.pid, *descendants(agent.pid))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    # The kernel drops a signal while another of its kind is pending, whoever has sent it.
    while any(is_pending(pid, number) for pid in pids):
        time.sleep(0.01)


def is_pending(pid: int, number: signal.Signals) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next(line.split()[1] for line in lines if line.startswith("ShdPnd:"))
    return bool(int(mask, 16) & 1 << number - 1) and not any(line.startswith("State:\tZ") for line in lines)


def lines(agent: subprocess.Popen[str], number: int) -> list[str]:
    assert agent.stdout is not None
    return [agent.stdout.readline().strip() for _ in range(number)]


def go_on(agent: subprocess.Popen[str]) -> None:
    agent.stdin.write("\n")
    agent.stdin.flush()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_workers_of_a_pool_live_on(tmp_path: Path, method: str) -> None:
    with rank(tmp_path, POOL.replace("{method}", method)) as agent:
        assert lines(agent, 1) == ["ready"]
        signal_step(agent)
        go_on(agent)
        assert lines(agent, 1) == ["190 ['SIGTERM']"]
        assert agent.wait(60) == 0


def test_a_child_with_a_handler_of_its_own_hears_it(tmp_path: Path) -> None:
    with rank(tmp_path, OWN_HANDLER) as agent:
        assert lines(agent, 1) == ["ready"]
        signal_step(agent)
        assert lines(agent, 2) == ["its own handler", "9 ['SIGTERM']"]


def test_a_child_ends_when_its_parent_asks(tmp_path: Path) -> None:
    with rank(tmp_path, TERMINATED) as agent:
        assert lines(agent, 1) == ["ready"]
        signal_step(agent)
        go_on(agent)
        assert lines(agent, 2) == ["True ['SIGTERM']", "-15"]


def test_the_programs_of_a_child_can_be_ended(tmp_path: Path) -> None:
    with rank(tmp_path, PROGRAM_OF_A_CHILD) as agent:
        assert lines(agent, 5) == ["-15", "-15", "-15", "15", "ready"]


def test_the_next_sitecustomize_runs(tmp_path: Path) -> None:
    next_folder = tmp_path / "next"
    next_folder.mkdir()
    (next_folder / "sitecustomize.py").write_text("import sys; sys.is_next = True")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.is_next, sys.path)"],
        env={**os.environ, "PYTHONPATH": f"{STARTUP_FOLDER}:{next_folder}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("True")
    assert str(STARTUP_FOLDER) not in done.stdout
