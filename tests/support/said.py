"""Compares the messages of trainkit in the tests of a folder with the table ``said.txt`` in the folder.

``REWRITE_SAID=1 python -m pytest FILES`` writes the messages of these test files again. Review the diff.
"""

from __future__ import annotations

import atexit
import difflib
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "said.txt"
HEAD = "== "

_current: list[pytest.Item] = []
_numbers: dict[str, int] = {}
_rewritten: dict[Path, dict[str, str]] = {}


def begin(test: pytest.Item) -> None:
    """Start the messages of a test."""
    _current[:] = [test]
    _numbers.pop(_key(test), None)


def said(text: object) -> None:
    """Compare a text, without the names of this machine, with the next message of the test in its table.

    Raises AssertionError if the messages differ or the table has no more messages.
    """
    test = _current[0]
    assert isinstance(text, str), f"no text: {text!r}"
    key, table = _key(test), test.path.parent / NAME
    number = _numbers[key] = _numbers.get(key, 0) + 1
    name, found = key if number == 1 else f"{key} {number}", _neutral(text, test)
    if os.environ.get("REWRITE_SAID"):
        if not _rewritten:
            atexit.register(_write)
        _rewritten.setdefault(table, {})[name] = found
        return
    expected = _table(table).get(name)
    assert expected is not None, f"{table} has no {name!r}; REWRITE_SAID=1 writes it"
    if found != expected:
        difference = "\n".join(difflib.ndiff(expected.splitlines(), found.splitlines()))
        raise AssertionError(f"{name} of {table} differs (-: the table):\n{difference}")


def _key(test: pytest.Item) -> str:
    name = re.sub(r"@[\w-]+$", "", test.name)  # this suffix is the name of an xdist group
    return f"{test.path.name}::{name}"


def _neutral(text: str, test: pytest.Item) -> str:
    """Return a text without the names of this machine, its folders and this process."""
    folder = getattr(test, "funcargs", {}).get("tmp_path")
    for own, name in (
        (folder and str(folder), "@TMP@"),
        (sys.executable, "@PYTHON@"),
        (str(ROOT), "@ROOT@"),
        (os.uname().nodename, "@HOST@"),
        (f"trainkit-{os.getuid()}", "trainkit-@UID@"),
    ):
        if own:
            text = re.sub(
                rf"(?<![\w.-]){re.escape(own)}(?![\w-])" if own[0] != "/" else re.escape(own), name, text
            )
    return "\n".join(line.rstrip() for line in text.rstrip("\n").split("\n"))


@cache
def _table(path: Path) -> dict[str, str]:
    """Read a table, which maps the name of a message to the message."""
    if not path.exists():
        return {}
    parts = re.split(rf"^{HEAD}(.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _write() -> None:
    for path, own in _rewritten.items():
        files = {name.partition("::")[0] for name in own}
        kept = {name: text for name, text in _table(path).items() if name.partition("::")[0] not in files}
        rows = sorted({**kept, **own}.items(), key=lambda row: row[0].partition("::")[0])
        path.write_text("\n".join(f"{HEAD}{name}\n{text}\n" for name, text in rows))
