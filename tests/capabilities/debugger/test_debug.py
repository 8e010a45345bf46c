"""Tests `trainkit run --debug`, `--post-mortem` and `trainkit debug` in a real terminal."""

import json
import os
import socket
import sys
from bdb import BdbQuit
from contextlib import nullcontext
from pathlib import Path

import pytest
from steering import wait_for

from tests.support.programs import run_program
from tests.support.runs import launch_plan, make_attempt
from tests.support.said import cases, said
from tests.support.tmux import Tmux, needs_tmux
from trainkit.capabilities.debugger import Debugger, DebugPlan, rank_debugger
from trainkit.capabilities.debugger.command import attach
from trainkit.cli import options
from trainkit.cli.main import main
from trainkit.errors import UsageError
from trainkit.launch import packages
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import read_end
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

TRAINKIT = [sys.executable, "-m", "trainkit"]
SCRIPT = """
import os, time
rank = int(os.environ["RANK"])
for step in range(3):
    print(f"rank {rank} step {step}", flush=True)
    breakpoint()
if os.environ.get("CRASH") and rank == 1:
    secret = 42
    raise ValueError(f"bad {rank}")
while os.environ.get("CRASH"):
    time.sleep(1)
print("done", input("name? ") if os.isatty(0) else "", flush=True)
"""


@pytest.fixture
def terminal(desk, tmp_path):
    (desk.folder / "loop.py").write_text(SCRIPT)
    with Tmux(tmp_path, 140, 60, desk.folder, desk.environ) as window:
        yield window


def typed(terminal: Tmux, text: str, expected: str) -> None:
    """Type a line, and wait until the terminal shows a pattern."""
    terminal._run("send-keys", "-l", text)
    terminal.keys("Enter")
    terminal.wait_for(expected)


def ended(run: RunDir) -> tuple[str, str]:
    end = wait_for(lambda: read_end(run.attempt(1)), 60)
    return end.state, end.reason


@needs_tmux
@pytest.mark.slow(seconds=8)
def test_a_script_on_rank_1_of_2(desk, terminal):
    run = RunDir(desk.folder / "runs" / "loop")
    argv = [*TRAINKIT, "run", "--gpus-per-node", "2", "--debug", "1", "--", sys.executable, "loop.py"]
    terminal.type(argv)
    terminal.wait_for(r"rank 1 step 0\n(?:.*\n)*\(Pdb\)$")
    assert desk.status(run)["reason"] == "run with --debug"
    typed(terminal, "p 'rank', rank + 41", r"^\('rank', 42\)")
    typed(terminal, "c", r"rank 1 step 1\n(?:.*\n)*\(Pdb\)$")
    typed(terminal, "c", r"rank 1 step 2\n(?:.*\n)*\(Pdb\)$")
    typed(terminal, "c", r"^name\?$")
    typed(terminal, "Ada", r"^done Ada\n(?:.*\n)*finished: all workers finished")
    plan = LaunchPlan.read(run.plan_file)
    debug = plan.part(DebugPlan)
    assert (debug.rank, debug.mode, plan.requeue.hang_factor) == (1, "pdb", None)
    log = run.attempt(1).rank_log(0).read_text()
    assert log == "rank 0 step 0\nrank 0 step 1\nrank 0 step 2\ndone \n"
    assert desk.status(run)["reason"].endswith("; run with --debug")


@needs_tmux
@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["q", "Enter"], ("stopped", "stopped in the debugger")),
        (["C-d"], ("stopped", "stopped in the debugger")),
        (["C-c", "C-c"], ("stopped", "killed: not all workers exited within the grace time after SIGINT")),
        (None, ("stopped", "")),
    ],
    ids=["quit", "Ctrl-D", "Ctrl-C twice", "closed terminal"],
)
def test_the_end_of_a_debugger_is_no_crash(desk, terminal, keys, expected):
    run = RunDir(desk.folder / "runs" / "loop")
    terminal.type([*TRAINKIT, "run", "--gpus-per-node", "2", "--debug", "--", sys.executable, "loop.py"])
    terminal.wait_for(r"\(Pdb\)$")
    if keys is None:
        terminal.close_window()
    for key in keys or ():
        terminal.keys(key)
        if key == "C-c":
            terminal.wait_for("stopping")
    state, reason = ended(run)
    assert (state, reason.startswith(expected[1])) == (expected[0], True), reason
    assert not any(run.attempt(1).hangs_dir.glob("*"))
    if reason == "stopped in the debugger":
        assert "a user quit" in desk.typed("diagnose", "last").stdout


