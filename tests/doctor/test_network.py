"""The checks of names, interfaces and ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainkit.doctor import node
from trainkit.doctor.check import Request


def test_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        check = node.check_ports(Request(Path("/tmp"), port=port))
        assert (check.state, check.value) == ("failure", f"{port} is in use")
        assert f"sport = :{port}" in check.hint
    assert node.check_ports(Request(Path("/tmp"), port=port)).state == "ok"


def test_unresolvable_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "node_addr", lambda name, **_: name)
    check = node.check_name(Request(Path("/tmp"), peers=("no-such-host.invalid",)))
    assert check.state == "failure"
    assert check.value == "no-such-host.invalid cannot be resolved, and neither can its NodeAddr"


def test_peer_that_resolves_to_loopback() -> None:
    check = node.check_name(Request(Path("/tmp"), peers=("localhost",)))
    assert (check.state, check.value) == ("failure", "localhost is 127.0.0.1")


def test_interface_that_does_not_exist() -> None:
    check = node.check_interface(Request(Path("/tmp"), network="none0"))
    assert check.state == "failure"
    assert "launch.network is none0" in check.value
