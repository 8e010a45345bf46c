"""Writes a man page for every command, from the same texts as `--help`.

python -m tools.man_pages FOLDER         # FOLDER/trainkit.1, FOLDER/trainkit-submit.1 and so on
MANPATH=: man -l FOLDER/trainkit-submit.1
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from trainkit import __version__
from trainkit.cli.help import by_heading
from trainkit.cli.main import COMMANDS, cli


def main() -> None:
    """Write the pages to the folder given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the pages, such as share/man/man1")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / f"{name}.1").write_text(text, encoding="ascii")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every page."""
    yield from _pages(cli, click.Context(cli, info_name="trainkit", help_option_names=["-h", "--help"]))


def _pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    name = context.command_path.replace(" ", "-")
    yield name, "\n".join(_lines(name, command, context)) + "\n"
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            assert inner is not None
            yield from _pages(inner, click.Context(inner, context, info_name=word))


def _lines(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    yield f'.TH "{escaped(name.upper())}" 1 "" "trainkit {__version__}" "trainkit"'
    yield ".SH NAME"
    yield f"{escaped(name)} \\- {escaped(_summary(command, context).rstrip('.'))}"
    yield ".SH SYNOPSIS"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\\fB{escaped(context.command_path)}\\fR {escaped(usage)}"
    yield ".SH DESCRIPTION"
    yield from _text(cleandoc(command.help or ""))
    options = [item for item in command.get_params(context) if isinstance(item, click.Option)]
    headings = {"Options": {item.opts[0]: item for item in options}}
    if not isinstance(command, click.Group):
        headings = dict(by_heading(options))
    for heading, found in headings.items():
        records = [record for item in found.values() if (record := item.get_help_record(context))]
        if records:
            yield f".SH {heading.upper()}"
        for option, text in records:
            yield from (".TP", f"\\fB{escaped(option)}\\fR", escaped(text))
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            assert inner is not None
            text = _summary(inner, click.Context(inner, context, info_name=word))
            yield from (".TP", f"\\fB{escaped(name)}\\-{escaped(word)}\\fR(1)", escaped(text))
    yield from _text(command.epilog or "")
    above = context.command_path.split()[:-1]
    if above:
        yield from (".SH SEE ALSO", f"\\fB{escaped('-'.join(above))}\\fR(1)")


def _summary(command: click.Command, context: click.Context) -> str:
    words = context.command_path.split()
    named = COMMANDS.get(words[-1]) if len(words) == 2 else None
    return named or command.get_short_help_str(limit=1000)


def _text(text: str) -> Iterator[str]:
    r"""Yield paragraphs; a paragraph that begins with ``\b`` gets a heading and keeps its line breaks."""
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("\b\n"):
            heading, *lines = block.splitlines()[1:]
            yield f".SH {escaped(heading.rstrip(':').upper())}"
            yield from (".nf", *(escaped(line.strip()) for line in lines), ".fi")
        elif block:
            yield from (".PP", escaped(" ".join(block.split())))


def escaped(text: str) -> str:
    """Return one line of text in ASCII, escaped for a man page."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    main()
