"""How a value is written into a batch script: as a shell word, in an #SBATCH line, in a comment.

Three readers with three grammars: bash, sbatch's own parser of directives, and people.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from trainkit.errors import UsageError

_PLAIN_DIRECTIVE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_SHORT_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quote(value: object) -> str:
    """One word of bash that stands for exactly this value, on one line.

    Control characters, and bytes of file names that are no UTF-8, become escapes in ``$'…'``: a newline
    within a plain quoted string would be right too, but a person would not see where the value ends.
    Raises UsageError for NUL, which no argument or variable can hold.
    """
    text = _text(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(_escaped(char) for char in text) + "'"


def words(values: Iterable[object], separator: str = " ") -> str:
    """Several words, for example an argv."""
    return separator.join(quote(value) for value in values)


def directive(value: object) -> str:
    """The value of a long option in an ``#SBATCH --option=VALUE`` line.

    sbatch splits such a line by itself: quotes group, a backslash takes the next character as it is even
    within single quotes, ``#`` begins a comment, and nothing is expanded.
    Raises UsageError for what a line cannot hold.
    """
    text = _text(value)
    broken = next((char for char in text if char in "\n\r" or _is_byte(char)), None)
    if broken is not None:
        raise UsageError(
            f"{text!a} cannot be written into an #SBATCH line: it has {_in_words(broken)}",
            hint="choose a name or a folder without it",
        )
    if _PLAIN_DIRECTIVE.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def log_path(path: str) -> str:
    """A path for --output and its like, where Slurm would fill in ``%j``, written so that it stays itself.

    With a backslash anywhere Slurm fills in nothing, and takes the character behind each as it is.
    """
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def comment(value: object) -> str:
    """A value as a person reads it behind a ``#``: what does not print becomes an escape."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value)
    )


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike)):
        # An undefined variable of a template says so itself when it is made a string of.
        raise UsageError(f"{type(value).__name__} {str(value)!r} is no value that a script can hold")
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if not isinstance(text, str):
        text = os.fsdecode(text)
    if "\0" in text:
        raise UsageError(f"{text!a} cannot be written into a script: it has a NUL character")
    return text


def _escaped(char: str) -> str:
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def _is_byte(char: str) -> bool:
    """Whether this is one of the characters that Python makes of bytes that are no UTF-8."""
    return "\udc80" <= char <= "\udcff"


def _in_words(char: str) -> str:
    return "bytes that are no UTF-8" if _is_byte(char) else "a line break"
