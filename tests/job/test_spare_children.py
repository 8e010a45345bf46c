"""Tests that children of a rank ignore a stop signal to the whole step, but obey their parents.

The test plays the role of Slurm: it starts an agent, which starts a rank, and signals every process below.
"""

import ast
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.notice_cases.children import HEARS, OLD_PYTHONS, SPARED
from trainkit.capabilities.debugger import Debugger
from trainkit.job.handlers import signal_mask
from trainkit.job.node.worker_env import AT_START_VARIABLE, STARTUP_FOLDER
from trainkit.job.processes import descendants
from trainkit.job.spare_children import AGENT_VARIABLE, MACHINES, NOTICES, RANK_PID_VARIABLE, own_handlers

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

def says(word, code):
    signal.signal(signal.SIGTERM, lambda *_: (print(word, flush=True), os._exit(code)))
    print("ready", flush=True)
    time.sleep(300)
heard = []
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
"""

OWN_HANDLER = """
    child = multiprocessing.get_context("fork").Process(target=says, args=("its own handler", 9))
    child.start()
    child.join()
    print(child.exitcode, heard, flush=True)
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
    """Start an agent with a rank that runs `body`. Everything below the agent ends with it."""
    (tmp_path / "train.py").write_text(RANK + body)
    environ = {**os.environ, "RANK": "0", "PYTHONPATH": str(STARTUP_FOLDER)}
    argv = [sys.executable, "-c", AGENT, str(tmp_path / "train.py")]
    agent = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        yield agent
    finally:
        signal_step(agent, signal.SIGKILL)
        agent.communicate()


