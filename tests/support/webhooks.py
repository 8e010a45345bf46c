"""Provides a webhook on this machine that records the requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0PSECRETPATH"
"""The part of the URL that nobody else may see."""


@dataclass
class Webhook:
    """Stores the requests to an endpoint, and its way to answer."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_silent: bool = False
    """Set to accept connections and never answer."""
    url: str = ""

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]


@contextmanager
def webhook(address: str = "127.0.0.1", **settings: Any) -> Iterator[Webhook]:
    """Run a webhook until the end of the block. `address` is an address of this machine."""
    found, ended = Webhook(**settings), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            found.messages.append({**json.loads(self.rfile.read(length)), "path": self.path})
            if found.is_silent:
                ended.wait()
                return
            self.send_response(found.status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer((address, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    found.url = f"http://{address}:{server.server_port}/services/{SECRET}"
    try:
        yield found
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
