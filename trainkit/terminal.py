"""Prepares text for a terminal: styles text, measures its width, and removes control characters.

None of the functions in this module have side effects.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate

COLOUR = r"\x1b\[[0-9;]*m"
CONTROL = r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
"""Matches C1 control characters, bidirectional marks, and all C0 control characters except those that move
the cursor within a line."""
_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
"""Maps the name of a style to its SGR code in an escape sequence."""


class Styled(str):
    """A text with a terminal style such as ``bold red``; outside of a terminal, it is plain text."""

    style: str

    def __new__(cls, text: str, style: str) -> Styled:
        own = super().__new__(cls, text)
        own.style = style
        return own


def plain(text: str) -> str:
    """Convert a text to a single line, replacing each control character."""
    if text.isprintable():
        return text
    line = re.sub(r"[\x08-\x0a\x0d]", " ", re.sub(COLOUR, "", text))
    return re.sub(CONTROL, "\N{REPLACEMENT CHARACTER}", line)


def painted(text: str) -> str:
    """Add the escape sequences for the style of a `Styled` line, and remove all other escape sequences."""
    codes = ";".join(_SGR[word] for word in text.style.split()) if isinstance(text, Styled) else ""
    return f"\x1b[{codes}m{plain(text)}\x1b[0m" if codes else plain(text)


def text_width(text: str) -> int:
    """Return the width of a text in terminal columns: two for a wide character, none for a combining one."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(char: str) -> int:
    from unicodedata import (
        category,
        east_asian_width,
    )  # Import this module here, because most texts are ASCII and do not need it.

    return 0 if category(char) in ("Mn", "Me", "Cf") else 2 if east_asian_width(char) in "WF" else 1


def _beginning(text: str, room: int) -> str:
    """Return the longest prefix of a text that fits into `room` columns."""
    if text.isascii():
        return text[: max(0, room)]
    used = list(accumulate(map(_columns, text)))
    return text[: bisect_right(used, room)]


def cut(text: str, room: int) -> str:
    """Shorten a text to `room` columns, ending it with ``…`` if it does not fit."""
    return text if text_width(text) <= room else f"{_beginning(text, room - 1)}…"


def cut_in_the_middle(text: str, room: int) -> str:
    """Shorten a text to `room` columns by removing its middle, keeping the last component of a path intact.

    If the last component does not fit, it is also shortened.
    """
    if text_width(text) <= room:
        return text
    folder, slash, name = text.rpartition("/")
    left = room - text_width(slash + name)
    if slash and left > 2:
        return f"{cut_in_the_middle(folder, left)}{slash}{name}"
    begin = _beginning(text, room // 2)
    end = _beginning(text[::-1], room - 1 - text_width(begin))[::-1]
    return f"{begin}…{end}"


def wrapped(text: str, room: int) -> list[str]:
    """Wrap a text to lines of at most `room` columns, breaking only words that are longer than a line."""
    if text.isascii():
        from textwrap import wrap

        return wrap(text, room, break_on_hyphens=False) or [""]
    lines = [""]
    for word in text.split():
        if text_width(f"{lines[-1]} {word}") <= room and lines[-1]:
            lines[-1] += f" {word}"
            continue
        while text_width(word) > room:
            begin = _beginning(word, max(2, room))
            lines.append(begin)
            word = word.removeprefix(begin)
        lines.append(word)
    return lines[1:] or [""]


GOOD, BAD, WATCH, DIM, TITLE = "green", "bold red", "yellow", "dim", "bold"
STATE_STYLES = {"running": GOOD, "finished": GOOD, "failed": BAD, "died": BAD, "unknown": BAD}
"""Maps the state of a run to its style; states not listed use `WATCH`. The style only supplements the name of
the state, which is always shown."""


def state_style(state: str) -> str:
    """Return the style of a state."""
    return STATE_STYLES.get(state, WATCH)
