"""Tests the checks of `trainkit doctor` on this machine, and their output."""

import json
from pathlib import Path

from tests.support.said import said
from trainkit.capabilities.doctor import NodeReport, Request, from_json, node, to_json
from trainkit.capabilities.doctor import command as cli_doctor
from trainkit.cli.main import main
from trainkit.job.preflight import Finding


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
    assert "launch.network is none0" in printed.out
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
