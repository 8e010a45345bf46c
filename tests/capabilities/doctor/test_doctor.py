"""Tests the checks of `trainkit doctor` on this machine and of the environment of a job, and their output."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit import __version__
from trainkit.capabilities.doctor import NodeReport, Request, environment, from_json, node, to_json
from trainkit.capabilities.doctor import command as cli_doctor
from trainkit.cli.main import main
from trainkit.job.preflight import Finding
from trainkit.launch import packages


def test_healthy_machine_passes(tmp_path, capsys):
    assert main(["doctor", "--quick", "--json", "--run-dir", str(tmp_path)]) == 0
    found = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {"Python", "CPU", "GPU", "name", "interface", "port"} <= found
    assert {"disk", "write speed", "rename", "clock"} <= found
    assert list(tmp_path.iterdir()) == []


def test_config_of_the_folder_is_read(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.yaml").write_text("launch: {network: none0}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--quick"]) == 1
    printed = capsys.readouterr()
    assert "none0" in printed.out
    said(printed.err.splitlines()[0])
    assert ", 1 failure\n" in printed.err


def test_values_of_nodes_are_merged(capsys):
    def values(*texts: str) -> str:
        cli_doctor._echo_nodes(
            [Finding("CPU", "ok", text, host=f"n{index}") for index, text in enumerate(texts, 1)]
        )
        return capsys.readouterr().out

    said(values("same", "same"))
    said(values("8 cores, load 0.5", "8 cores, load 12.0", "8 cores, load 3.1"))


def test_request_and_report_survive_json():
    request = Request(Path("/r"), "ib", ("b",), True, ("python", "-u"), (("PYTHONPATH", "/x"),), ("/f", "a"))
    assert from_json(Request, to_json(request)) == request
    assert from_json(Request, to_json(Request(Path("/r")))) == Request(Path("/r"))
    report = NodeReport("a", 2, 7, ("b",), findings=(Finding("CPU", "ok", "8", host="a"),), step="7.0")
    assert from_json(NodeReport, to_json(report)) == report


def test_messages_of_hosts_survive_being_mixed(capsys, monkeypatch):
    sent, lines = [], []
    for host in ("a", "b"):
        monkeypatch.setattr(node, "own_host", lambda host=host: host)
        sent.append(f"{host}: {'x y ' * 700}.")
        node.send(sent[-1])
        lines.append(capsys.readouterr().out.splitlines(keepends=True))
    assert len(lines[0]) > 3
    assert max(map(len, lines[0])) < 1024
    mixed = [line for pair in zip(*lines, strict=True) for line in pair]
    assert list(node.received(["srun: a notice\n", *mixed])) == sent


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
    assert f" has trainkit {__version__}, " in check.value
