"""The view of a run as lines of a given width: the same for `watch --once`, its screen and its tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from trainkit.formats import cell, duration, number, plural
from trainkit.observe.run_view import NodeRow, Notice, RunView

BLOCKS = "▁▂▃▄▅▆▇█"
DOT = " · "
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Bits of a Braille character by column, from the lowest row to the highest."""
TO_ASCII = str.maketrans(BLOCKS + "░─…·°", "_.-=+*%#" + "--~| ")
LABEL = 11
VALUE = 34
MIN_NOTICES = 2
WIDE, TALL = 120, 40
CHART_HEIGHT, CHART_LABEL = 5, 9
MAX_SPARKLINE = 100
GOOD, BAD, WATCH, DIM, TITLE = "green", "bold red", "yellow", "dim", "bold"
STATE_STYLES = {
    "running": GOOD,
    "finished": GOOD,
    "failed": BAD,
    "died": BAD,
    "unknown": BAD,
}
"""State -> style; the others are in `WATCH`. The state is always named too."""
CURVE_NAMES = {"loss": "loss", "grad_norm": "grad norm", "lr": "lr", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True)
class Size:
    """The space for a view; `height` is None where all lines are wanted."""

    width: int
    height: int | None = None
    ascii: bool = False
    """Whether only ASCII characters can be printed."""

    @property
    def is_wide(self) -> bool:
        return self.width >= WIDE


