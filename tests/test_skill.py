"""Checks the page for LLM agents: its front matter, and that its commands, options and states exist."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest
import yaml

from trainkit.cli.main import cli
from trainkit.config import load_config
from trainkit.observe.status import ACTIVE_STATES

PAGE = Path(__file__).parents[1] / "skills" / "trainkit" / "SKILL.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`(trainkit [^`]+)`", TEXT)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()] + INLINE


def test_the_front_matter() -> None:
    _, front, _ = TEXT.split("---\n", 2)
    values = yaml.safe_load(front)
    assert list(values) == ["name", "description"]
    assert values["name"] == PAGE.parent.name
    assert 100 < len(values["description"]) < 1024
    assert len(TEXT.splitlines()) < 110


def resolved(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that a line names, and the words after its name."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_exists(line: str) -> None:
    program, *words = shlex.split(line.partition(" -- ")[0])
    assert program == "trainkit"
    command, words = resolved(words)
    command.make_parser(click.Context(command)).parse_args(list(words))
    overrides = [value for option, value in pairwise(words) if option == "--set"]
    load_config(None, overrides=overrides)


def test_every_step_has_a_command() -> None:
    assert {line.split()[1] for line in COMMANDS} >= {
        "check",
        "submit",
        "logs",
        "status",
        "diagnose",
        "resume",
    }


def test_every_option_exists() -> None:
    """An option in the text belongs to one of the page's commands."""
    known = {
        name for line in COMMANDS for one in resolved(shlex.split(line)[1:])[0].params for name in one.opts
    }
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) <= known


def test_every_state_exists() -> None:
    named = re.search(r"^(`pending`.*) are normal", TEXT, re.MULTILINE)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) <= set(ACTIVE_STATES)


def test_the_exit_codes_are_those_of_the_help() -> None:
    help_text = cli.get_help(click.Context(cli, info_name="trainkit"))
    codes = re.findall(r"^\s+(\d+)\s{2,}", help_text.partition("Exit codes:")[2], re.MULTILINE)
    assert re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE) == codes
