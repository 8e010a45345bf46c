"""Runs a headless Chromium that reports console messages, requests, sizes and pixels of a page.

It is driven through the DevTools protocol over two pipes, so no port is open.
"""

import base64
import io
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

TIMEOUT_S = 120.0
Pixels = npt.NDArray[np.float64]
"""An array [height, width, 3] with red, green and blue from 0 to 1."""


def find_chromium() -> str:
    """Return the path of the browser. Without a browser, skip the test, or fail it in CI."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        missing = "needs chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


@dataclass
class LoadedPage:
    """Records what a page did while it was loaded and used."""

    messages: list[str] = field(default_factory=list)
    """Console messages, errors, and violations of the content security policy."""
    requests: list[str] = field(default_factory=list)
    """The addresses of all requests, beginning with the page itself."""


class Browser:
    """A running browser with one page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb")
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._rest = b""
        self.page = LoadedPage()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> LoadedPage:
        """Load a file in a viewport of this width, with a light or dark scheme."""
        self.page = LoadedPage()
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                   mobile=width < 600)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media="", features=features)
        self._call("Page.navigate", url=file.absolute().as_uri())
        self._wait_for("Page.loadEventFired")
        return self.page

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the whole page as a PNG."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def pixels(self) -> Pixels:
        import matplotlib.image

        image: Pixels = matplotlib.image.imread(io.BytesIO(self.screenshot()))
        return image[..., :3]

    def boxes(self, selector: str) -> list[tuple[int, int, int, int]]:
        """Return left, top, right and bottom of all elements of a CSS selector, in pixels of `pixels`."""
        rows = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => {{"
            "const b = e.getBoundingClientRect();"
            "return [b.left, b.top + scrollY, b.right, b.bottom + scrollY].map(Math.round)})"
        )
        return [(left, top, right, bottom) for left, top, right, bottom in rows]

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """Move the mouse to a place of the window, or press or release its left button there."""
        held = int(kind != "mouseReleased")
        self._call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=held, clickCount=clicks
        )

    def click(self, x: float, y: float, clicks: int = 1) -> None:
        """Click at a place of the window."""
        for number in range(1, clicks + 1):
            self.mouse("mousePressed", x, y, number)
            self.mouse("mouseReleased", x, y, number)

    def press(self, key: str) -> None:
        """Press and release a key, by its name in a KeyboardEvent."""
        more = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def download(self, start: Callable[[], object], folder: Path) -> Path:
        """Click, and return the file that the page then saves."""
        self._call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True
        )
        start()
        while (message := self._read()).get("method") != "Browser.downloadProgress" or (
            message["params"]["state"] != "completed"
        ):
            pass
        [file] = folder.iterdir()
        return file

    def pdf(self) -> bytes:
        """Return the printed page as a PDF."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def emulate_print(self) -> None:
        """Show the page as it is printed."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, method: str) -> None:
        while self._read().get("method") != method:
            pass

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = self._from.read1(1 << 20)
            assert block, "the browser ended"
            self._rest += block
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params") or {}
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.page.requests.append(params["request"]["url"])
            case "Network.webSocketCreated":
                self.page.requests.append(params["url"])
            case "Log.entryAdded":
                self.page.messages.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.page.messages.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.page.messages.append(str(params["exceptionDetails"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it after the block."""
    chromium = find_chromium()
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # The browser reads commands from descriptor 3 and answers on descriptor 4.
    command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-pipe"),
    ]
    process = subprocess.Popen(
        ["bash", "-c", command, chromium, *options],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)  # the browser ends when this pipe is closed
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
