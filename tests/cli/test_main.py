import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

import trainkit
from tests.support.programs import run_program
from tests.support.said import said
from trainkit.__main__ import program
from trainkit.cli import main as main_module
from trainkit.cli.help import Command
from trainkit.cli.main import COMMANDS, cli, load_command, main
from trainkit.errors import ConfigError, Problem, SlurmError
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir

ROOT = Path(trainkit.__file__).parents[1]


def fail_with(monkeypatch, error):
    def raises(*args, **kwargs):
        raise error

    monkeypatch.setattr(main_module.cli, "main", raises)


IMPORTS_NOTHING = """
import sys
from trainkit.cli.main import main
code = main([{args}])
assert not {slow} & set(sys.modules), {slow} & set(sys.modules)
sys.exit(code)
"""


def test_help_imports_nothing_but_click():
    script = IMPORTS_NOTHING.format(args="'--help'", slow="{'torch', 'pydantic', 'yaml', 'rich'}")
    done = run_program(sys.executable, "-c", script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*COMMANDS, *(f"  {code} " for code in (0, 1, 2, 3, 130))))


@pytest.mark.parametrize("command", ["status", "watch"])
def test_a_run_is_looked_up_without_configs(command, tmp_path):
    slow = "{'torch', 'pydantic', 'rich', 'logging', 'socket', 'trainkit.plan.launch'}"
    script = IMPORTS_NOTHING.format(args=f"'{command}', 'nothere'", slow=slow)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    done = run_program(sys.executable, "-c", script, cwd=tmp_path, env=environ)
    assert (done.returncode, "unknown run" in done.stderr) == (2, True), done.stderr


def test_help_answers_at_once():
    """The help takes little more time than click itself, measured in processor time on a busy machine."""

    def seconds(*argv):
        start_s = time.perf_counter()
        subprocess.run([sys.executable, *argv], cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=120)
        return time.perf_counter() - start_s

    pairs = [(seconds("-c", "import click"), seconds("-m", "trainkit", "--help")) for _ in range(5)]
    click_s, help_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    assert help_s < 3 * click_s


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name, prints):
    shown = prints([name, "-h"]).out
    assert shown.startswith("Usage: trainkit")
    lines = shown.partition("Examples:\n")[2].splitlines()
    assert lines
    for line in lines:
        typed = re.split(r" -- | \| | > |\)", line.partition("trainkit ")[2])[0].split()
        assert typed[0] == name
        assert main([*typed, "--help"]) == 0, line  # every option is parsed before the help is printed


def commands():
    """Yield every command and subcommand, with its words on the command line."""
    for name in COMMANDS:
        command = load_command(name)
        context = click.Context(command)
        below = command.list_commands(context) if isinstance(command, click.Group) else ()
        yield from [(f"{name} {each}", command.get_command(context, each)) for each in below] or [
            (name, command)
        ]


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_every_option_stands_once_under_a_heading(name, command):
    assert isinstance(command, Command)
    context = click.Context(command, info_name=name, **cli.context_settings)
    shown = command.get_help(context)
    options = [item for item in command.get_params(context) if isinstance(item, click.Option)]
    records = [item.get_help_record(context) for item in options if not item.hidden]
    for name, _ in records:
        assert sum(line.strip().startswith(name) for line in shown.splitlines()) == 1, name
    assert "Options:" not in shown


@pytest.fixture
def complete(tmp_path, monkeypatch):
    """Return a function that completes the last argument of a command line."""
    monkeypatch.chdir(tmp_path)

    def complete(*args):
        found = ShellComplete(cli, {}, "trainkit", "_TRAINKIT_COMPLETE").get_completions(
            list(args[:-1]), args[-1]
        )
        return [item.value for item in found if item.type == "plain"]

    return complete


def test_completion_of_runs(complete, tmp_path):
    assert complete("logs", "") == []
    run = RunDir(tmp_path / "runs" / "small-2")
    run.attempts_dir.mkdir(parents=True)
    run.config_file.write_text("name: small")
    entry = {"attempt": 1, "job_id": "4711", "backend": "sbatch"}
    write_json(run.job_file, {"name": "small", "attempts": [entry]})
    assert complete("logs", "") == ["last", "small-2", "small"]
    assert complete("status", "sm") == ["small-2", "small"]
    assert complete("submit", "--after", "l") == ["last"]


