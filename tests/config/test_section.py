"""Tests the behaviour that all sections of a config share."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
CONFIG = "from trainkit.config.schema import RunConfig\nRunConfig(name='a')\n"
OTHER = "from pydantic import BaseModel\nclass Other(BaseModel):\n    name: str\n"


@pytest.mark.parametrize(("code", "is_loaded"), [(CONFIG, False), (OTHER, True), (CONFIG + OTHER, True)])
def test_a_plugin_of_pydantic_is_for_models_of_others(tmp_path, code, is_loaded):
    """A tracker may install such a plugin, with all its imports."""
    info = tmp_path / "tracker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pydantic]\ntracker = tracker\n")
    (tmp_path / "tracker.py").write_text("raise ImportError('it was loaded')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environ.pop("PYDANTIC_DISABLE_PLUGINS", None)
    argv = [sys.executable, "-c", code]
    done = run_program(*argv, env=environ)
    assert done.returncode == 0, done.stderr
    assert ("it was loaded" in done.stderr) == is_loaded
