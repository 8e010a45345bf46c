"""Prints text with control characters escaped, and JSON with secrets masked.

Names, messages, reasons, hosts and logs come from other programs, so all of them may contain control
characters. Characters that the locale's encoding does not support are replaced in text and escaped in JSON.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

import click

from trainkit.terminal import BAD, COLOUR, CONTROL, TITLE, WATCH, Styled, painted

_ESCAPED = re.compile(f"({COLOUR})|{CONTROL}")
_REPLACED = re.compile(CONTROL)
_SURROGATE = re.compile("[\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""Escape control characters as in JSON, such as ``\u001b``, but keep ANSI colours."""
    return _ESCAPED.sub(lambda found: found[1] or f"\\u{ord(found[0]):04x}", text)


def replaced(text: str) -> str:
    """Replace each control character with a visible character, so that the text keeps its length."""
    return _REPLACED.sub("\N{REPLACEMENT CHARACTER}", text)


def encodable(text: str, stream: TextIO) -> str:
    """Replace each character that a stream's encoding does not support with `?`."""
    if text.isascii():
        return text
    encoding = stream.encoding or "utf-8"  # An in-memory stream has no encoding.
    try:
        text.encode(encoding, stream.errors or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "replace").decode(encoding)
    return text


def colours() -> bool | None:
    """Return click's colour setting: False disables colours, and None lets click detect a terminal."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def echo_error(text: str) -> None:
    """Print an error, a warning or a hint to stderr, with the first word in colour."""
    lines = [_said(line) for line in text.split("\n")]
    click.echo("\n".join(lines), err=True, color=colours())


def _said(line: str) -> str:
    for word, style in (("error:", BAD), ("warning:", WATCH), ("hint:", TITLE)):
        before, found, rest = line.partition(word)
        if found and not before.strip():
            return before + painted(Styled(word, style)) + re.sub(COLOUR, "", rest)
    return re.sub(COLOUR, "", line)


class EscapedStream:
    """A stream that escapes control characters and replaces characters that its encoding does not support."""

    buffer = None
    """Set to None, so that click does not write UTF-8 bytes directly to the buffer of an ASCII stream."""

    def __init__(self, stream: TextIO, escapes: bool = True) -> None:
        self._stream, self._escapes = stream, escapes

    @property
    def whole(self) -> EscapedStream:
        """Return a stream for printing a log; it escapes control characters only on a terminal."""
        return self if self.isatty() else EscapedStream(self._stream, escapes=False)

    def write(self, text: str) -> int:
        return self._stream.write(encodable(escaped(text) if self._escapes else text, self._stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape control characters that the block prints, but not the output of programs started by it."""
    # sys.stdout or sys.stderr is None if the parent process closed it.
    out, err = (stream and EscapedStream(stream) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON text for stdout.

    The text is ASCII if stdout does not use UTF-8, or if a string in the value contains undecodable bytes.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    return text if is_utf8 and not _SURROGATE.search(text) else json.dumps(value, indent=indent)


def echo_json(value: object) -> None:
    """Print a value as JSON on one line, with secrets replaced by `***`."""
    click.echo(json_text(masked(value)))


def echo_result(value: object, text: str, as_json: bool) -> None:
    """Print a result as JSON if `as_json` is True, else as text."""
    if as_json:
        echo_json(value)
    else:
        click.echo(text)


def masked(value: object, key: str = "") -> object:
    """Mask each string in a JSON value that looks like a secret or whose key suggests a secret."""
    from trainkit.formats import mask_secrets

    if isinstance(value, str):
        before = f"{key}: "
        return mask_secrets(before + value).removeprefix(before)
    if isinstance(value, Mapping):
        return {name: masked(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    return value
