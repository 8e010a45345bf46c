"""What leaves the program as text: nothing in it controls a terminal, and JSON has no secrets.

Names, messages, reasons, hosts and logs are written by others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

import click

_COLOUR = r"\x1b\[[0-9;]*m"
_CONTROL = r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
"""C0 but for what moves within a line, C1 and bidirectional marks."""
_ESCAPED = re.compile(f"({_COLOUR})|{_CONTROL}")
_REPLACED = re.compile(_CONTROL)


def escaped(text: str) -> str:
    r"""A text with visible control characters, such as ``\u001b``, which JSON reads as well, and colours."""
    return _ESCAPED.sub(lambda found: found[1] or f"\\u{ord(found[0]):04x}", text)


def replaced(text: str) -> str:
    """A text of the same length with a sign in the place of each control character."""
    return _REPLACED.sub("\N{REPLACEMENT CHARACTER}", text)


class EscapedStream:
    """A stream that escapes what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.whole = stream if not stream.isatty() else self
        """Where a log is printed: into a file as it is."""
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(escaped(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what the block prints; programs that it starts write as they like."""
    import sys

    # Either is None when the parent closed it.
    out, err = (stream and EscapedStream(stream) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def echo_json(value: object) -> None:
    """Print a value as JSON on one line, with `***` for what looks like a secret."""
    click.echo(json.dumps(masked(value), ensure_ascii=False))


def echo_result(value: object, text: str, as_json: bool) -> None:
    """Print a result: its value as `echo_json` does, or its text."""
    if as_json:
        echo_json(value)
    else:
        click.echo(text)


def masked(value: object, key: str = "") -> object:
    """A value of JSON whose texts are masked, also by the name of their key."""
    from trainkit.formats import mask_secrets

    if isinstance(value, str):
        before = f"{key}: "
        return mask_secrets(before + value).removeprefix(before)
    if isinstance(value, Mapping):
        return {name: masked(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    return value
