"""Tests of the pages of `trainkit report` in a real browser.

The pages are drawn, can be read on a phone and printed, and load nothing.
"""

import contextlib
import csv
import json
import re
import zlib
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

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
from trainkit.run.group import RunGroup
from trainkit.run.history import RunHistory
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
COLORS = {
    "light": {"c0": "0072b2", "c1": "d55e00", "v0": "440154", "v1": "44bf70", "page": "ffffff"},
    "dark": {"c0": "4ba3dc", "c1": "ff8a45", "v0": "3b528a", "v1": "fde725", "page": "14181e"},
}
NODE = "a-node-with-a-rather-long-name-0001.cluster.example.org"
pytestmark = [pytest.mark.slow(seconds=1), pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the page of a run, and of sweeps with one and two keys."""
    folder = tmp_path_factory.mktemp("pages")
    two = made_up_sweep(
        folder / "two", {"optimizer.lr": [1e-4, 3e-4, 1e-3], "optimizer.name": ["adamw", "sgd"]}, failed=3
    )
    one = made_up_sweep(folder / "one", {"optimizer.lr": [10**-n for n in range(1, 9)]})
    run = two.run(0)
    validated = {"event": "evaluated", "attempt": 1, "time": utc_now(), "val_loss": 4.0}
    append_jsonl(run.events_file, *({**validated, "step": step} for step in range(1, 21)))
    slow = {"attempt": 1, "rank": 1, "host": NODE, "since_step": 11, "phase": "data", "own_s": 0.2}
    append_jsonl(
        run.events_file, {"event": "slow_rank", "time": utc_now(), "step": 12, "usual_s": 0.1, **slow}
    )
    (run.path / "health").mkdir()
    append_jsonl(health_file(run, NODE), {"cpu_percent": 50.0, "job_mem_gib": 1.0, "mem_total_gib": 8.0})
    texts = {"run": render_report(report_of(run)), "one key": page_of(one), "two keys": page_of(two)}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


def report_of(run: RunDir):
    history = RunHistory(run)
    return read_report(history, read_status(history, read_job(run), False, NOW), NOW.timestamp())


CHARTS = {
    "run": [["c0", "c1"], *[["c0"]] * 5],
    "one key": [["c0", "c1"], *[["v1"]] * 6],
    "two keys": [["c0", "c1"], ["c0", "c1"], ["v1"], ["v0"], *[["v1"]] * 5],
}
"""Maps a page to the colours of the lines and dots in each of its charts."""


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1400, "dark")])
@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_is_drawn_and_nothing_is_requested(
    chromium: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    page = chromium.open(pages[name], width, scheme=scheme)
    pixels = chromium.pixels()
    assert page.messages == []
    assert page.requests == [pages[name].as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
    labels = chromium.boxes(".x, .y, .mark, .key, .csv, h1, h2, h3, p, .figures b, pre")
    assert labels
    assert [box for box in labels if box[0] < 0 or box[2] > width] == []
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


def test_a_page_can_be_printed(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["two keys"], 1400, scheme="dark")
    assert num_texts(chromium.pdf()) > 50
    chromium.emulate_print()
    pixels = chromium.pixels()
    assert close_to(pixels[:5, :5], COLORS["light"]["page"]).all()  # paper stays white
    for (left, top, right, bottom), colors in zip(chromium.boxes(".plot"), CHARTS["two keys"], strict=True):
        chart = pixels[top - 6 : bottom + 6, max(0, left - 6) : right + 6]
        assert all(close_to(chart, COLORS["light"][color]).any() for color in colors)


def num_texts(pdf: bytes) -> int:
    """Return the number of texts that a PDF draws."""
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
    assert chromium.evaluate("plots.length") > 1  # the script of the page itself is allowed


def plot_box(chromium: Browser, index: int) -> tuple[float, float, float, float]:
    """Scroll to a chart, and return its left, top, width and height in the window."""
    left, top, width, height = chromium.evaluate(
        f"(() => {{ const plot = document.querySelectorAll('.plot')[{index}];"
        "plot.scrollIntoView({ block: 'center' }); const box = plot.getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height] })()"
    )
    return left, top, width, height


def text_of(chromium: Browser, selector: str) -> list[str]:
    found: list[str] = chromium.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(one => one.textContent)"
    )
    return found


def axes_of(chromium: Browser, index: int) -> str:
    """Return the labels of a chart with their places."""
    found: str = chromium.evaluate(
        f"(() => {{ const root = document.querySelectorAll('.chart')[{index}];"
        "return [...root.querySelectorAll('.axes span')].map(one => one.className + one.textContent"
        " + parseFloat(one.style.left || one.style.top).toFixed(1)).sort().join() })()"
    )
    return found


def assert_drawn_again(chromium: Browser, num_charts: int) -> None:
    """Check that the page's script draws what was drawn before."""
    crosses = "[...document.querySelectorAll('.chart .cross')].map(one => one.className + ': ' + one.title)"
    before, pixels = chromium.evaluate(crosses), chromium.pixels()
    axes = [axes_of(chromium, index) for index in range(num_charts)]
    chromium.evaluate("for (const plot of plots) plot.reset()")
    assert chromium.evaluate(crosses) == before
    assert [axes_of(chromium, index) for index in range(num_charts)] == axes
    assert (np.abs(chromium.pixels() - pixels) > 0.3).any(axis=-1).mean() < 0.002


def test_the_script_draws_what_was_drawn_before(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["two keys"], 1400)
    assert_drawn_again(chromium, len(CHARTS["two keys"]))


def test_a_chart_shows_values_zooms_and_hides_lines(chromium: Browser, pages: dict[str, Path]) -> None:
    page = chromium.open(pages["run"], 1400)
    left, top, width, height = plot_box(chromium, 0)
    whole = axes_of(chromium, 0)
    chromium.mouse("mouseMoved", left + width / 2, top + height / 2)
    tip = text_of(chromium, ".chart:first-of-type .tip div")
    assert tip[0].startswith("step 1")
    assert [text.rstrip("0123456789.") for text in tip[1:]] in (["val_loss", "loss"], ["loss", "val_loss"])
    chromium.mouse("mousePressed", left + width / 4, top + 50)
    chromium.mouse("mouseMoved", left + width / 2, top + 50)
    chromium.mouse("mouseReleased", left + width / 2, top + 50)
    assert axes_of(chromium, 0) != whole
    zoomed = chromium.evaluate("plots[0].view")
    assert 1 < zoomed[0] < zoomed[1] < 20
    path = chromium.evaluate("document.querySelector('.chart .line').getAttribute('d')")
    assert path.count("M") == 1
    assert path.count("L") == 19  # the line continues beyond the edges of the view
    chromium.click(left + width / 2, top + 50, clicks=2)
    assert axes_of(chromium, 0) == whole
    chromium.evaluate("document.querySelector('button.key').focus()")
    chromium.press("Enter")
    assert chromium.evaluate("plots[0].groups.map(group => group.style.display)") == ["none", ""]
    assert chromium.evaluate("document.querySelector('button.key').getAttribute('aria-pressed')") == "false"
    assert page.messages == []


def test_a_chart_can_be_used_by_the_keyboard_alone(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["run"], 1400)
    chromium.evaluate("document.querySelector('.plot').focus()")
    seen = []
    for _ in range(3):
        chromium.press("ArrowRight")
        seen.append(text_of(chromium, ".tip div")[0])
    assert seen == ["step 1", "step 2", "step 3"]
    chromium.press("ArrowLeft")
    assert text_of(chromium, ".tip div")[0] == "step 2"
    chromium.press("+")
    assert chromium.evaluate("plots[0].view[1]") < 20
    chromium.press("Escape")
    assert chromium.evaluate("[plots[0].view[1], plots[0].tip.hidden]") == [20, True]
    assert chromium.evaluate("document.activeElement.className") == "plot"


def change_metrics(run: RunDir, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change each record of a run's metrics."""
    records = [change(json.loads(line)) for line in run.metrics_file.read_text().splitlines()]
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))


