"""Renders a run's images, histograms and texts as self-contained HTML for the report."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

from trainkit.capabilities.media.items import Item, by_name, read_image
from trainkit.formats import number
from trainkit.run.rundir import RunDir

NUM_LAST = 4
"""Number of newest items to show for each name."""
MAX_NAMES = 32
MAX_INLINE_BYTES = 2**24
"""Maximum total size of embedded images in bytes; images beyond this limit are listed by file name."""
MAX_STEPS = 40
WIDTH, HEIGHT, SMALL = 256, 96, 128
_BLOCK = "display:inline-block;vertical-align:top;margin:0 16px 16px 0;max-width:100%"


def render(run: RunDir, items: Sequence[Item]) -> str:
    """Render the newest items of each name, and list only the steps of older items."""
    parts, budget = [], MAX_INLINE_BYTES
    names = sorted(by_name(items).items(), key=lambda item: (item[0].removeprefix("val_"), item[0]))
    for name, own in names[:MAX_NAMES]:
        parts.append(f"<h3>{escape(name)}</h3><div>")
        for item in own[-NUM_LAST:]:
            shown, size = _item(run, item, budget)
            budget -= size
            parts.append(f'<figure style="{_BLOCK}">{shown}<figcaption class="dim">step {item.step:,}')
            parts.append(f"{_caption(item)}</figcaption></figure>")
        parts.append(f"</div>{_other_steps(own)}")
    if len(names) > MAX_NAMES:
        parts.append(f'<p class="dim">{len(names) - MAX_NAMES:,} more names are in media.jsonl.</p>')
    return "".join(parts)


def _item(run: RunDir, item: Item, budget: int) -> tuple[str, int]:
    """Return the HTML for an item, and the number of embedded image bytes, which is at most `budget`."""
    if item.kind == "text":
        return f'<pre style="white-space:pre-wrap;margin:0">{escape(item.text("text") or "")}</pre>', 0
    if item.kind == "histogram":
        return _histogram(item), 0
    data = read_image(run, item)
    if data is None:
        return f'<span class="dim">{escape(item.text("file") or "the image")} is missing</span>', 0
    if len(data) > budget:
        return f'<span class="dim">media/{escape(item.text("file") or "")}</span>', 0
    source = b64encode(data).decode()
    longer = max(item.count("width") or 1, item.count("height") or 1)
    size = "max-width:min(320px,100%)"
    if longer < SMALL:  # enlarge a small image without blurring its pixels
        size = f"width:{WIDTH * (item.count('width') or 1) / longer:.0f}px;image-rendering:pixelated"
    return f'<img alt="{escape(item.name)}" src="data:image/png;base64,{source}" style="{size}">', len(data)


def _histogram(item: Item) -> str:
    heights, low, high = item.counts, item.number("low"), item.number("high")
    if not heights or low is None or high is None:
        return '<span class="dim">no value is finite</span>'
    top, step = max(heights, default=0.0) or 1.0, WIDTH / max(1, len(heights))
    bars = "".join(
        f"M{index * step:.1f} {HEIGHT}v{-height / top * HEIGHT:.1f}h{step:.1f}V{HEIGHT}z"
        for index, height in enumerate(heights)
        if height
    )
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" style="width:{WIDTH}px;max-width:100%;display:block"'
    ends = f'<span style="float:right">{number(high)}</span>{number(low)}'
    return (
        f'<svg {box}><path class="bars" fill="currentColor" d="{bars}"/></svg><div class="dim">{ends}</div>'
    )


def _caption(item: Item) -> str:
    other = item.count("not_finite") or 0
    texts = [item.text("caption") or "", f"{other:,} not finite" if other else ""]
    return "".join(f": {escape(text)}" for text in texts if text)


def _other_steps(own: Sequence[Item]) -> str:
    others = [f"{item.step:,}" for item in own[:-NUM_LAST]]
    if not others:
        return ""
    more = f" and {len(others) - MAX_STEPS:,} more" if len(others) > MAX_STEPS else ""
    steps = ", ".join(others[-MAX_STEPS:])
    return (
        f'<details><summary class="dim">{len(others):,} earlier</summary><p>steps {steps}{more}</p></details>'
    )