@needs_tmux
@pytest.mark.slow(seconds=8)
def test_post_mortem(desk, terminal):
    run = RunDir(desk.folder / "runs" / "loop")
    (desk.folder / "loop.py").write_text(SCRIPT.replace("    breakpoint()\n", ""))
    argv = [*TRAINKIT, "run", "--gpus-per-node", "2", "--debug", "1", "--post-mortem"]
    terminal.type(["env", "CRASH=1", *argv, "--", sys.executable, "loop.py"])
    terminal.wait_for(r"ValueError: bad 1\n(?:.*\n)*\(Pdb\)$")
    typed(terminal, "p secret", "^42")
    typed(terminal, "c", "^failed: a worker ended with exit code 1")
    failure = read_json(run.attempt(1).rank_error(1))
    assert (failure["type"], failure["message"]) == ("ValueError", "bad 1")
    assert failure["code"]["line"] == 8


@needs_tmux
@pytest.mark.slow(seconds=12)
def test_a_job_without_a_terminal(desk, terminal):
    """The chosen rank stops at each breakpoint(), even after its terminal was closed; the other continues."""
    argv = ["--gpus-per-node", "2", "--now", "--", sys.executable, "loop.py"]
    run = RunDir(desk.types("submit", *argv).stdout.splitlines()[0])
    attempt = run.attempt(1)
    wait_for(lambda: len(list((attempt.path / "debugger").glob("rank-*.json"))) == 2)
    waits = f":6: rank 1 waits until you run `trainkit debug {run.path} --rank 1`"
    assert attempt.rank_log(1).read_text().count(waits) == 1
    (record,) = (attempt.path / "debugger").glob("rank-0001-*.json")
    path = Path(read_json(record)["socket"])
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert "breakpoint()" in desk.status(run)["reason"]
    refused = desk.typed("debug", str(run.path), "--rank", "2")
    assert refused.returncode == 2
    assert "hint: ranks 0-1 " in refused.stderr
    terminal.type([*TRAINKIT, "debug", str(run.path), "--rank", "1"])
    terminal.wait_for(r"\(Pdb\)$")
    terminal.close_window()
    wait_for(lambda: attempt.rank_log(1).read_text().count(waits) == 2)
    (desk.folder / "second").mkdir()
    with Tmux(desk.folder / "second", 140, 50, desk.folder, desk.environ) as second:
        second.type([*TRAINKIT, "debug", "last", "--rank", "1"])
        second.wait_for(r"\(Pdb\)$")
        second.keys("C-c")
        second.wait_for("type `c` to continue the run or `q` to stop it")
        for step in (1, 2):
            typed(second, f"p 'step', step + {10 * step}", rf"^\('step', {11 * step - 1}\)")
            typed(second, "c", rf"^\('step', {11 * step - 1}\)\n\(Pdb\) c\n> .*\n-> .*\n\(Pdb\)$")
        typed(second, "p 'last', step", r"^\('last', 2\)")
        second.keys("c", "Enter")
        second.wait_for(r"c\n\$$")
    assert ended(run) == ("finished", "all workers finished")
    assert not any((attempt.path / "debugger").glob("rank-*.json"))
    assert attempt.rank_log(0).read_text().endswith("rank 0 step 1\nrank 0 step 2\ndone \n")


FORKS = """
import os, time
for number in range(2):
    if os.fork() == 0:
        breakpoint()
        os._exit(0)
for _ in range(2):
    os.wait()
breakpoint()
print("sleeps", flush=True) or time.sleep(3)
print("slept", flush=True)
"""


