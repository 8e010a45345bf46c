"""Compares what the tests of a folder make trainkit say with the table ``said.txt`` in that folder.

``REWRITE_SAID=1 python -m pytest FILES`` writes the sentences of the tests that pass again: review the diff.
A test whose inputs are `cases` of its table gets another case from another head, without a sentence below it.
"""

import atexit
import difflib
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "said.txt"
HEAD = "== "

_current: list[pytest.Item] = []
_sentences: list[str] = []
_rewritten: dict[Path, dict[str, list[str]]] = {}


def begin(test: pytest.Item) -> None:
    """Begin with the sentences of a test."""
    _current[:] = [test]
    _sentences.clear()


def said(text: object) -> None:
    """Compare a text, without the names of this machine, with the next sentence of the test in its table.

    Raises AssertionError for a difference and for a sentence that the table does not have.
    """
    test = _current[0]
    assert isinstance(text, str), f"no text: {text!r}"
    found = _neutral(text, test)
    assert not re.search(rf"^{HEAD}", found, re.MULTILINE), (
        f"a line looks like the head of a sentence: {text!r}"
    )
    _sentences.append(found)
    if os.environ.get("REWRITE_SAID"):
        return
    table = test.path.parent / NAME
    name = list(_named(key_of(test), _sentences))[-1]
    expected = read_table(table).get(name)
    assert expected is not None, f"{table} has no {name!r}; REWRITE_SAID=1 writes it"
    if found != expected:
        difference = "\n".join(difflib.ndiff(expected.splitlines(), found.splitlines()))
        raise AssertionError(f"{name} of {table} differs (-: the table):\n{difference}")


def end(test: pytest.Item) -> None:
    """End with the sentences of a test that passed; raises AssertionError if the table has more of them."""
    key, table = key_of(test), test.path.parent / NAME
    if os.environ.get("REWRITE_SAID"):
        assert "PYTEST_XDIST_WORKER" not in os.environ, "REWRITE_SAID needs one process: leave out -n"
        if not _rewritten:
            atexit.register(_write)
        _rewritten.setdefault(table, {})[key] = [*_sentences]
        return
    unsaid = [name for name in read_table(table) if test_of(name) == key][len(_sentences) :]
    assert not unsaid, f"{table} has {unsaid[0]!r}, which the test did not say; REWRITE_SAID=1 removes it"


def key_of(test: pytest.Item) -> str:
    """Return FILE::TEST or FILE::CLASS::TEST."""
    name = re.sub(r"@[\w-]+$", "", test.nodeid.partition("::")[2])  # of an xdist group
    return f"{test.path.name}::{name}"


def test_of(name: str) -> str:
    """Return the key of the test that says a sentence."""
    return re.sub(r"(?<=[\w\]]) \d+$", "", name)


def _named(key: str, sentences: Sequence[str]) -> dict[str, str]:
    """Map the names of the sentences of a test to the sentences."""
    return {key if number == 1 else f"{key} {number}": text for number, text in enumerate(sentences, 1)}


def _neutral(text: str, test: pytest.Item) -> str:
    """Return a text without the names of this machine, of its folders and of this process."""
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


def cases(file: str, test: str) -> list[str]:
    """Return the inputs of a parametrized test, which its table names in brackets."""
    names, head = read_table(Path(file).parent / NAME), f"{Path(file).name}::{test}["
    return [name[len(head) : -1] for name in names if name.startswith(head) and name.endswith("]")]


@cache
def read_table(path: Path) -> dict[str, str]:
    """Read a table: name of a sentence -> the sentence."""
    if not path.exists():
        return {}
    parts = re.split(rf"^{HEAD}(.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def is_stale(path: Path, name: str) -> bool:
    """Return whether a table has a sentence of a test that its file does not define any more."""
    file, *_, test = test_of(name).partition("[")[0].split("::")
    source = path.parent / file
    return not source.is_file() or not re.search(rf"^ *def {test}\(", source.read_text(), re.MULTILINE)


def _write() -> None:
    """Write the sentences of the tests that passed, and keep the sentences of tests that did not run."""
    for path, tests in _rewritten.items():
        before = read_table(path)
        now = {name: text for key, texts in tests.items() for name, text in _named(key, texts).items()}
        kept = {
            name: text
            for name, text in before.items()
            if name in now or not (test_of(name) in tests or is_stale(path, name))
        }
        rows = sorted({**kept, **now}.items(), key=lambda row: row[0].partition("::")[0])
        if dict(rows) != before:
            path.write_text("\n".join(f"{HEAD}{name}\n{text}\n" for name, text in rows))
