"""Quotes values for a batch script: as bash arguments, in #SBATCH lines and in comments.

#SBATCH lines have different quoting rules than bash, because sbatch parses these lines itself.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from trainkit.errors import UsageError

_PLAIN_DIRECTIVE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_NO_DIRECTIVE = re.compile("[\n\r\udc80-\udcff]")
"""Matches newlines, and surrogate escapes, which represent bytes other than UTF-8."""
_SHORT_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quote(value: object) -> str:
    """Quote a value as one bash argument on a single line.

    Control characters, and bytes other than UTF-8 in file names, become escapes in ``$'…'``. A newline inside
    plain quotes would also be valid in bash, but hard to read. Raises UsageError for a NUL character, which
    an argument cannot contain.
    """
    text = _text(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(_escaped(char) for char in text) + "'"


def words(values: Iterable[object]) -> str:
    """Quote values, for example an argv, as bash arguments separated by spaces."""
    return " ".join(map(quote, values))


def directive(value: object) -> str:
    """Quote the value of a long option in an ``#SBATCH --option=VALUE`` line.

    sbatch splits `#SBATCH` lines itself: quotes group words, a backslash escapes the next character even
    within single quotes, ``#`` starts a comment, and nothing is expanded. Raises UsageError for characters
    that an `#SBATCH` line cannot contain.
    """
    text = _text(value)
    if (broken := _NO_DIRECTIVE.search(text)) is not None:
        what = "a line break" if broken[0] in "\n\r" else "bytes that are not UTF-8"
        message = f"{text!a} cannot be written in an #SBATCH line: it contains {what}"
        raise UsageError(message, hint="choose a name or a folder without this character")
    if _PLAIN_DIRECTIVE.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def log_path(path: str) -> str:
    """Escape a path for --output and similar options, so that Slurm does not expand patterns such as ``%j``.

    If a path contains a backslash, Slurm expands no patterns and removes one level of backslashes.
    """
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def comment(value: object) -> str:
    """Escape the unprintable characters of a value for a comment after ``#``."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value)
    )


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike)):
        # For an undefined template variable, str() raises an error that names the variable.
        message = f"{type(value).__name__} {str(value)!r} cannot be written in a script"
        raise UsageError(message, hint="only text, numbers and paths can be written")
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else str(value)
    if "\0" in text:
        message = f"{text!a} cannot be written in a script: it contains a NUL character"
        raise UsageError(message, hint="remove it")
    return text


def _escaped(char: str) -> str:
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
