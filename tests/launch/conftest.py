"""Provides a project, and the folder of a run that will get a copy of it."""

from pathlib import Path

import pytest

from trainkit.run.rundir import RunDir


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a project"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")