def signal_step(agent: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    """Signal every process of the step, as Slurm does, and wait until each has taken the signal."""
    pids = (agent.pid, *descendants(agent.pid))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    # The kernel drops a signal while the same signal is pending, whoever has sent it.
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


def test_a_child_with_a_handler_of_its_own_hears_it(tmp_path):
    with rank(tmp_path, OWN_HANDLER) as agent:
        assert lines(agent, 1) == ["ready"]
        signal_step(agent)
        assert lines(agent, 2) == ["its own handler", "9 ['SIGTERM']"]


def test_the_programs_of_a_child_can_be_ended(tmp_path):
    with rank(tmp_path, PROGRAM_OF_A_CHILD) as agent:
        assert lines(agent, 5) == ["-15", "-15", "-15", "15", "ready"]


def grammar_of_python_2() -> object:
    from lib2to3 import pygram, pytree
    from lib2to3.pgen2 import driver

    return driver.Driver(pygram.python_grammar, convert=pytree.convert)


@pytest.mark.parametrize("kinds", [("compared",), ("spared",)])
def test_children_end_as_without_trainkit(kinds):
    """The test has one child of each kind. `python -m benchmarks.children` has 200."""
    from benchmarks.children import outcomes, played

    names = list(HEARS) if kinds == ("compared",) else [name for name in SPARED if "DataLoader" not in name]
    expected = {name: "1 x 15" if name in HEARS else f"1 x {SPARED[name]}" for name in names}
    delay_s = random.Random(7).uniform(0, 0.3)
    printed = played(1, names, delay_s, with_trainkit=True)
    assert {name: outcomes(printed, name) for name in names} == expected
    if kinds == ("compared",):
        printed = played(1, names, delay_s, with_trainkit=False)
        assert {name: outcomes(printed, name) for name in names} == expected


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_data_loader_live_on(method):
    from benchmarks.children import outcomes, played

    kind = f"DataLoader, {method}"
    # Torch's handler returns 0 only if it sees that its parent has sent the signal.
    assert outcomes(played(2, [kind], 0.1, with_trainkit=True), kind) == "2 x lived, 0"


STATE = """
import os, signal, subprocess, sys
print([signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)], flush=True)
print(signal.signal(signal.SIGTERM, print), signal.signal(signal.SIGTERM, signal.SIG_DFL), flush=True)
os.system("grep -E 'SigBlk|SigIgn|SigCgt' /proc/self/status")
"""


def python(
    body: str, environ: dict[str, str], *options: str, program: str = sys.executable, **more: Any
) -> str:
    """Return the output of a Python that a rank has started, or of one that gets only `environ`."""
    given = {"env": {**os.environ, **environ}, "text": True, "timeout": 120, **more}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run([program, *options, "-c", body], **output, **given).stdout


def below_a_rank(folder: Path | None = None) -> dict[str, str]:
    path = f"{STARTUP_FOLDER}:{folder}" if folder else str(STARTUP_FOLDER)
    pids = {AGENT_VARIABLE: str(os.getpid()), RANK_PID_VARIABLE: str(os.getppid())}
    return {"PYTHONPATH": path, AT_START_VARIABLE: Debugger.at_start, **pids}


def test_a_child_sees_nothing_of_it():
    assert python(STATE, below_a_rank()) == python(STATE, {})


def test_only_handlers_of_its_own_count_as_handled():
    cases = {"": set(), "signal.signal(12, print);": {signal.SIGUSR2}}
    cases["signal.signal(15, print); signal.signal(15, signal.SIG_DFL);"] = set()
    environ = {**os.environ, **below_a_rank()}
    for body, handled in cases.items():
        argv = [sys.executable, "-c", f"import signal; {body} print(flush=True); signal.pause()"]
        with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            caught = signal_mask(child.pid, "SigCgt")
            assert {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT} <= caught
            assert own_handlers(caught) & NOTICES == handled
            child.kill()


def test_the_filter_of_aarch64():
    """The bytes of the filter were run in an emulator of aarch64, so they must not change by accident."""
    code = [MACHINES["aarch64"]((7, 70000), one, 0x1122334455667788, 0x99) for one in (0, 0xABC)]
    assert hashlib.sha256(b"".join(code)).hexdigest()[:16] == "a9a04dcb9fa27716"


NEXT = """
import sys
sys.stderr.write("the next one\\n")
{more}
"""
SHOW = "import sys; print(sys.version_info[0], 'sitecustomize' in sys.modules, sys.path)"


@pytest.mark.parametrize("program", [*OLD_PYTHONS.values(), sys.executable])
@pytest.mark.parametrize("more", ["", "raise ValueError(3)", "import missing_one", "raise ImportError", None])
def test_the_next_sitecustomize_runs_as_without(tmp_path, program, more):
    if more is not None:
        (tmp_path / "sitecustomize.py").write_text(NEXT.replace("{more}", more))
    without = python(SHOW, {"PYTHONPATH": str(tmp_path)}, program=program)
    assert python(SHOW, below_a_rank(tmp_path), program=program) == without
    assert ("the next one" in without) is (more is not None)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no lib2to3, whose grammar it is")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sitecustomize_is_python_2():
    text = (STARTUP_FOLDER / "sitecustomize.py").read_text()
    assert grammar_of_python_2().parse_string(text) is not None  # type: ignore[attr-defined]
    # The grammar of Python 3 also accepts constructs that Python 2.7 does not.
    nodes = list(ast.walk(ast.parse(text)))
    newer = (ast.JoinedStr, ast.NamedExpr, ast.AnnAssign, ast.AsyncFunctionDef, ast.Nonlocal, ast.YieldFrom)
    assert not [node for node in nodes if isinstance(node, newer) or getattr(node, "annotation", None)]
    assert text.isascii()
    assert "annotations" not in text


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_options_that_leave_it_out(option):
    body = f"import os; os.environ.pop('PYTHONPATH', 0)\n{STATE}"
    assert python(body, below_a_rank(), option) == python(body, {}, option)


def test_a_subinterpreter_is_silent():
    body = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
one = interpreters.create()
interpreters.run_string(one, "import os; os.write(1, b'it runs')")
"""
    assert python(body, below_a_rank()) == "it runs"


def test_a_debugger_in_a_child_reads_what_it_is_given():
    body = "breakpoint()\nprint('over')"
    assert "over" in python(body, below_a_rank(), input="c\n")
    never = {**below_a_rank(), "TRAINKIT_JOB_RUN_DIR": "/nowhere"}
    assert python(f"import os; os.environ['PYTHONBREAKPOINT'] = '0'\n{body}", never) == "over\n"
