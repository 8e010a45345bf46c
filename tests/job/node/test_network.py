"""Tests which interface the ranks communicate over, and the variables that the presets set."""

import pytest

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.job.node import worker_env as network
from trainkit.job.node.worker_env import addresses, interface_to, network_environ


def test_presets():
    assert interface_to("127.0.0.1") == addresses()["127.0.0.1"] == "lo"
    alone, line = network_environ("auto", None)
    said(line)
    assert interface_to(NOWHERE) is None
    nowhere, line = network_environ("auto", NOWHERE)
    assert nowhere == {}
    said(line)
    auto, line = network_environ("auto", "127.0.0.1")
    assert auto == {"GLOO_SOCKET_IFNAME": "lo"}
    assert alone == {**auto, "NCCL_SOCKET_IFNAME": "=lo"}
    said(line)
    assert network_environ("socket", "127.0.0.1")[0] == {**auto, "NCCL_IB_DISABLE": "1"}
    assert network_environ("debug", "127.0.0.1")[0]["NCCL_DEBUG"] == "INFO"


NOWHERE = "no-such-host.invalid"


class Host:
    """The interfaces of a host. The first one leads to the other hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, str] = {}
        self.flags: dict[str, int] = {}
        monkeypatch.setattr(network, "addresses", lambda: self.addresses)
        monkeypatch.setattr(network, "interface_to", lambda host: next(iter(self.addresses.values())))
        monkeypatch.setattr(network, "_flags", lambda name: self.flags[name])

    def has(self, *names: str) -> None:
        self.addresses = {f"10.0.0.{number}": name for number, name in enumerate((*names, "lo"))}
        self.flags = dict.fromkeys(names, UP) | {"lo": UP | network.IFF_LOOPBACK}


UP = network.IFF_UP | network.IFF_RUNNING


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_the_only_interface_is_that_of_nccl_too(host):
    host.has("eth1")
    environ, line = network_environ("auto", "other")
    # NCCL takes names for prefixes. gloo compares whole names and has no prefix sign.
    assert environ == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    said(line)
    host.has("eth1", "docker0", "virbr0")
    assert network_environ("auto", "other")[0] == environ
    host.has("eth1", "eth2")
    host.flags["eth2"] = network.IFF_UP  # the interface has no cable
    assert network_environ("auto", "other")[0] == environ


@pytest.mark.parametrize("preset", ["auto", "ib", "socket", "debug"])
@pytest.mark.parametrize("more", [("eth10",), ("ib0", "ib1"), ("cni0",)])
def test_nccl_chooses_among_several_interfaces(host, monkeypatch, tmp_path, preset, more):
    """NCCL prefers InfiniBand, and may use several interfaces at once."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    host.has("eth1", *more)
    environ, choice = network_environ(preset, "other")
    assert environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "NCCL_SOCKET_IFNAME" not in environ
    said(choice)


def test_the_interfaces_of_this_host():
    assert "lo" not in network.usable_interfaces()
    assert set(network.usable_interfaces()) <= set(addresses().values())
    assert network._flags("lo") & network.IFF_LOOPBACK
    assert network._flags("no-such") == 0


def test_a_named_interface_must_exist():
    environ, line = network_environ("lo", "anything")
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    said(line)
    with pytest.raises(UsageError, match="has no such interface") as caught:
        network_environ("ib7", "anything")
    assert "interfaces are" in caught.value.hint
