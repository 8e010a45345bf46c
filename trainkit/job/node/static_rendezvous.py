"""The static rendezvous of a run that is started by hand on several hosts, without Slurm.

Node 0 listens at the address and port that every host is given, until all nodes have joined; after that
rank 0 listens there. The connections stay open until the run ends: signals, exits and lost hosts are reported
over them. Every message is one line of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit import __version__
from trainkit.errors import TrainkitError, UsageError
from trainkit.job import processes
from trainkit.job.node.rendezvous import LOCAL_ADDR, RENDEZVOUS_TIMEOUT_S, StopSignalReceived
from trainkit.job.signals import signal_exit_code

CONNECT_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 2.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""A host that loses power or its network is noticed after 30 seconds."""
USER_TIMEOUT_MS = 30_000
MAX_MESSAGE_BYTES = 1_000_000
MAX_DIFFERENCES = 5


@dataclass(frozen=True)
class HostPlace:
    """The place of this host in a static rendezvous."""

    node_rank: int
    num_nodes: int
    master_addr: str
    """The address of node 0, as every host is given it."""
    master_port: int

    @property
    def master(self) -> str:
        """Address and port of node 0."""
        return f"{self.master_addr}:{self.master_port}"


class HostLink:
    """The connection to another host; a thread reads it and wakes the main thread with SIGCHLD.

    The main thread must block SIGCHLD and receive it with `wait_for_signal`, as `block_signals` describes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        self.address = str(connection.getpeername()[0])
        self.host = self.address
        """The name that the other host gave itself."""
        self.is_closed = False
        """Whether the connection has ended and every message was taken."""
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"read-{self.address}", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while (line := lines.readline(MAX_MESSAGE_BYTES)).endswith(b"\n"):
                message = json.loads(line)
                if not isinstance(message, dict):
                    break
                self._put(message)
        self._put(None)

    def _put(self, message: dict[str, Any] | None) -> None:
        self._messages.put(message)
        os.kill(os.getpid(), signal.SIGCHLD)

    def send(self, **message: Any) -> None:
        """Send a message; one that cannot be sent is dropped, and `is_closed` follows."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def received(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived; sets `is_closed` after the last one of all."""
        while not self.is_closed:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return
            if message is None:
                self.is_closed = True
            else:
                yield message

    def await_message(self, timeout_s: float) -> dict[str, Any]:
        """Wait for one message.

        Raises TrainkitError when the connection ends or after the timeout, an ``error`` message as the
        TrainkitError that it describes, and StopSignalReceived when a notice signal arrives meanwhile.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            for message in self.received():
                if "error" in message:
                    raise error_of(message)
                return message
            if self.is_closed:
                raise TrainkitError(f"{self.host} has closed the connection", hint="see its output")
            if time.monotonic() > deadline_s:
                raise TrainkitError(f"{self.host} has not answered within {timeout_s:g} s")
            _pause(deadline_s - time.monotonic())

    def close(self) -> None:
        """End the connection; messages already sent still arrive."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _pause(seconds: float) -> None:
    """Wait until a link has a message or `seconds` have passed."""
    received = processes.wait_for_signal(seconds)
    if received is not None and received != signal.SIGCHLD:
        raise StopSignalReceived(received)


def describe_error(error: TrainkitError) -> dict[str, Any]:
    """The fields of a message from which `error_of` restores the error on another host."""
    return {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}


def error_of(message: Mapping[str, Any]) -> TrainkitError:
    """The error that another host has reported with `describe_error`."""
    return TrainkitError(str(message["error"]), str(message.get("hint", "")), int(message["exit_code"]))


