"""Tests the checks of the interpreter and the packages of a job."""

import json
import os
import sys

import pytest

from tests.support.said import said
from trainkit import __version__
from trainkit.capabilities.doctor import Request, environment
from trainkit.cli.main import main
from trainkit.launch import packages


def report(capsys: pytest.CaptureFixture[str], *args: str, code: int) -> dict[str, tuple[str, str]]:
    """Map the name of each check to its state and value."""
    assert main(["doctor", "--quick", "--json", *args]) == code
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {check["name"]: (check["state"], check["value"]) for check in checks}


def test_environment_of_the_config_is_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    found = report(capsys, "--set", f"launch.python={other}", code=1)
    assert found["Python"][0] == "failure"
    assert found["Python"][1].endswith("has no trainkit")
    found = report(capsys, "--set", "launch.venv=/nonexistent", code=1)
    assert found["environment"][0] == "failure"
    said(found["environment"][1])
    said(found["Python"][1])


def test_environment_that_only_the_job_knows_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainkit.cluster.discovery.has_slurm", lambda *_: True)
    monkeypatch.setattr("trainkit.capabilities.doctor.nodes.slurm_checks", lambda: iter(()))
    found = report(capsys, "--set", "launch.container=torch.sif", code=0)
    text = "checked the environment of this command, but the job uses the environment in launch.container"
    assert found["environment"] == ("warning", text)
    found = report(capsys, "--set", "launch.modules=[cuda]", code=0)
    text = f"checked {sys.executable} without launch.modules, which the job applies before starting its ranks"
    assert found["environment"] == ("warning", text)


@pytest.mark.slow
def test_torch_that_cannot_be_imported_fails(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    check = environment.check_torch(Request(tmp_path))
    assert check.state == "failure"
    assert "libcudnn.so.9" in check.value


def test_other_trainkit_of_an_interpreter_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "__version__", "99.0")
    check = environment.check_python(Request(tmp_path))
    assert check.state == "failure"
    assert check.value.endswith(f" has trainkit {__version__}, but this is trainkit 99.0")