def test_completion_of_configs_profiles_and_keys(complete, tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    assert complete("submit", "m")[0] == "mine.yaml"
    assert {"quickstart", "mine.yaml"} <= set(complete("check", ""))
    assert "models/8b" in complete("plan", "models/")
    assert "smoke" in complete("run", "--profile", "")
    assert complete("submit", "--set", "train.st") == ["train.steps=", "train.stop_at_step="]


def test_error_as_json(prints):
    value = json.loads(prints(["status", "no-such-run-anywhere", "--json"], code=2).out)
    assert (list(value), value["exit_code"]) == (["error", "hint", "exit_code"], 2)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SlurmError("no answer", "try again"), 3, "error: no answer\n\nhint: try again\n"),
        (ConfigError([Problem("a.b", "is bad", "x.yaml:3")]), 2, "error: x.yaml:3: a.b: is bad\n"),
        (ConfigError([Problem("", "is bad", "x", "mend it")]), 2, "error: x: is bad\n\nhint: mend it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(error, code, words, monkeypatch, capsys):
    fail_with(monkeypatch, error)
    assert main(["status"]) == code
    assert capsys.readouterr().err == words


@pytest.mark.parametrize("place", ["gc.set_threshold", "gc.freeze", "trainkit.cli.main.escaped_output"])
def test_ctrl_c_around_a_command_is_one_word(place, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    # the garbage collection of this process is not changed
    for function in ("gc.set_threshold", "gc.freeze"):
        monkeypatch.setattr(function, lambda *args: None)
    monkeypatch.setattr(place, interrupt)
    monkeypatch.setattr(sys, "argv", ["trainkit", "--version"])
    assert (program(), capsys.readouterr().err) == (130, "\ninterrupted\n")


def test_unexpected_error_is_one_line_and_debug_shows_where(monkeypatch, prints):
    fail_with(monkeypatch, RuntimeError("boom\nsecond line"))
    said(prints(["status"], code=1).err)
    with pytest.raises(RuntimeError):
        main(["--debug", "status"])


def test_closed_pipe_is_quiet():
    script = f"{sys.executable} -m trainkit completion bash | true; echo ${{PIPESTATUS[0]}}"
    done = run_program("bash", "-c", script, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("0\n", "")


CLOSED = {
    **{"--version >&-": 0, "status >&-": 0, "watch x --once >&-": 2, "check - <&-": 2},
    **{r"check $'\xff.yaml' 2>&-": 2, "status >&- 2>&-": 0},
}


@pytest.mark.parametrize("command", CLOSED)
def test_a_stream_that_the_shell_has_closed(tmp_path, command):
    done = run_program("bash", "-c", f"{sys.executable} -m trainkit {command}", cwd=tmp_path)
    assert (done.returncode, "unexpected" in done.stderr) == (CLOSED[command], False), done.stderr


def test_completion(prints):
    for shell in ("bash", "zsh", "fish"):
        assert "_TRAINKIT_COMPLETE" in prints(["completion", shell]).out
    # A shell lists commands without loading them.
    shell = {"_TRAINKIT_COMPLETE": "bash_complete", "COMP_WORDS": "trainkit re", "COMP_CWORD": "1"}
    said(run_program(sys.executable, "-m", "trainkit", cwd=ROOT, env={**os.environ, **shell}).stdout)


def said_on_a_full_disk(folder, *args, unbuffered=""):
    """Return the exit code and the standard error of a command whose output does not fit on the disk."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    argv = [sys.executable, "-m", "trainkit", *args]
    with open("/dev/full", "wb") as full:
        streams = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        done = run_program(*argv, cwd=folder, env=environ, **streams)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["--help"], ["schema"], ["status", "--json"], ["env", "--json"]])
def test_an_output_that_does_not_fit_on_the_disk(tmp_path, args, unbuffered):
    code, err = said_on_a_full_disk(tmp_path, *args, unbuffered=unbuffered)
    assert code == 1
    first, _, hint = err.partition("\n\n")
    said(first)
    assert hint.startswith("hint: free disk")


def test_an_error_that_does_not_fit_on_the_disk_is_printed_to_stderr(tmp_path):
    code, err = said_on_a_full_disk(tmp_path, "logs", "none", "--json")
    assert (code, err.startswith("error: "), "Traceback" in err) == (2, True, False)


@pytest.mark.parametrize("file", [(), ("/run/plan.json",)], ids=["written", "opened"])
def test_a_full_disk_behind_another_file_is_not_about_the_output(monkeypatch, prints, file):
    fail_with(monkeypatch, OSError(28, "No space left on device", *file))
    assert "the output" not in prints(["status"], code=1).err