def page_of(group: RunGroup) -> str:
    return render_sweep(read_sweep(group, GroupFiles(group).status({}, NOW), NOW.timestamp()))


def test_crosses_outliers_and_a_band_are_drawn_again_as_before(chromium: Browser, tmp_path: Path) -> None:
    group = made_up_sweep(tmp_path / "mine", {"optimizer.lr": [0.1, 0.2], "seed": [1, 2]}, num_steps=120)
    odd = {0: {5: 1e32, 20: -1e32}, 1: {}, 2: {9: None}, 3: {12: -1e301}}

    def changed(record: dict[str, Any], index: int) -> dict[str, Any]:
        step = record["step"]
        own = {"wide": 10.0 ** (step % 4 - index), "broken": float("nan") if step % 2 else 1.0}
        return {**record, "loss": odd[index].get(step, record["loss"]), **own}

    for index in odd:
        change_metrics(group.run(index), partial(changed, index=index))
    (tmp_path / "page.html").write_text(page_of(group))
    chromium.open(tmp_path / "page.html", 1400)
    titles = chromium.evaluate("[...document.querySelectorAll('.chart .cross')].map(one => one.title)")
    assert {"lr=0.1: 5e+31 at 5", "lr=0.1: -5e+31 at 20"} <= set(titles)
    assert len([title for title in titles if "not finite" in title]) >= 20
    assert_drawn_again(chromium, len(chromium.boxes(".plot")))


def test_the_points_of_a_chart_can_be_saved(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    page = chromium.open(pages["run"], 1400)
    file = chromium.download(lambda: chromium.evaluate("document.querySelector('.csv').click()"), tmp_path)
    assert file.name == "Loss.csv"
    rows = list(csv.reader(file.open()))
    assert rows[0] == ["line", "step", "value"]
    assert rows[1][:2] == ["loss", "1"]
    assert float(rows[1][2]) == pytest.approx(4.606, abs=0.01)
    assert rows[-1] == ["val_loss", "20", "4"]
    assert page.requests == [pages["run"].as_uri()]  # the file is made by the page itself


def test_a_name_of_a_user_is_text_everywhere(chromium: Browser, tmp_path: Path) -> None:
    hostile = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>"
    group = made_up_sweep(tmp_path / "mine", {"data.source": [hostile, 'a"b,c']})
    for index in range(2):
        change_metrics(group.run(index), lambda record: {**record, hostile: record["step"]})
    (tmp_path / "page.html").write_text(page_of(group))
    page = chromium.open(tmp_path / "page.html", 1400)
    assert chromium.evaluate("document.title") == "mine: report"
    assert hostile in text_of(chromium, "h3 > :first-child, h3")[-1] or hostile in "".join(
        text_of(chromium, "h3")
    )
    left, top, width, height = plot_box(chromium, 1)
    chromium.mouse("mouseMoved", left + width / 2, top + height / 2)
    assert "source=" in "".join(text_of(chromium, ".tip span"))
    assert chromium.evaluate("document.images.length") == 0
    assert page.messages == []


def test_without_its_script_a_page_has_all_charts(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(pages["two keys"].read_text().replace("script-src", "object-src"))
    chromium.open(file, 400)
    assert chromium.evaluate("typeof plots") == "undefined"
    assert len(chromium.boxes(".plot path")) > 20
    assert len(text_of(chromium, ".key")) == 6
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
