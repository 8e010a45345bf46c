"""For commands: what is next to the code can be reached from the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import content, git, names
from trainkit.errors import UsageError
from trainkit.plan.workload import TRAINER, Command
from trainkit.run.rundir import RunDir
from trainkit.submit import source_tree
from trainkit.submit.snapshot import WORK_FOLDER_NOTE, copy_code


def test_what_git_ignores(project: Path, run: RunDir) -> None:
    git(project, "init")
    (project / ".gitignore").write_text("data/\n*.bin\n.env\n__pycache__/\nruns/\nold/\n.venv\n")
    for name in ("data/deep", ".venv/bin", "sub/__pycache__", "runs/x", "old/attempts"):
        (project / name).mkdir(parents=True)
    for name in ("data/deep/x", ".venv/bin/python", "sub/m.py", "sub/w.bin", ".env", "key.pem"):
        (project / name).write_text(name)
    (project / "old" / "job.json").touch()
    (project / "sub" / "__pycache__" / "m.pyc").touch()
    found = copy_code(project, run, Command(()), {})
    assert found.links == [".venv", "data", "sub/w.bin"]
    assert content(run.code_dir) == {
        ".gitignore": (project / ".gitignore").read_text(),
        "sub/m.py": "sub/m.py",
        **{name: f"{project}/{name}" for name in found.links},
    }
    assert (run.code_dir / "data" / "deep" / "x").read_text() == "data/deep/x"
    assert found.notes == [
        "not in the copy of the code: key.pem (looks like a secret)",
        "linked into the copy of the code, not copied: .venv, data, sub/w.bin",
        WORK_FOLDER_NOTE,
    ]


def test_data_between_the_code(project: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_tree, "MAX_LINKS", 2)
    for number in range(3):
        (project / f"{number}.jpg").touch()
    with pytest.raises(UsageError, match=r"has 3 files besides its code"):
        copy_code(project, run, Command(()), {})
    assert copy_code(project, run, TRAINER, {}).num_files == 0


def test_none_unless_asked_for(project: Path, run: RunDir) -> None:
    (project / "x.bin").touch()
    assert copy_code(project, run, TRAINER, {}).links == []
    assert names(run.code_dir) == []
