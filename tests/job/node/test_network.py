"""Which interface the ranks talk over, and what the presets say."""

from __future__ import annotations

import pytest

from trainkit.errors import UsageError
from trainkit.job.node.network import addresses, interface_to, network_environ


def test_the_way_to_this_machine_is_the_loopback_interface() -> None:
    assert addresses()["127.0.0.1"] == "lo"
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no-such-host.invalid") is None


def test_ranks_on_one_host_talk_over_lo() -> None:
    environ, said = network_environ("auto", None)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}
    assert "all ranks are on this host" in said


def test_presets() -> None:
    auto, said = network_environ("auto", "127.0.0.1")
    assert auto == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert said == "interface lo: the route to 127.0.0.1"
    assert network_environ("socket", "127.0.0.1")[0] == {**auto, "NCCL_IB_DISABLE": "1"}
    assert network_environ("debug", "127.0.0.1")[0]["NCCL_DEBUG"] == "INFO"


def test_a_named_interface_must_exist() -> None:
    assert network_environ("lo", "anything")[0]["NCCL_SOCKET_IFNAME"] == "lo"
    with pytest.raises(UsageError, match="has no such interface") as caught:
        network_environ("ib7", "anything")
    assert "its interfaces are" in caught.value.hint


def test_no_way_is_said() -> None:
    environ, said = network_environ("auto", "no-such-host.invalid")
    assert environ == {}
    assert said.startswith("no interface chosen")
