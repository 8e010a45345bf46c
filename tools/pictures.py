"""Generate the images in the docs from runs: the `trainkit watch` screen, reports, and a figure.

python -m tools.pictures watch RUN      # docs/images/watch.svg python -m tools.pictures report RUN     #
docs/images/report.png, drawn by Chromium python -m tools.pictures figure GROUP   # docs/images/figure.png, of
`trainkit compare GROUP --plot` python -m tools.pictures metrics RUN    # docs/images/metrics.png, the curves
of its report and below python -m tools.pictures optimizers RUN # docs/images/optimizers.png, the same part of
another report
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import trainkit
from tests.support.browser import browser
from trainkit.capabilities.report.plot import save
from trainkit.capabilities.watch.screen import RunScreen, WatchApp
from trainkit.run.registry import find_run

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SCREEN_SIZE = (104, 28)
PAGE_SIZE = (1240, 1640)
TIMEOUT_S = 60.0
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
TRIM = """(() => {
    const own = title => title === "Curves" || title.startsWith("Images")
    let title = ""
    for (const element of document.body.querySelectorAll("main > *, body > *")) {
        if (element.tagName === "MAIN") continue
        if (element.tagName === "H2") title = element.textContent
        if (!own(title)) element.style.display = "none"
    }
    for (const chart of document.querySelectorAll(".chart")) {
        const title = chart.querySelector("h3").textContent
        if (/per|Step|Wait|Peak|norm/.test(title)) chart.style.display = "none"
    }
    return document.body.offsetHeight
})()"""
"""JavaScript that removes everything from a report except the curves and images that the user logged."""
CHARTS_WIDTH = 1240
DRAWN = "--virtual-time-budget=5000"
"""Makes Chromium take the screenshot after the page is completely rendered."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=["watch", "report", "figure", "metrics", "optimizers"])
    parser.add_argument("run", metavar="RUN")
    options = parser.parse_args()
    if options.picture == "watch":
        file = IMAGES / "watch.svg"
        file.write_text(asyncio.run(watch_screen(options.run)))
    elif options.picture == "figure":
        file = IMAGES / "figure.png"
        file.unlink(missing_ok=True)
        save(trainkit.curves(options.run, metrics=["loss", "val_loss"]).plot(), file)
    elif options.picture == "report":
        file = IMAGES / "report.png"
        draw_report(options.run, file)
    else:
        file = IMAGES / f"{options.picture}.png"
        draw_charts(options.run, file)
    print(file)


async def watch_screen(name: str) -> str:
    """Return the screen of a run as SVG without references to external files."""
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
    page = written_report(name)
    width, height = PAGE_SIZE
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={file}"]
        command = [*CHROMIUM, DRAWN, *options, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def written_report(name: str) -> Path:
    """Write the report of a run, and return its path."""
    argv = [sys.executable, "-m", "trainkit", "report", name]
    return Path(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip())


def draw_charts(name: str, file: Path) -> None:
    """Write the curves in the report of a run, and its images if there are any, as PNG."""
    page = written_report(name)
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as chromium:
        chromium.open(page, CHARTS_WIDTH, 100)
        chromium.evaluate(TRIM)
        file.write_bytes(chromium.screenshot())


if __name__ == "__main__":
    main()