@needs_tmux
@pytest.mark.slow(seconds=12)
def test_forked_processes_take_turns_and_whoever_leaves_keeps_the_terminal(desk, terminal):
    (desk.folder / "loop.py").write_text(FORKS)
    run = RunDir(desk.types("submit", "--now", "--", sys.executable, "loop.py").stdout.splitlines()[0])
    attempt = run.attempt(1)
    wait_for(lambda: len(list((attempt.path / "debugger").glob("rank-0000-*.json"))) == 2)
    for _ in range(2):
        terminal.type([*TRAINKIT, "debug", "last"])
        terminal.wait_for(r"\(Pdb\)$")
        typed(terminal, "p 'child', number", r"^\('child', \d\)\n\(Pdb\)$")
        typed(terminal, "c", r"c\n\$$")
    wait_for(lambda: any((attempt.path / "debugger").glob("rank-0000-*.json")))
    terminal.type([*TRAINKIT, "debug", "last"])
    terminal.wait_for(r"> .*loop.py\(10\).*\n.*sleep\(3\)\n\(Pdb\)$")
    terminal.keys("n", "Enter")
    wait_for(lambda: "sleeps" in attempt.rank_log(0).read_text())
    terminal.keys("C-c")
    terminal.wait_for(r"detached from rank 0, which continues until its next breakpoint\(\)\n\$$")
    wait_for(lambda: attempt.rank_log(0).read_text().count("rank 0 waits until") == 4)
    typed(terminal, "echo sa''ne", r"^sane\n\$$")
    terminal.type([*TRAINKIT, "debug", "last"])
    terminal.wait_for(r"^-> print\(\"slept\", flush=True\)\n\(Pdb\)$")
    typed(terminal, "c", r"c\n\$$")
    assert ended(run) == ("finished", "all workers finished")


WORKER = """
import multiprocessing, sys
def work(inside):
    breakpoint()
    print("over", flush=True)
if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(41,))
    worker.start()
    worker.join()
    print("ended with", worker.exitcode, flush=True)
"""


@needs_tmux
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_of_the_rank_with_the_terminal(desk, terminal, how):
    """The standard input of a worker of a DataLoader is not a terminal."""
    (desk.folder / "loop.py").write_text(WORKER)
    terminal.type([*TRAINKIT, "run", "--debug", "--", sys.executable, "loop.py", how])
    terminal.wait_for(r"\(Pdb\)$")
    typed(terminal, "p 'inside', inside + 1", r"^\('inside', 42\)\n\(Pdb\)$")
    typed(terminal, "c", r"^over\nended with 0\n(?:.*\n)*finished: all workers finished")


@pytest.mark.slow(seconds=8)
def test_a_job_has_no_debugger_of_its_own(desk):
    (desk.folder / "loop.py").write_text("import pdb\npdb.set_trace()\nprint('over')\n")
    once = ["--now", "--set", "requeue.max_crashes=0"]
    submit = ["submit", *once, "--", sys.executable, "loop.py"]
    run = RunDir(desk.types(*submit).stdout.splitlines()[0])
    assert ended(run)[0] == "failed"
    said = desk.typed("diagnose", "last").stdout
    assert "A debugger without a terminal" in said
    assert f"`trainkit debug {run.path} --rank 0`" in said.replace("runs/loop", str(run.path))
    (desk.folder / "loop.py").write_text("breakpoint()\nprint('over')\n")
    (desk.folder / "mine.py").write_text("def hook():\n    print('my hook')\n")
    for value, printed in (("0", "over\n"), ("mine.hook", "my hook\nover\n")):
        submit[1:1] = ["--set", f"launch.env.PYTHONBREAKPOINT='{value}'"]
        run = RunDir(desk.types(*submit).stdout.splitlines()[0])
        assert ended(run)[0] == "finished"
        assert run.attempt(1).rank_log(0).read_text() == printed
        del submit[1:3]


