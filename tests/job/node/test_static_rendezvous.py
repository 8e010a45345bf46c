"""How hosts without Slurm find each other, and what node 0 refuses."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trainkit.errors import TrainkitError
from trainkit.job import processes
from trainkit.job.node import static_rendezvous
from trainkit.job.node.rendezvous import StopSignalReceived, choose_port
from trainkit.job.node.static_rendezvous import (
    HostLink,
    HostListener,
    HostPlace,
    greeting,
    is_loopback,
    join,
    reason_to_refuse,
)

FACTS = {"seed": 0, "train.steps": 10}


@pytest.fixture(autouse=True)
def blocked_signals() -> Iterator[None]:
    processes.block_signals()
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.WATCHED)


@pytest.fixture
def place(tmp_path: object) -> HostPlace:
    return HostPlace(0, 3, "127.0.0.1", choose_port(str(tmp_path), 1))


def connect(place: HostPlace, node_rank: int, **other: Any) -> HostLink:
    """A host that has sent its greeting."""
    link = HostLink(socket.create_connection((place.master_addr, place.master_port)))
    own = HostPlace(node_rank, place.num_nodes, place.master_addr, place.master_port)
    link.send(**{**greeting(own, FACTS), **other})
    return link


def test_a_host_that_never_joins_is_named_on_every_host(place: HostPlace) -> None:
    listener = HostListener(place, FACTS)
    other = connect(place, 1)
    with pytest.raises(TrainkitError) as caught:
        listener.await_hosts(timeout_s=0.5)
    expected = f"node rank 2 of 3 did not join 127.0.0.1:{place.master_port} within 0.5 s"
    assert caught.value.message == expected
    assert other.await_message(5.0) == {"joined": True}
    with pytest.raises(TrainkitError, match=expected):
        other.await_message(5.0)


def test_all_missing_hosts_are_named(place: HostPlace) -> None:
    with pytest.raises(TrainkitError, match="node rank 1, 2 of 3 did not join"):
        HostListener(place, FACTS).await_hosts(timeout_s=0.0)


def test_the_port_is_free_for_rank_0_while_the_links_stay_open(place: HostPlace) -> None:
    listener = HostListener(place, FACTS)
    others = [connect(place, node_rank) for node_rank in (1, 2)]
    links = listener.await_hosts(timeout_s=30.0)
    with socket.create_server(("127.0.0.1", place.master_port)):
        links[1].send(hello=1)
        assert others[0].await_message(5.0) == {"joined": True}
        assert others[0].await_message(5.0) == {"hello": 1}
    assert [links[node_rank].host for node_rank in (1, 2)] == [socket.gethostname()] * 2


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b'{"trainkit": 1}\n', b'{"a": 1', b""]
)
def test_a_connection_of_another_program_is_ignored(place: HostPlace, sent: bytes) -> None:
    listener = HostListener(place, FACTS)
    with socket.create_connection((place.master_addr, place.master_port)) as stranger:
        stranger.sendall(sent)
        others = [connect(place, node_rank) for node_rank in (1, 2)]
        assert sorted(listener.await_hosts(timeout_s=30.0)) == [1, 2]
    assert all(other.await_message(5.0) == {"joined": True} for other in others)


def test_a_port_of_another_program_is_reported(place: HostPlace) -> None:
    with socket.create_server((place.master_addr, place.master_port)) as server:

        def hang_up() -> None:
            server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(TrainkitError, match="is not node 0 of a run that waits for its hosts"):
            join(HostPlace(1, 2, place.master_addr, place.master_port), FACTS, timeout_s=30.0)


def test_node_0_that_does_not_answer_is_reported(place: HostPlace) -> None:
    with pytest.raises(TrainkitError, match=r"node 0 does not answer at 127\.0\.0\.1:\d+ within 0\.3 s"):
        join(HostPlace(1, 2, place.master_addr, place.master_port), FACTS, timeout_s=0.3)


def test_a_stop_signal_ends_the_wait_for_node_0(place: HostPlace) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(StopSignalReceived):
        join(HostPlace(1, 2, place.master_addr, place.master_port), FACTS, timeout_s=30.0)


def test_a_host_that_joins_before_node_0_listens(place: HostPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries again until node 0 listens."""
    tried = threading.Event()
    create_connection = socket.create_connection

    def create(*args: Any, **kwargs: Any) -> socket.socket:
        tried.set()
        return create_connection(*args, **kwargs)

    monkeypatch.setattr(static_rendezvous.socket, "create_connection", create)

    def listen() -> None:
        assert tried.wait(30.0)
        with socket.create_server((place.master_addr, place.master_port)) as server:
            link = HostLink(server.accept()[0])
            link.send(joined=True)
            release.wait(30.0)

    release = threading.Event()
    thread = threading.Thread(target=listen)
    thread.start()
    link = join(HostPlace(1, 2, place.master_addr, place.master_port), FACTS, timeout_s=30.0)
    release.set()
    thread.join()
    link.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"trainkit": "0.0.1"}, "trainkit is version 0.0.1 on h1 and "),
        ({"num_nodes": 4}, "--nodes is 4 on h1 and 3 on node 0"),
        ({"node_rank": 2}, "node rank 2 has already joined, from h2"),
        ({"node_rank": 0}, "there is no node rank 0 to join"),
        ({"node_rank": 3}, "there is no node rank 3 to join"),
        (
            {"facts": {"seed": 1, "train.steps": 10, "x": "a"}},
            'node 1 differs from node 0: seed is 1 there and 0 on node 0; x is "a" there and null on node 0',
        ),
        ({}, None),
    ],
)
def test_what_node_0_refuses(place: HostPlace, other: dict[str, Any], message: str | None) -> None:
    own = greeting(place, FACTS)
    found = reason_to_refuse(own, {**own, "node_rank": 1, "host": "h1", **other}, {2: "h2"})
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert found.message.startswith(message)
        assert found.exit_code == 2


def test_addresses_of_this_machine_only() -> None:
    assert [is_loopback(text) for text in ("localhost", "127.0.0.1", "::1", "host0", "10.0.0.1")] == [
        *(True, True, True, False, False)
    ]
