"""Tests commands without CONFIG, and the examples of every help text in an empty folder."""

import json
import shlex

import click
import pytest

from tests.support.said import said
from trainkit.cli.main import COMMANDS, cli, main
from trainkit.config import load_config

COMMAND = ["--", "python", "-c", "print(1)"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        *("check", "submit --backend local --dry-run --json", "plan --gpus 2 --gpu-type h100"),
        *("drill --backend local --list", "bench layouts --backend local --gpus-per-node 1 --dry-run"),
    ],
)
def test_the_quickstart_without_a_config(line, prints):
    out, err = prints(line.split())
    assert err.startswith("config: quickstart (shipped)\n")
    assert "config: " not in out


def test_a_command_needs_no_config(prints):
    for args in (["drill", "--list"], ["submit", "--dry-run", "--json"]):
        out, err = prints([*args, "--backend", "local", *COMMAND])
        assert "config: " not in out + err
    assert json.loads(out)["command"] == COMMAND[1:]


def test_the_config_of_this_folder(empty_folder, capsys, prints):
    (empty_folder / "first-run.yaml").write_text("extends: quickstart\nname: first-run\n")
    out, err = prints(["check", "--json"])
    assert json.loads(out)["config"]["name"] == "first-run"
    said(err)
    (empty_folder / "train.py").touch()
    for args, name in ((["--set", "name=mine"], "mine"), ([], "train")):
        assert main(["submit", "--dry-run", *args, "--backend", "local", "--", "python", "train.py"]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: ")
    (empty_folder / "config.yaml").write_text("extends: quickstart\nname: mine\n")
    out, err = prints(["check", "--json"])
    assert json.loads(out)["config"]["name"] == "mine"
    said(err)


def test_one_task_of_a_step_says_which_config(monkeypatch, prints):
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert "config: " not in prints(["check", "--backend", "local"]).err


def all_examples() -> list[list[str]]:
    """Return the arguments of every example with a CONFIG in any command's help text."""
    context = click.Context(cli)
    commands = [command for name in COMMANDS if (command := cli.get_command(context, name)) is not None]
    groups = [command for command in commands if isinstance(command, click.Group)]
    below = [group.get_command(context, name) for group in groups for name in group.list_commands(context)]
    commands += filter(None, below)
    lines = {line.strip() for command in commands for line in (command.epilog or "").splitlines()}
    words = [shlex.split(line) for line in sorted(lines) if "trainkit " in line and "$(" not in line]
    found = [items[items.index("trainkit") + 1 :] for items in words if "trainkit" in items]
    with_config = ("check", "plan", "submit", "run", "drill", "bench", "shell")
    return [args for args in found if args[0] in with_config]


@pytest.mark.parametrize("args", all_examples(), ids=" ".join)
def test_the_config_of_every_example_is_found_anywhere(args, empty_folder):
    words = args[2:] if args[0] == "bench" else args[1:]
    if words and not words[0].startswith("-"):
        load_config(words[0], cwd=empty_folder, environ={})