def greeting(place: HostPlace, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a host says first: its place, its version of trainkit and the `facts` that all must agree on."""
    return {
        "trainkit": __version__,
        "host": socket.gethostname(),
        "node_rank": place.node_rank,
        "num_nodes": place.num_nodes,
        "facts": dict(facts),
    }


def join(place: HostPlace, facts: Mapping[str, Any], timeout_s: float = RENDEZVOUS_TIMEOUT_S) -> HostLink:
    """Join node 0 and wait until it has accepted this host; call with signals blocked.

    Raises TrainkitError when node 0 does not answer in time or refuses this host, UsageError for an address
    that does not resolve, and StopSignalReceived when a notice signal arrives meanwhile.
    """
    _resolve(place)
    deadline_s, retry_s = time.monotonic() + timeout_s, FIRST_RETRY_S
    while True:
        try:
            address = (place.master_addr, place.master_port)
            link = HostLink(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S))
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise TrainkitError(
                    f"node 0 does not answer at {place.master} within {timeout_s:g} s: "
                    f"{error.strerror or error}",
                    hint=f"start --node-rank 0 on {place.master_addr}; a firewall may block the port",
                ) from None
        _pause(min(retry_s, max(0.0, deadline_s - time.monotonic())))
        retry_s = min(LONGEST_RETRY_S, 1.5 * retry_s)
    link.host = f"node 0 at {place.master}"
    link.send(**greeting(place, facts))
    try:
        message = link.await_message(timeout_s)
    except TrainkitError as error:
        if link.is_closed:
            raise TrainkitError(
                f"what listens at {place.master} is not node 0 of a run that waits for its hosts",
                hint="the run may have started already, or another program uses the port; "
                "choose another --master-port on every host",
            ) from None
        raise error
    if "joined" not in message:
        raise TrainkitError(f"{link.host} has sent {message!r} instead of an answer")
    return link


def _resolve(place: HostPlace) -> tuple[socket.AddressFamily, str]:
    """The family and the address that --master-addr stands for here."""
    try:
        found = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"--master-addr {place.master_addr} does not resolve on {socket.gethostname()}: {error.strerror}",
            hint="give the IP address of the host of node rank 0",
        ) from None
    return found[0][0], str(found[0][4][0])


def is_loopback(address: str) -> bool:
    """Whether an address names this machine on every machine: ``localhost`` or 127.0.0.0/8."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _listen(place: HostPlace) -> socket.socket:
    family, address = _resolve(place)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            raise UsageError(
                f"--master-addr {place.master_addr} is {address}, which is not an address of this host, "
                f"{socket.gethostname()}",
                hint="start --node-rank 0 on that host, and the others with other node ranks",
            ) from None
    # A name may resolve to a loopback address here and to another one elsewhere.
    bound = (LOCAL_ADDR if family == socket.AF_INET else address) if is_loopback(place.master_addr) else ""
    try:
        return socket.create_server((bound, place.master_port), family=family, backlog=place.num_nodes + 16)
    except OSError as error:
        raise UsageError(
            f"node 0 cannot listen at {place.master}: {os.strerror(error.errno or 0)}",
            hint="another host may have been started with --node-rank 0, or another program uses the port: "
            "choose another --master-port on every host",
        ) from None


class HostListener:
    """Node 0 until all hosts have joined; call from a main thread with signals blocked."""

    def __init__(self, place: HostPlace, facts: Mapping[str, Any]) -> None:
        self.place = place
        self.own = greeting(place, facts)
        self.joined: dict[int, HostLink] = {}
        self._listener = _listen(place)
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._new: list[HostLink] = []
        self._thread = threading.Thread(target=self._accept, name="accept-hosts", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                self._accepted.put(self._listener.accept()[0])
                os.kill(os.getpid(), signal.SIGCHLD)

    def await_hosts(self, timeout_s: float = RENDEZVOUS_TIMEOUT_S) -> dict[int, HostLink]:
        """Wait until every node has joined; returns their links by node rank, and stops listening.

        Raises TrainkitError that names the missing node ranks after the timeout, and StopSignalReceived when
        a notice signal arrives meanwhile; the hosts that have joined are then dismissed.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while self._admit():
                if time.monotonic() > deadline_s:
                    raise self._missing_error(timeout_s)
                _pause(deadline_s - time.monotonic())
        except TrainkitError as error:
            dismiss(self.joined.values(), error)
            raise
        except StopSignalReceived as stop:
            dismiss(self.joined.values(), stopped_error(stop))
            raise
        finally:
            self._close()
        return self.joined

    @property
    def missing(self) -> list[int]:
        """The node ranks that have not joined."""
        return [node for node in range(1, self.place.num_nodes) if node not in self.joined]

    def _admit(self) -> bool:
        """Admit or refuse hosts that have connected; returns whether any is missing."""
        for node_rank, link in list(self.joined.items()):
            list(link.received())
            if link.is_closed:
                _note(f"node {node_rank} on {link.host} has left before the start")
                del self.joined[node_rank]
        with contextlib.suppress(queue.Empty):
            while True:
                with contextlib.suppress(OSError):  # it has closed the connection again
                    self._new.append(HostLink(self._accepted.get_nowait()))
        for link in list(self._new):
            message = next(link.received(), None)
            if message is not None:
                self._answer(link, message)
            if message is not None or link.is_closed:
                self._new.remove(link)
        return bool(self.missing)

    def _answer(self, link: HostLink, message: Mapping[str, Any]) -> None:
        is_host = isinstance(message.get("node_rank"), int) and isinstance(message.get("facts"), dict)
        if "trainkit" not in message or not is_host:
            link.close()  # another program that speaks JSON
            return
        link.host = str(message.get("host"))
        hosts = {node: other.host for node, other in self.joined.items()}
        problem = reason_to_refuse(self.own, message, hosts)
        if problem is not None:
            _note(f"refused {link.host}: {problem.message}")
            dismiss([link], problem)
            return
        node_rank = int(message["node_rank"])
        self.joined[node_rank] = link
        link.send(joined=True)
        _note(f"node {node_rank} on {link.host} has joined")

    def _missing_error(self, timeout_s: float) -> TrainkitError:
        missing, place = ", ".join(map(str, self.missing)), self.place
        return TrainkitError(
            f"node rank {missing} of {place.num_nodes} did not join {place.master} within {timeout_s:g} s",
            hint="start the same command with that --node-rank on its host; a firewall may block the port",
        )

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._thread.join()
        self._listener.close()
        for link in self._new:
            link.close()


def stopped_error(stop: StopSignalReceived) -> TrainkitError:
    """The error with which every host exits when one was stopped before the start."""
    host = socket.gethostname()
    return TrainkitError(
        f"{host} was stopped by {stop} before the start", exit_code=signal_exit_code(stop.received)
    )


def dismiss(links: Iterable[HostLink], error: TrainkitError) -> None:
    """Report an error to hosts, which then exit with it, and close their links."""
    for link in list(links):
        link.send(**describe_error(error))
        link.close()


def reason_to_refuse(
    own: Mapping[str, Any], other: Mapping[str, Any], joined: Mapping[int, str]
) -> TrainkitError | None:
    """Why node 0 refuses a host; None when it may join. `joined` has the hosts by node rank."""
    node_rank = int(other["node_rank"])
    if other["trainkit"] != own["trainkit"]:
        return UsageError(
            f"trainkit is version {other['trainkit']} on {other.get('host')} and {own['trainkit']} on node 0",
            hint="install the same version on every host",
        )
    if other.get("num_nodes") != own["num_nodes"]:
        return UsageError(
            f"--nodes is {other.get('num_nodes')} on {other.get('host')} and {own['num_nodes']} on node 0",
            hint="give every host the same --nodes",
        )
    if node_rank in joined:
        return UsageError(
            f"node rank {node_rank} has already joined, from {joined[node_rank]}",
            hint=f"give every host its own --node-rank, from 0 to {own['num_nodes'] - 1}",
        )
    if node_rank not in range(1, own["num_nodes"]):
        return UsageError(f"there is no node rank {node_rank} to join")
    different = _differences(own["facts"], other["facts"])
    if different:
        more = f" and {len(different) - MAX_DIFFERENCES} more" if len(different) > MAX_DIFFERENCES else ""
        return UsageError(
            f"node {node_rank} differs from node 0: {'; '.join(different[:MAX_DIFFERENCES])}{more}",
            hint="start the same command with the same config on every host",
        )
    return None


def _differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """``KEY is A here and B on node 0`` for each key whose values differ."""
    return [
        f"{key} is {json.dumps(other.get(key))} there and {json.dumps(own.get(key))} on node 0"
        for key in sorted(own.keys() | other.keys())
        if own.get(key) != other.get(key)
    ]