@pytest.mark.slow(seconds=6)
def test_debugpy(desk, tmp_path):
    """A stand-in for debugpy prints the address at which debugpy would listen."""
    (desk.folder / "loop.py").write_text(SCRIPT)
    package = tmp_path / "packages" / "debugpy.py"
    package.parent.mkdir()
    package.write_text(
        "import sys\nlisten = lambda at: print('listens', *at, flush=True)\n"
        "def wait_for_client():\n    sys.breakpointhook = lambda: print('an editor', flush=True)\n"
    )
    desk.environ["PYTHONPATH"] = f"{package.parent}{os.pathsep}{desk.environ['PYTHONPATH']}"
    argv = ["--gpus-per-node", "2", "--debug=debugpy:1", "--yes", "--", sys.executable, "loop.py"]
    done = desk.types("run", *argv)
    assert done.returncode == 0, done.stderr
    run = RunDir(desk.folder / "runs" / "loop")
    port = LaunchPlan.read(run.plan_file).part(DebugPlan).port
    assert f" 127.0.0.1:{port}, " in done.stderr
    assert f"ssh -L {port}:127.0.0.1:{port} " in done.stderr
    log = run.attempt(1).rank_log(1).read_text()
    assert log.startswith(f"listens 127.0.0.1 {port}\n")
    assert log.count("an editor") == 3


@pytest.mark.parametrize("line", cases(__file__, "test_what_is_refused"))
def test_what_is_refused(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(packages, "find_packages", lambda *args: packages.Packages("3", "", {}, {}))
    monkeypatch.setattr(options, "other_people", lambda: ["ann"])
    words = [sys.executable if word == "python" else word for word in line.split()]
    assert main(["run", "--gpus-per-node", "2", *words]) == 2
    said(capsys.readouterr().err)
    assert not Path("runs").exists()


def test_a_rank_of_another_launcher_and_a_command_without_terminal_have_no_debugger(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**given, "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--debug"]) == 2
    said(capsys.readouterr().err)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["run", "--debug"]) == 2
    said(capsys.readouterr().err)
    assert not Path("runs").exists()


def test_a_terminal_is_lent_to_no_other_user(tmp_path, monkeypatch):
    attempt = make_attempt(tmp_path / "run")
    (attempt.path / "debugger").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        record = {"node": os.uname().nodename, "socket": str(tmp_path / "socket"), "where": "x.py:1"}
        (attempt.path / "debugger" / "rank-0000-1.json").write_text(json.dumps(record))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr(os, "geteuid", lambda: 61234)
        with pytest.raises(UsageError, match=f"belongs to user {os.getuid()}"):
            attach(attempt, 0)


def test_its_part_of_a_plan_keeps_what_a_newer_version_has_written():
    made = launch_plan(warnings=("one",)).without_hangs().with_part(DebugPlan(0, "pdb"))
    written = made.to_dict()
    keys = [key for key in written if key in ("after", "replay", "debug", "warnings")]
    assert keys == ["replay", "debug", "warnings"]
    assert written["debug"] == {"rank": 0, "mode": "pdb", "port": None}
    written["debug"]["new"] = 1
    assert LaunchPlan.from_dict(written).part(DebugPlan) == DebugPlan(0, "pdb")
    assert (LaunchPlan.from_dict(written).attended_rank, launch_plan().attended_rank) == (0, None)


@pytest.mark.parametrize(
    ("rank", "error", "stops"),
    [(1, ValueError("bad"), True), (1, BdbQuit(), False), (0, ValueError("bad"), None)],
)
def test_post_mortem_in_the_trainer(monkeypatch, rank, error, stops):
    stopped = []
    monkeypatch.setenv(rank_debugger.DEBUG_VARIABLE, "1 post-mortem")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "breakpointhook", None)
    monkeypatch.setattr(rank_debugger, "stop_at", lambda place, around: stopped.append(place))
    react = Debugger().in_trainer(launch_plan(), nullcontext)
    assert (react is None, sys.breakpointhook is None) == (stops is None, stops is None)
    if react is not None:
        react(error)
    assert stopped == ([error.__traceback__] if stops else [])


def test_process_groups_of_torch_get_a_week():
    """The default timeout is changed unless the script sets one, and torch is imported once."""
    code = "import torch.distributed as d; print(d.distributed_c10d._get_default_timeout('gloo').days)"
    environ = {
        **{"TRAINKIT_JOB_DEBUG": "0 pdb", "TRAINKIT_JOB_AT_START": str(Debugger.at_start), "RANK": "1"},
        "TRAINKIT_JOB_AGENT_PID": str(os.getpid()),
        "PYTHONPATH": str(Path(sys.modules["trainkit"].__file__).parent / "job" / "startup"),
    }
    done = run_program(sys.executable, "-c", code, env=os.environ | environ)
    assert (done.stdout, done.stderr) == ("7\n", "")
