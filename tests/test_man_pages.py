"""Tests the man pages that `python -m tools.man_pages` writes."""

import re
import shutil
import sys
from pathlib import Path

import click
import pytest

from tests.support.programs import run_program
from tools.man_pages import escaped, pages
from trainkit.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[1]
GROFF = shutil.which("groff")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man") / "man1"
    run_program(sys.executable, "-m", "tools.man_pages", folder, cwd=ROOT, check=True)
    return folder


def test_every_command_has_a_page(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {"trainkit.1", "trainkit-ckpt-verify.1", *(f"trainkit-{name}.1" for name in COMMANDS)}


def test_a_page_has_the_text_of_the_help(folder: Path) -> None:
    page = (folder / "trainkit-submit.1").read_text().replace("\\-", "-")
    command = cli.get_command(click.Context(cli), "submit")
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.opts[0] in page
            assert escaped(str(option.help)).replace("\\-", "-") in page
            assert "-h, --help" in page
    headings = re.findall(r"^\.SH (.*)", page, re.MULTILINE)
    assert headings[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert headings[3:] == ["WHAT", "WHERE", "HOW", "OUTPUT", "EXAMPLES", "SEE ALSO"]
    assert "EXIT CODES" in (folder / "trainkit.1").read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a-b", "a\\-b"),
        (".x", "\\&.x"),
        ("'x", "\\&'x"),
        ("a\\b", "a\\eb"),
        ("x.", "x."),
        ("a…", "a\\[u2026]"),
    ],
)
def test_special_characters(text: str, found: str) -> None:
    assert escaped(text) == found


@pytest.mark.skipif(GROFF is None, reason="groff formats man pages")
def test_groff_formats_every_page_without_warnings(folder: Path) -> None:
    done = run_program("groff", "-man", "-Tutf8", "-ww", *sorted(folder.iterdir()))
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r"\x1b\[[\d;]*m|.\x08", "", done.stdout)
    assert "trainkit submit --nodes 2 --follow" in shown
    assert len(list(pages())) == len(list(folder.iterdir()))
