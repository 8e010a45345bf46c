import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainkit
from trainkit.cli import main as main_module
from trainkit.cli.main import COMMANDS, main
from trainkit.errors import ConfigError, Problem, SlurmError

ROOT = Path(trainkit.__file__).parents[1]


def fail_with(monkeypatch, error):
    def raises(*args, **kwargs):
        raise error

    monkeypatch.setattr(main_module.cli, "main", raises)


def test_help_imports_nothing_but_click():
    script = (
        "import sys\nfrom trainkit.cli.main import main\ncode = main(['--help'])\n"
        "heavy = {'torch', 'pydantic', 'yaml', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_help_answers_at_once():
    """Not much later than click can, on a machine that may be busy with something else."""

    def seconds(*argv):
        start_s = time.perf_counter()
        subprocess.run([sys.executable, *argv], cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=120)
        return time.perf_counter() - start_s

    pairs = [(seconds("-c", "import click"), seconds("-m", "trainkit", "--help")) for _ in range(7)]
    click_s, help_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    assert help_s < 3 * click_s


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name, capsys):
    assert main([name, "-h"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: trainkit")
    assert f"trainkit {name}" in shown.partition("Examples:")[2]


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["sumbit"], "there is no command 'sumbit'", "did you mean `trainkit submit`?"),
        (["qqq"], "there is no command 'qqq'", "`trainkit --help` lists the commands"),
        (["status", "--jsn"], "there is no option --jsn", "did you mean --json?"),
        (["logs"], "missing argument 'RUN'", "`trainkit logs --help` shows how it is used"),
    ],
)
def test_wrong_usage(args, message, hint, capsys):
    assert main(args) == 2
    assert capsys.readouterr().err == f"error: {message}\n\nhint: {hint}\n"


def test_error_as_json(capsys):
    assert main(["status", "no-such-run-anywhere", "--json"]) == 2
    value = json.loads(capsys.readouterr().out)
    assert list(value) == ["error", "hint", "exit_code"]
    assert value["exit_code"] == 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SlurmError("no answer", "try again"), 3, "error: no answer\n\nhint: try again\n"),
        (ConfigError([Problem("a.b", "is bad", "x.yaml:3")]), 2, "error: x.yaml:3: a.b: is bad\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(error, code, words, monkeypatch, capsys):
    fail_with(monkeypatch, error)
    assert main(["status"]) == code
    assert capsys.readouterr().err == words


def test_unexpected_error_is_one_line_and_debug_shows_where(monkeypatch, capsys):
    fail_with(monkeypatch, RuntimeError("boom\nsecond line"))
    assert main(["status"]) == 1
    assert capsys.readouterr().err.startswith("error: RuntimeError: boom\n\nhint: this was not expected")
    with pytest.raises(RuntimeError):
        main(["--debug", "status"])


def test_closed_pipe_is_quiet():
    script = f"{sys.executable} -m trainkit completion bash | true; echo ${{PIPESTATUS[0]}}"
    argv = ["bash", "-c", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    ("stdout", "code", "words"),
    [(">&-", 0, ""), (">/dev/full", 1, "error: OSError: [Errno 28] No space left on device")],
)
def test_output_that_nobody_takes(stdout, code, words):
    argv = ["bash", "-c", f"{sys.executable} -m trainkit --version {stdout}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert done.stderr.partition("\n")[0] == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_TRAINKIT_COMPLETE" in capsys.readouterr().out


def test_completion_lists_commands_without_loading_them():
    environ = {
        **os.environ,
        "_TRAINKIT_COMPLETE": "bash_complete",
        "COMP_WORDS": "trainkit re",
        "COMP_CWORD": "1",
    }
    argv = [sys.executable, "-m", "trainkit"]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout == "plain,requeue\nplain,resume\n"
