"""Passes a value from the first task of a node to its other tasks, over a Unix socket.

So one task of a node asks the file server, not every one of thousands. The socket has a name without a file:
it disappears with the task, and only processes of the same user on the same host are answered.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from trainkit.errors import TrainkitError

POLL_S = 0.02
LONGEST_POLL_S = 0.2
LOOK_S = 2.0
_CREDENTIALS = struct.Struct("3i")


class NodeBroadcast:
    """The first task's end; from its creation on, the other tasks can connect."""

    def __init__(self, name: str, num_receivers: int) -> None:
        self._num_receivers = num_receivers
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(_address(name))
        except OSError as error:
            raise TrainkitError(
                f"cannot listen for the other tasks on {socket.gethostname()}: {error}",
                hint=f"`ss -xl` there shows which process has the socket {name}",
            ) from None
        self._listener.listen(num_receivers)

    def send(self, value: Any) -> None:
        """Send a JSON value to each of the other tasks, in a thread, as they connect."""
        data = json.dumps(value).encode()
        threading.Thread(target=self._serve, args=(data,), name="node-broadcast", daemon=True).start()

    def close(self) -> None:
        """Close the socket; tasks that have connected see that there will be no value."""
        self._listener.close()

    def _serve(self, data: bytes) -> None:
        served = 0
        with self._listener:
            while served < self._num_receivers:
                connection, _ = self._listener.accept()
                with connection:
                    if _uid_of(connection) == os.getuid():
                        connection.sendall(data)
                        served += 1


def receive_on_node(
    name: str,
    timeout_s: float,
    look: Callable[[], Any | None],
    pause: Callable[[float], object] = time.sleep,
) -> Any:
    """Wait for the value that the first task of this node sends; `pause` may raise to stop.

    That task may end before this one connects. So `look`, which returns the value from elsewhere or None, is
    called every `LOOK_S` without a connection, and when the connection ends without the value.

    Raises TimeoutError, and ConnectionError when that task has ended and `look` finds nothing.
    """
    began_s = time.monotonic()
    deadline_s, look_s, pause_s = began_s + timeout_s, began_s + LOOK_S, POLL_S
    with socket.socket(socket.AF_UNIX) as connection:
        is_connected, data = False, b""
        while True:
            if not is_connected:
                is_connected = connection.connect_ex(_address(name)) == 0
                if is_connected and _uid_of(connection) != os.getuid():
                    raise ConnectionError(f"the socket {name} belongs to another user")
            while is_connected and select.select([connection], [], [], 0)[0]:
                try:
                    part = connection.recv(65_536)
                except ConnectionResetError:
                    part = b""  # it has ended, or closed the socket
                if not part:
                    return _parse(data, look)
                data += part
            if not is_connected and time.monotonic() > look_s:
                found = look()
                if found is not None:
                    return found
                look_s = time.monotonic() + LOOK_S
            if time.monotonic() > deadline_s:
                raise TimeoutError("it has not started" if not is_connected else "it waits itself")
            pause(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)


def _parse(data: bytes, look: Callable[[], Any | None]) -> Any:
    try:
        return json.loads(data)
    except ValueError:  # incomplete or empty
        found = look()
    if found is None:
        raise ConnectionError("it has ended")
    return found


def _address(name: str) -> bytes:
    return b"\0" + name.encode()


def _uid_of(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
