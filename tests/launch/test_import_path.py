"""Tests where Python looks for modules in a job that has a copy of the code."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.said import said
from trainkit.launch.snapshot import copy_code, find_import_path
from trainkit.launch.source_tree import SourceTree
from trainkit.plan.workload import TRAINER


def tree(*files: str, subfolder: str = "") -> SourceTree:
    return SourceTree("/source", "git", subfolder, dict.fromkeys(files, Path("/").stat()))


def find(*files: str, subfolder: str = "", inherited: str = "") -> tuple[str, ...]:
    found, notes = find_import_path(tree(*files, subfolder=subfolder), "/code", inherited)
    assert notes == []
    return tuple(found)


def test_where_python_looks():
    assert find() == ("/code",)
    assert find("sub/a.py", subfolder="sub") == ("/code/sub",)
    assert find("a.py", subfolder="empty") == ("/code/empty",)
    around = ("tools/exp/a.py", "tools/setup.py", "src/pkg/__init__.py", "pyproject.toml")
    assert find(*around, subfolder="tools/exp") == ("/code/tools/exp", "/code/tools", "/code/src")
    inherited = "/source/lib:/elsewhere:relative::/source/gone:/sourcery"
    assert find("lib/a.py", inherited=inherited) == ("/code", "/code/lib")
    like_modules = ("logging/x.txt", "sub/io.py", "queue.yaml", "types/deep/__init__.py")
    assert find(*like_modules) == ("/code",)


@pytest.mark.parametrize(
    ("name", "code"), [("queue.py", "/code"), ("types/__init__.py", "/code"), ("a.py", "/code:1")]
)
def test_a_folder_that_cannot_be_on_the_path(name, code):
    found, [note] = find_import_path(tree(name, "logging/x.txt", "sub/io.py"), code, "")
    assert found == []
    said(note)


def test_modules_come_from_the_copy(project, run):
    """The same is true in a job, because an installation that leads to the source comes after PYTHONPATH."""
    (project / "pyproject.toml").touch()
    (project / "mine.py").write_text("VALUE = 'as submitted'")
    found = copy_code(project, run, TRAINER)
    (project / "mine.py").write_text("VALUE = 'edited'")
    script = f"import sys; sys.path.append({str(project)!r}); import mine; print(mine.VALUE)"
    done = run_program(sys.executable, "-c", script, env={"PYTHONPATH": os.pathsep.join(found.import_path)})
    assert done.stdout == "as submitted\n"
