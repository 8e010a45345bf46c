"""`trainkit doctor` on this machine: what it checks and how it prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.cli import doctor as cli_doctor
from trainkit.cli.main import main
from trainkit.doctor import Finding, NodeReport, Request, node


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine alone, whatever it has."""
    monkeypatch.setattr("trainkit.cluster.discovery.has_slurm", lambda *_: False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_healthy_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json", "--run-dir", str(tmp_path)]) == 0
    found = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {"Python", "CPU", "GPU", "name", "interface", "port"} <= found
    assert {"disk", "write speed", "rename", "clock"} <= found
    assert list(tmp_path.iterdir()) == []


def test_config_of_the_folder_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("launch: {network: none0}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--quick"]) == 1
    printed = capsys.readouterr()
    assert "launch.network is none0" in printed.out
    assert printed.err.startswith("config: config.yaml (in this folder)\n")
    assert ", 1 failure\n" in printed.err


def test_values_of_nodes_are_merged(capsys: pytest.CaptureFixture[str]) -> None:
    def values(*texts: str) -> list[str]:
        cli_doctor._echo_nodes(
            [Finding("CPU", "ok", text, host=f"n{index}") for index, text in enumerate(texts, 1)]
        )
        return capsys.readouterr().out.splitlines()

    assert values("8 cores, load 0.5", "8 cores, load 12.0", "8 cores, load 3.1") == [
        "ok       CPU: 8 cores, load 0.5 to 12.0 on all 3 nodes"
    ]
    assert values("same", "same") == ["ok       CPU: same on all 2 nodes"]
    assert values("3.11.7 (/a)", "3.12.1 (/a)") == [
        "ok       n1: CPU: 3.11.7 (/a)",
        "ok       n2: CPU: 3.12.1 (/a)",
    ]


def test_request_and_report_survive_json() -> None:
    request = Request(
        Path("/r"), "ib", ("b",), 1, True, ("python", "-u"), (("PYTHONPATH", "/x"),), Path("/c"), ("/f", "a")
    )
    assert Request.from_json(request.to_json()) == request
    assert Request.from_json(Request(Path("/r")).to_json()) == Request(Path("/r"))
    report = NodeReport("a", 2, [7], ["b"], findings=[Finding("CPU", "ok", "8", host="a")], time_s=1.0)
    assert NodeReport.from_json(report.to_json(), 2.0) == replace(report, arrived_s=2.0)


def test_messages_of_hosts_survive_being_mixed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
