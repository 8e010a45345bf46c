"""The tables of sentences: what they do not notice would let a test pass that checks less than it says."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import said
from tests.support.said import NAME, ROOT, is_stale, read_table

FILE = "def test_one(): ...\ndef test_odd(name): ...\ndef test_loop(): ...\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Path]:
    """A folder with a file of tests. Its tables are written at once, not at the end of this process."""
    (tmp_path / "test_it.py").write_text(FILE)
    monkeypatch.setattr(said, "_rewritten", {})
    monkeypatch.setattr(said.atexit, "register", lambda write: None)
    monkeypatch.delenv("REWRITE_SAID", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    yield tmp_path
    said.begin(request.node)


def run(folder: Path, **tests: list[str]) -> None:
    """Run tests of these names that say these sentences."""
    for name, sentences in tests.items():
        test: Any = SimpleNamespace(path=folder / "test_it.py", nodeid=f"any/test_it.py::{name}", funcargs={})
        said.begin(test)
        for text in sentences:
            said.said(text)
        said.end(test)


def rewrite(folder: Path, **tests: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWRITE_SAID", "1")
        run(folder, **tests)
        said._write()
    said._rewritten.clear()
    read_table.cache_clear()
    return (folder / NAME).read_text()


def test_a_table_has_what_the_tests_say_and_no_more(folder: Path) -> None:
    tests = {"test_one": ["one"], "test_loop": ["x", "y"]}
    with pytest.raises(AssertionError, match="REWRITE_SAID=1 writes it"):
        run(folder, **tests)
    written = rewrite(folder, **tests)
    assert written == (
        "== test_it.py::test_one\none\n\n== test_it.py::test_loop\nx\n\n== test_it.py::test_loop 2\ny\n"
    )
    run(folder, **tests)
    with pytest.raises(AssertionError, match="differs"):
        run(folder, test_one=["two"])
    with pytest.raises(AssertionError, match=r"has no 'test_it\.py::test_one 2'"):
        run(folder, test_one=["one", "more"])
    for spoken in ([], ["x"]):
        with pytest.raises(AssertionError, match=r"test_loop.*', which the test did not say"):
            run(folder, test_loop=spoken)
    # A rewrite keeps the sentences of tests that do not run.
    rewrite(folder, test_gone=["stale"])
    assert is_stale(folder / NAME, "test_it.py::test_gone")
    written = rewrite(folder, test_loop=["z"])
    assert written == "== test_it.py::test_one\none\n\n== test_it.py::test_loop\nz\n"


def test_no_table_has_a_sentence_of_a_test_that_is_gone() -> None:
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob(NAME)
        for name in read_table(path)
        if is_stale(path, name)
    ]
    assert stale == []