def view_lines(view: RunView, size: Size) -> list[Text]:
    """The lines of a view, at most `size.height` of them, none longer than `size.width`."""
    lines = [_title(view, size), *_sentence(view, size), Text()]
    lines += _progress(view, size)
    is_tall = size.height is not None and size.height >= TALL and size.is_wide
    lines += _charts(view, size) if is_tall else []
    lines += _numbers(view, size, has_charts=is_tall)
    num_nodes, num_notices = len(view.nodes), len(view.notices)
    if size.height is not None:
        # Three headings; the nodes get what the warnings leave.
        left = size.height - len(lines) - 3
        num_notices = min(num_notices, max(MIN_NOTICES, left // 3))
        num_nodes = max(1, left - num_notices)
    lines += nodes_lines(view.nodes, size, num_nodes, view.num_hosts)
    lines += notices_lines(view.notices, size, num_notices)
    lines += _tail_lines(view, size, 0 if size.height is None else size.height - len(lines))
    for line in lines:
        line.truncate(size.width, overflow="ellipsis")
    if size.ascii:
        lines = [Text(line.plain.translate(TO_ASCII).encode("ascii", "replace").decode()) for line in lines]
    return lines if size.height is None else lines[: size.height]


def state_style(state: str) -> str:
    """The style of a state."""
    return STATE_STYLES.get(state, WATCH)


def _title(view: RunView, size: Size) -> Text:
    status = view.status
    left = Text.assemble(
        (status.name, TITLE), "  ", (status.state.upper(), f"reverse {state_style(status.state)}")
    )
    facts = []
    if status.attempt is not None:
        facts.append(f"attempt {status.attempt}")
    if status.job_id is not None:
        facts.append(f"job {status.job_id}" if not status.job_id.startswith("local") else status.job_id)
    if status.num_nodes is not None:
        kind = "GPU" if view.has_gpus else "process"
        facts.append(f"{plural(status.num_nodes, 'node')} x {plural(status.workers_per_node, kind)}")
    return _spread(left, Text(DOT.join(facts), DIM), size.width)


def _sentence(view: RunView, size: Size) -> list[Text]:
    found = _wrapped(view.sentence, size.width, 2)
    if view.failure is not None:
        found += _wrapped(view.failure, size.width, 2)
    if view.hint:
        found += _wrapped(f"hint: {view.hint}", size.width, 2)
    return found


def _progress(view: RunView, size: Size) -> list[Text]:
    status = view.status
    lines = []
    if status.step is not None:
        total = "" if status.total_steps is None else f" of {status.total_steps:,}"
        text = Text(f"step {status.step:,}{total}")
        if view.progress is not None:
            width = max(10, min(60, size.width - LABEL - len(text) - 12))
            done = round(view.progress * width)
            bar = Text.assemble(("█" * done, GOOD), ("░" * (width - done), DIM))
            text = Text.assemble(bar, f" {view.progress:6.1%}  ", text)
        lines.append(_line("progress", text))
    times = []
    if view.elapsed_s is not None:
        times.append(f"ran for {duration(view.elapsed_s)}")
    if view.eta_s is not None:
        times.append(f"ETA {duration(view.eta_s)}")
    if view.limit_s is not None:
        times.append(f"time limit in {duration(view.limit_s)}")
    text = Text(DOT.join(times) or "-")
    if view.eta_s is not None and view.limit_s is not None:
        short_s = view.eta_s - view.limit_s
        verdict = (
            (f"{duration(short_s)} too short", WATCH)
            if short_s > 0
            else (f"{duration(-short_s)} to spare", GOOD)
        )
        text = Text.assemble(text, ": ", verdict)
    lines.append(_line("time", text))
    return lines


def _charts(view: RunView, size: Size) -> list[Text]:
    """The four curves as charts, two next to each other."""
    width = (size.width - 3) // 2
    lines: list[Text] = [Text()]
    names = [name for name in CURVE_NAMES if len(view.curves[name]) > 1]
    for index in range(0, len(names), 2):
        pair = [_chart(view, name, width, size) for name in names[index : index + 2]]
        for row in zip(*pair, strict=True):
            left = row[0].copy()
            left.pad_right(width - len(left))
            lines.append(Text.assemble(left, "   ", row[1]) if len(row) > 1 else left)
        lines.append(Text())
    return lines if len(lines) > 1 else []


def _chart(view: RunView, name: str, width: int, size: Size) -> list[Text]:
    points = view.curves[name]
    values = resampled(points, 2 * (width - CHART_LABEL - 1))
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    title = Text.assemble((CURVE_NAMES[name], TITLE), "  ", _curve_value(view, name))
    steps = Text(f"steps {points[0][0]:,} to {points[-1][0]:,}", DIM)
    rows = chart_rows(values, width - CHART_LABEL - 1, CHART_HEIGHT)
    lines = [_spread(title, steps, width)]
    for index, row in enumerate(rows):
        label = number(high) if index == 0 else number(low) if index == len(rows) - 1 else ""
        lines.append(Text.assemble((f"{label:>{CHART_LABEL}} ", DIM), (row, "cyan")))
    return lines


def _curve_value(view: RunView, name: str) -> Text:
    """The newest value of a curve, with what it is compared with."""
    if name == "loss":
        val_loss = view.status.val_loss
        val = "" if val_loss is None else f"{DOT}validation {number(val_loss)}"
        return Text(number(view.status.loss) + val)
    if name == "tokens_per_s":
        return _speed(view)
    return Text(number(view.grad_norm if name == "grad_norm" else view.lr))


def _numbers(view: RunView, size: Size, has_charts: bool) -> list[Text]:
    """A line per number; those of the curves only where they are not in charts."""
    is_command = view.status.is_command
    lines = []
    for name, label in CURVE_NAMES.items():
        is_known = bool(view.curves[name]) or (name == "loss" and view.status.loss is not None)
        if (has_charts and len(view.curves[name]) > 1) or (is_command and not is_known):
            continue
        value = _curve_value(view, name)
        width = size.width - LABEL - max(VALUE, len(value) + 1)
        if len(view.curves[name]) > 1 and width >= 10:
            value.pad_right(max(1, VALUE - len(value)))
            values = resampled(view.curves[name], min(width, MAX_SPARKLINE))
            value.append(sparkline(values), "cyan")
        lines.append(_line(label, value))
    if is_command and not view.curves["tokens_per_s"]:
        return lines
    waits = "" if view.data_wait_share is None else f"{DOT}waits for data {view.data_wait_share:.1%}"
    mfu = "unknown" if view.mfu is None else f"{view.mfu:.1%}"
    steps = f"p50 {_seconds(view.step_p50_s)}{DOT}p95 {_seconds(view.step_p95_s)}"
    return [
        *lines,
        _line("step", Text(f"{steps}{waits}{DOT}MFU {mfu}")),
        *_slowest_rank(view),
        _line("memory", Text(_memory(view))),
        _line("checkpoint", _checkpoint(view)),
    ]


def _slowest_rank(view: RunView) -> list[Text]:
    found = view.slowest_rank
    if found is None:
        return []
    times = f"{1e3 * found.own_s:,.1f} ms on its own, others {1e3 * found.usual_s:,.1f} ms"
    return [_line("slowest", Text(f"rank {found.rank} on {found.host}{DOT}{times}"))]


def _speed(view: RunView) -> Text:
    now, median = view.status.tokens_per_s, view.median_tokens_per_s
    if now is None or not median:
        return Text(number(now))
    share = now / median
    return Text.assemble(f"{now:,.0f}{DOT}", (f"{share:.0%} of median", WATCH if share < 0.9 else ""))


def _memory(view: RunView) -> str:
    unit = "a GPU" if view.has_gpus else "a process"
    if view.mem_gib_peak is None:
        return "-"
    total = "" if not view.has_gpus or view.mem_gib_total is None else f" of {view.mem_gib_total:.1f}"
    return f"peak {view.mem_gib_peak:.2f}{total} GiB {unit}"


def _checkpoint(view: RunView) -> Text:
    parts: list[tuple[str, str]] = []
    if view.checkpoint_step is None:
        parts.append(("none yet", ""))
    else:
        parts.append((f"step {view.checkpoint_step:,}, {duration(view.checkpoint_age_s)} ago", ""))
    if view.steps_at_risk:
        lost = "at risk" if view.status.is_active else "lost"
        parts.append((f"{plural(view.steps_at_risk, 'step')}{_hours(view)} {lost}", WATCH))
    elif view.checkpoint_step is not None:
        parts.append(("nothing at risk", GOOD))
    text = Text()
    for index, (words, style) in enumerate(parts):
        text.append(DOT if index else "")
        text.append(words, style)
    return text


def _hours(view: RunView) -> str:
    """`` = 3.20 GPU-hours``; in minutes if that is less than 6 of them."""
    hours, unit = view.hours_at_risk, "GPU" if view.has_gpus else "process"
    if hours is None:
        return ""
    return f" = {hours:,.2f} {unit}-hours" if hours >= 0.1 else f" = {60 * hours:.1f} {unit}-minutes"


def nodes_lines(nodes: Sequence[NodeRow], size: Size, most: int, expected: int | None) -> list[Text]:
    """A heading and a row per node, the first `most` of them."""
    if not nodes:
        return [_rule("nodes: no samples", size)]
    num_bad = sum(node.severity > 0 for node in nodes)
    total = f"{len(nodes)} of {expected}" if expected and expected > len(nodes) else f"{len(nodes)}"
    shown = nodes[:most]
    rest = "" if len(shown) == len(nodes) else f", {len(nodes) - len(shown)} more: press n"
    problems = f"{num_bad} with problems" if num_bad else "no problems"
    lines = [_rule(f"nodes: {total}, {problems}{rest}", size)]
    has_gpus = any(node.num_gpus for node in nodes)
    host = max(4, min(24 if size.is_wide else 12, max(len(node.host) for node in shown)))
    columns = _columns(has_gpus, size.is_wide)
    heading = "  ".join(["  " + "node".ljust(host), *(name.rjust(width) for name, width in columns), "note"])
    lines.append(Text(heading, DIM))
    for node in shown:
        lines.append(_node_line(node, host, columns))
    return lines


def _columns(has_gpus: bool, is_wide: bool) -> list[tuple[str, int]]:
    columns = [("GPU", 4), ("GPU mem", 9)] if has_gpus else []
    columns += [("°C", 3), ("W", 5)] if has_gpus else []
    columns.append(("CPU", 4))
    if is_wide or not has_gpus:
        columns += [("memory", 9), ("net MiB/s", 9), ("disk MiB/s", 10)]
    return columns + ([("sampled", 7)] if is_wide else [])


def _node_line(node: NodeRow, host: int, columns: Sequence[tuple[str, int]]) -> Text:
    cells = {
        "GPU": _percent(node.gpu_percent),
        "GPU mem": _used(node.gpu_mem_used_gib, node.gpu_mem_total_gib),
        "°C": cell(node.temperature_c, ".0f"),
        "W": cell(node.power_w, ".0f"),
        "CPU": _percent(node.cpu_percent),
        "memory": _used(node.mem_used_gib, node.mem_total_gib),
        "net MiB/s": cell(node.net_mib_s, ",.1f"),
        "disk MiB/s": cell(node.disk_mib_s, ",.1f"),
        "sampled": duration(node.age_s),
    }
    style = BAD if node.severity >= 4 else WATCH if node.severity else ""
    mark = "! " if node.severity else "  "
    name = node.host if len(node.host) <= host else node.host[: host - 1] + "…"
    row = "  ".join([name.ljust(host), *(cells[column].rjust(width) for column, width in columns)])
    return Text.assemble((mark, style), row, "  ", (", ".join(node.problems), style))


def notices_lines(notices: Sequence[Notice], size: Size, most: int) -> list[Text]:
    """A heading and the first `most` warnings."""
    if not notices:
        return [_rule("warnings: none", size)]
    more = "" if most >= len(notices) else f", {len(notices) - most} more: press w"
    lines = [_rule(f"warnings: {len(notices)}{more}", size)]
    return lines + [notice_line(notice) for notice in notices[:most]]


def _tail_lines(view: RunView, size: Size, space: int) -> list[Text]:
    """The last lines of the log in the space that is left, if that is more than a heading."""
    if space < 3 or not view.log_tail or view.log is None:
        return []
    return [_rule(f"last lines of {Path(view.log).stem}", size), *map(Text, view.log_tail[1 - space :])]


def notice_line(notice: Notice) -> Text:
    """When, where and what."""
    clock = "now     " if notice.time is None else str(notice.time)[11:19].ljust(8)
    text = notice.text
    # Most sentences name host and rank themselves.
    where = [
        words
        for words, is_named in (
            (f"{notice.host}", notice.host is None or str(notice.host) in text),
            (f"rank {notice.rank}", notice.rank is None or f"rank {notice.rank}" in text),
        )
        if not is_named
    ]
    place = f"{' '.join(where)}: " if where else ""
    return Text.assemble((clock, DIM), "  ", (place + text, WATCH if notice.time is None else ""))


def resampled(points: Sequence[tuple[int, float]], width: int) -> list[float | None]:
    """The mean value in each of `width` equal ranges of steps, or every point if there are fewer."""
    if not points:
        return []
    if len(points) <= width:
        return [value for _, value in points]
    first, last = points[0][0], points[-1][0]
    sums: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        sums[min(width - 1, (step - first) * width // max(1, last - first))].append(value)
    return [sum(values) / len(values) if values else None for values in sums]


def sparkline(values: Sequence[float | None]) -> str:
    """Values as blocks of eight heights, from the lowest to the highest; a space where there is none."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BLOCKS[round((value - low) * scale)] for value in values)


def chart_rows(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """A line through up to `2 * width` values in `height` rows of 2 x 4 dots a character, highest first."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (4 * height - 1) / (high - low) if high > low else 0.0
    step = max(1.0, 2 * width / max(1, len(values)))
    dots = [[0] * width for _ in range(height)]
    before: int | None = None
    for index, value in enumerate(values):
        if value is None:
            continue
        level = round((value - low) * scale)
        last = level if before is None else before
        column = min(2 * width - 1, int(index * step))
        for y in range(min(last, level), max(last, level) + 1):
            dots[height - 1 - y // 4][column // 2] |= DOTS[column % 2][y % 4]
        before = level
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in dots]


def _line(label: str, value: Text) -> Text:
    return Text.assemble((label.ljust(LABEL), DIM), value)


def _spread(left: Text, right: Text, width: int) -> Text:
    """One text at the left and one at the right; the right one is dropped if there is no space for it."""
    gap = width - len(left) - len(right)
    return Text.assemble(left, " " * gap, right) if gap >= 2 else left


def _rule(text: str, size: Size) -> Text:
    return Text.assemble(("── ", DIM), (text, TITLE), (" " + "─" * max(0, size.width - len(text) - 4), DIM))


def _wrapped(text: str, width: int, max_lines: int) -> list[Text]:
    """A sentence in at most `max_lines` lines; what does not fit is cut off."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    if len(lines) > max_lines:
        lines[max_lines - 1] = lines[max_lines - 1][: width - 2] + " …"
    return [Text(line) for line in lines[:max_lines]]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _used(used: float | None, total: float | None) -> str:
    return "-" if used is None or total is None else f"{used:.0f}/{total:.0f}G"
