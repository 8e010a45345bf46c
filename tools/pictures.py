"""Makes the pictures of the docs from a run: its screen of `trainkit watch`, and its report.

python -m tools.pictures watch RUN      # docs/images/watch.svg
python -m tools.pictures report RUN     # docs/images/report.png, drawn by Chromium
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from trainkit.capabilities.watch.screen import RunScreen, WatchApp
from trainkit.run.registry import find_run

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SCREEN_SIZE = (104, 28)
PAGE_SIZE = (1240, 1640)
TIMEOUT_S = 60.0
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
DRAWN = "--virtual-time-budget=5000"
"""Chromium takes the picture when everything is drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=["watch", "report"])
    parser.add_argument("run", metavar="RUN")
    options = parser.parse_args()
    if options.picture == "watch":
        file = IMAGES / "watch.svg"
        file.write_text(asyncio.run(watch_screen(options.run)))
    else:
        file = IMAGES / "report.png"
        draw_report(options.run, file)
    print(file)


async def watch_screen(name: str) -> str:
    """The screen of a run as SVG, which refers to nothing outside it."""
    app = WatchApp(find_run(name), 0.5)
    async with app.run_test(size=SCREEN_SIZE) as pilot:

        async def wait_for_the_run() -> None:
            while not (isinstance(app.screen, RunScreen) and app.screen.result):
                await pilot.pause(0.1)

        await asyncio.wait_for(wait_for_the_run(), TIMEOUT_S)
        await pilot.pause(0.1)
        text = app.export_screenshot(title=f"trainkit watch {name}")
    return re.sub(r"@font-face \{.*?\}\n?", "", text, flags=re.DOTALL)


def draw_report(name: str, file: Path) -> None:
    """Write the report of a run, and the upper part of its page as PNG."""
    argv = [sys.executable, "-m", "trainkit", "report", name]
    page = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    width, height = PAGE_SIZE
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={file}"]
        command = [*CHROMIUM, DRAWN, *options, Path(page).as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    main()
