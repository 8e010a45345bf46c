"""Makes docs/images/watch.svg: the screen of `trainkit watch` on a run, without a terminal.

python -m tools.watch_picture RUN
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from trainkit.cli.watch_screen import RunScreen, WatchApp
from trainkit.control.run_registry import find_run

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "watch.svg"
SIZE = (104, 28)
TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN")
    text = asyncio.run(picture(parser.parse_args().run))
    PICTURE.write_text(text)
    print(PICTURE)


async def picture(name: str) -> str:
    """The screen as SVG, which refers to nothing outside it."""
    app = WatchApp(find_run(name), 0.5)
    async with app.run_test(size=SIZE) as pilot:
        async with asyncio.timeout(TIMEOUT_S):
            while not (isinstance(app.screen, RunScreen) and app.screen.view):
                await pilot.pause(0.1)
        await pilot.pause(0.1)
        text = app.export_screenshot(title=f"trainkit watch {name}")
    return re.sub(r"@font-face \{.*?\}\n?", "", text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
