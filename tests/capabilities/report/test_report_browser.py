"""The pages of `trainkit report` in a real browser: drawn, readable on a phone and printed, and silent."""

import contextlib
import re
import zlib
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from tests.support.browser import Browser, browser
from tests.support.sweeps import made_up_sweep
from trainkit.capabilities.health.samples import health_file
from trainkit.capabilities.report.run_report import read_report, render_report
from trainkit.capabilities.report.sweep_report import read_sweep, render_sweep
from trainkit.observe.group import GroupFiles
from trainkit.observe.status import read_status
from trainkit.run.files import append_jsonl, utc_now
from trainkit.run.history import RunHistory
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
COLORS = {
    "light": {"c0": "2463b4", "c1": "c2571a", "c2": "2e8b57", "page": "ffffff"},
    "dark": {"c0": "6ea8f0", "c1": "f09a5e", "c2": "63c48d", "page": "14181e"},
}
NODE = "a-node-with-a-rather-long-name-0001.cluster.example.org"
pytestmark = [pytest.mark.slow(seconds=1), pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a run, and of sweeps with one and two keys."""
    folder = tmp_path_factory.mktemp("pages")
    two = made_up_sweep(
        folder / "two", {"optimizer.lr": [1e-4, 3e-4, 1e-3], "optimizer.name": ["adamw", "sgd"]}, failed=3
    )
    one = made_up_sweep(folder / "one", {"optimizer.lr": [10**-n for n in range(1, 9)]})
    run = two.run(0)
    for index in range(20):
        append_jsonl(
            run.events_file,
            {"event": "evaluated", "attempt": 1, "time": utc_now(), "step": index + 1, "val_loss": 4.0},
        )
    slow = {
        "attempt": 1,
        "rank": 1,
        "host": NODE,
        "since_step": 11,
        "phase": "data",
        "own_s": 0.2,
        "usual_s": 0.1,
    }
    append_jsonl(run.events_file, {"event": "slow_rank", "time": utc_now(), "step": 12, **slow})
    (run.path / "health").mkdir()
    append_jsonl(health_file(run, NODE), {"cpu_percent": 50.0, "job_mem_gib": 1.0, "mem_total_gib": 8.0})
    texts = {
        "run": render_report(report_of(run)),
        "one key": render_sweep(read_sweep(one, GroupFiles(one).status({}, NOW), NOW.timestamp())),
        "two keys": render_sweep(read_sweep(two, GroupFiles(two).status({}, NOW), NOW.timestamp())),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


def report_of(run: RunDir):
    history = RunHistory(run)
    return read_report(history, read_status(history, read_job(run), False, NOW), NOW.timestamp())


CHARTS = {
    "run": [["c0", "c1"], ["c0"], ["c0"], ["c0"]],
    "one key": [["c0", "c1"], ["c0"], ["c0"]],
    "two keys": [["c0", "c1"], ["c0", "c1"], ["c0"], ["c0"]],
}
"""Page -> the colours of lines and dots in each of its charts."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", list(CHARTS))
def test_every_chart_is_drawn_and_nothing_is_requested(
    chromium: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    page = chromium.open(pages[name], width, scheme=scheme)
    pixels = chromium.pixels()
    assert page.messages == []
    assert page.requests == [pages[name].as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert close_to(pixels[:5, :5], COLORS[scheme]["page"]).all()
    boxes = chromium.boxes(".plot")
    assert len(boxes) == len(CHARTS[name])
    for (left, top, right, bottom), colors in zip(boxes, CHARTS[name], strict=True):
        assert right - left > 0.7 * min(width, 480)
        chart = pixels[top - 6 : bottom + 6, max(0, left - 6) : right + 6]
        for color in colors:
            assert close_to(chart, COLORS[scheme][color]).sum() > 20, (left, top, color)


def close_to(pixels, color: str):
    wanted = [int(color[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    return (np.abs(pixels - wanted) < 0.03).all(axis=-1)


@pytest.mark.parametrize("name", list(CHARTS))
def test_a_phone_shows_all_text_of_the_charts(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    chromium.open(pages[name], 390)
    labels = chromium.boxes(".x, .y, .mark, .key, h1, h2, h3, p, .figures b, pre")
    assert labels
    assert [box for box in labels if box[0] < 0 or box[2] > 390] == []


@pytest.mark.parametrize("name", list(CHARTS))
def test_a_page_can_be_printed(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    chromium.open(pages[name], 1400, scheme="dark")
    assert num_texts(chromium.pdf()) > 50
    chromium.emulate_print()
    pixels = chromium.pixels()
    assert close_to(pixels[:5, :5], COLORS["light"]["page"]).all()  # paper stays white
    for (left, top, right, bottom), colors in zip(chromium.boxes(".plot"), CHARTS[name], strict=True):
        for color in colors:
            assert close_to(
                pixels[top - 6 : bottom + 6, max(0, left - 6) : right + 6], COLORS["light"][color]
            ).any()


def num_texts(pdf: bytes) -> int:
    """How often a PDF draws text."""
    count = 0
    for found in re.finditer(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        with contextlib.suppress(zlib.error):  # a picture or a font
            count += len(re.findall(rb"\bT[jJ]\b", zlib.decompressobj().decompress(found[1])))
    return count


def test_the_pages_forbid_requests(chromium: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    text = pages["run"].read_text()
    file.write_text(text.replace("</main>", '<img src="http://127.0.0.1:9/x.png"><script>1</script></main>'))
    page = chromium.open(file, 390)
    assert len([text for text in page.messages if "Content Security Policy" in text]) == 2
