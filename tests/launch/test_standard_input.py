"""Tests the standard input of a COMMAND: passed on, kept in the run folder, or left to another reader."""

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program, wait_for
from tests.support.said import said

ASK = """
import sys
from trainkit.launch import standard_input as module
from trainkit.plan.workload import Workload
module.SILENCE_S, module.NOTE_AFTER_S = 0.4, 0.1
module.MAX_BYTES = 1_000
print(*module.kept_input(Workload(tuple(sys.argv[2:])), streams=sys.argv[1] == "streams"))
"""


@pytest.fixture
def shell(tmp_path: Path):
    """Return a function that runs bash, where `$ask ARGUMENTS` prints the kept standard input."""
    (tmp_path / "ask.py").write_text(ASK)
    environ = {**os.environ, "tk": f"{sys.executable} -m trainkit"}
    environ |= {"ask": f"{sys.executable} ask.py keeps", "look": f"{sys.executable} ask.py streams"}

    def run(line: str, **options):
        done = run_program("bash", "-c", line, cwd=tmp_path, env=environ, **options)
        return done.stdout.strip().splitlines()

    return run


SHARED = "note: train gets no standard input"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("echo x | $ask train", r"b'x\n'"),
        ("echo x | timeout 60 $ask train", r"b'x\n'"),
        ("$ask train < /dev/null", "None None"),
        ("$ask python3 - < /dev/null", "None None"),
        ("true | $ask train", "None None"),
        ("$ask python3 - <<< 'print(1)'", r"b'print(1)\n'"),
        ("echo abc > f; $ask train < f", r"b'abc\n'"),
        ("echo abc > f; { read -n 1; $ask cat; } < f", r"b'bc\n'"),
        ("head -c 2000 /dev/zero | $ask train 2>&1 | tail -2 | head -1", "standard input has more than"),
        # Programs of a shell share its input, so only a COMMAND that is known to read its input gets it.
        ("printf 'a\\nb\\n' | while read word; do $ask train; done", SHARED),
        ("echo '$ask train\necho next' > s; bash < s", SHARED),
        ("echo x | bash -c '$ask train; true'", SHARED),
        ("echo x | bash -c '$ask cat; true'", r"b'x\n'"),
        # Rank 0 of `trainkit run` inherits the stream. A program on standard input is kept, so that it can
        # run again.
        ("echo x | $look train", "None None"),
        ("$look bash -s <<< date", r"b'date\n'"),
        ("echo date > f; $look bash < f", r"b'date\n'"),
        ("{ sleep 1; echo late; } | $look cat", "None None"),
    ],
)
def test_what_is_kept(shell, line, kept):
    lines = shell(line)
    assert kept in lines[0], lines


def test_no_word_of_a_script_is_taken(shell):
    script, loop = "$ask train\necho next", "while read w; do $ask train >/dev/null; echo $w; done"
    assert shell(f"echo '{script}' > s; bash < s")[1:] == ["next"]
    assert shell(f"printf 'a\\nb\\n' | {loop}") == ["a", "b"]


def test_a_pipe_that_never_ends(shell):
    reading, writing = os.pipe()
    try:
        assert "without data" in shell("exec $ask train", stdin=reading)[0]
        printed = shell("exec $ask python3 - 2>&1", stdin=reading)
        said(printed[0])
        assert printed[-2].endswith(" for 0.4 s")
    finally:
        os.close(reading)
        os.close(writing)


def test_a_terminal_stays_with_the_command(shell):
    primary, secondary = os.openpty()
    try:
        assert "None None" in shell("exec $ask train", stdin=secondary)[-1]
        assert "is a terminal" in shell("exec $ask python3 2>&1", stdin=secondary)[-1]
    finally:
        os.close(primary)
        os.close(secondary)


def test_run_passes_it_to_rank_0_alone(shell, tmp_path):
    program = 'import os, sys; open(sys.argv[1] + "/" + os.environ["RANK"], "w").write(sys.stdin.read())'
    (tmp_path / "write_input.py").write_text(program)
    for folder, line in (("run", "$tk run"), ("submit", "$tk submit --follow")):
        (tmp_path / folder).mkdir()
        words = f"--gpus-per-node 2 --name {folder} -- python3 write_input.py $PWD/{folder}"
        shell(f"printf 'a\\nb' | {line} {words}")
        assert [(tmp_path / folder / rank).read_text() for rank in "01"] == ["a\nb", ""]
    assert not (tmp_path / "runs/run/stdin").exists()
    kept = tmp_path / "runs/submit/stdin"
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == ("a\nb", 0o600)


def test_a_program_runs_and_runs_again(shell, tmp_path):
    """A heredoc is the program of every attempt, and of a run that repeats this one."""
    program = "import os, sys; print('hello', flush=True); sys.exit(75)"
    shell(f"$tk submit --follow --name p -- python3 - <<'E'\n{program}\nE\n")
    shell("$tk resume p --follow; $tk submit p --name again --follow")
    logs = [f"p/attempts/{number}" for number in ("001", "002")] + ["again/attempts/001"]
    texts = [(tmp_path / "runs" / log / "logs/rank-0000.log").read_text() for log in logs]
    assert texts == ["hello\n"] * 3


def test_a_loop_of_the_shell_keeps_its_lines(shell):
    lines = shell("printf 'a\\nb\\n' > l; while read w; do $tk run --name $w -- echo ran $w; done < l")
    assert [line for line in lines if line.startswith("ran")] == ["ran a", "ran b"]


def test_the_points_of_a_sweep_read_the_same(shell, tmp_path):
    shell("echo 'echo point $SLURM_ARRAY_TASK_ID' | $tk submit --array 0-1 --name g -- bash -s")
    for index in "01":
        log = tmp_path / "runs/g" / index / "attempts/001/logs/rank-0000.log"
        assert wait_for(lambda log=log: log.exists() and log.read_text()) == f"point {index}\n"


def test_a_closed_one_is_empty(shell):
    assert shell("$tk run --name c -- wc -c <&-")[-1] == "0"


def test_a_secret_is_not_kept(shell, tmp_path):
    line = "echo key=$WANDB_API_KEY | $tk submit -- cat 2>&1; echo $?"
    lines = shell(f"export WANDB_API_KEY=0123456789abcdef0123; {line}")
    assert lines[-1] == "2"
    assert "WANDB_API_KEY" in "\n".join(lines)
    assert not any((tmp_path / "runs").glob("*"))
