"""Formats a view of a run as lines of a given width, for `watch --once` and for the live screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from rich.text import Text

from trainkit.capabilities.watch.run_view import NodeRow, RunView
from trainkit.capability import Notice
from trainkit.formats import GAP, GIB, cell, duration, number, plural, table, worker_time
from trainkit.formats import size as data_size
from trainkit.observe.logs import clean
from trainkit.observe.status import FAILURE_LOG_LINES, loss_text
from trainkit.terminal import BAD, DIM, GOOD, TITLE, WATCH, cut, plain, state_style

BLOCKS = "▁▂▃▄▅▆▇█"
DOT = " · "
LABEL = 11
VALUE = 34
MIN_NOTICES = 2
WIDE, TALL = 120, 40
MAX_SPARKLINE = 200
MIN_CHARTS, LAST_LINES = 12, 7
"""Minimum number of rows for charts on a tall screen, and number of log rows below the charts."""
CHART_WIDTH, CHART_HEIGHT = 56, (4, 12)
"""Minimum number of columns of a chart, and minimum and maximum number of rows of its curve."""
CHART_LABEL = 7
"""Minimum number of columns for the value labels of a chart."""
CURVE_NAMES = {"loss": "loss", "grad_norm": "grad norm", "lr": "lr", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True)
class Size:
    """Width and height of the screen, in characters. A `height` of None means no limit."""

    width: int
    height: int | None = None

    @property
    def is_wide(self) -> bool:
        return self.width >= WIDE

    @property
    def is_tall(self) -> bool:
        return self.height is None or self.height >= TALL


def view_lines(view: RunView, size: Size, metric: str | None = None) -> list[Text]:
    """Return a view as at most `size.height` lines with at most `size.width` characters each.

    If `metric` is given, its chart replaces everything below the progress line.
    """
    lines = [_title(view, size), *_sentence(view, size)]
    charts = charted(view)
    if metric in charts and size.height is not None:
        lines += _progress(view, size)
        lines += _charts(view, [metric], size, size.height - len(lines))
    else:
        lines = _all_lines(lines, view, size, charts if size.is_tall else [])
    for line in lines:
        line.truncate(size.width, overflow="ellipsis")
    return lines if size.height is None else lines[: size.height]


def _all_lines(lines: list[Text], view: RunView, size: Size, charts: Sequence[str]) -> list[Text]:
    """Return `lines`, followed by the run's numbers, nodes, warnings, charts and log."""
    tail_first = bool(view.failure) and size.is_tall
    lines += _tail_lines(view, size, 1 + FAILURE_LOG_LINES) if tail_first else []
    lines += [Text(), *_progress(view, size), *_numbers(view, size)]
    num_nodes, num_notices = len(view.nodes), len(view.notices)
    if size.height is not None:
        # Reserve three lines for headings, and the minimum height for charts. A third of the remaining lines
        # is for warnings, and the rest is for nodes.
        left = size.height - len(lines) - 3 - (MIN_CHARTS if charts else 0)
        num_notices = min(num_notices, max(MIN_NOTICES, left // 3))
        num_nodes = max(1, left - num_notices)
    lines += nodes_lines(view.nodes, size, num_nodes, view.num_hosts)
    lines += notices_lines(view.notices, size, num_notices)
    if charts and size.height is not None:
        num_last = 0 if tail_first or not view.log_tail else LAST_LINES
        lines += _charts(view, charts, size, size.height - len(lines) - num_last)
    if not tail_first:
        lines += _tail_lines(view, size, 0 if size.height is None else size.height - len(lines))
    return lines


def _title(view: RunView, size: Size) -> Text:
    status, place = view.status, view.status.place
    left = Text.assemble(
        (status.name, TITLE), "  ", (status.state.upper(), f"reverse {state_style(status.state)}")
    )
    facts = []
    if status.attempt is not None:
        facts.append(f"attempt {status.attempt}")
    if status.job_id is not None:
        on = f" on {place.cluster}" if place.cluster else ""
        facts.append(f"job {status.job_id}{on}" if not status.job_id.startswith("local") else status.job_id)
    if place.num_nodes is not None:
        kind = "GPU" if view.has_gpus else "process"
        facts.append(f"{plural(place.num_nodes, 'node')} x {plural(place.workers_per_node, kind)}")
    right = Text(DOT.join(facts), DIM)
    gap = size.width - len(left) - len(right)
    return Text.assemble(left, " " * gap, right) if gap >= 2 else left


def _sentence(view: RunView, size: Size) -> list[Text]:
    failed = view.status.failure
    code = None if failed is None else failed.code
    place = None if code is None else clean(f"  {code.shown}")
    sentences = (view.failure, place, view.sentence, view.hint and f"hint: {view.hint}")
    return [
        Text(line)
        for sentence in sentences
        for line in wrap(sentence or "", size.width, max_lines=2, placeholder=" …")
    ]


def _progress(view: RunView, size: Size) -> list[Text]:
    status = view.status
    lines = []
    if status.progress.step is not None:
        total = "" if status.progress.total_steps is None else f" of {status.progress.total_steps:,}"
        text = Text(f"step {status.progress.step:,}{total}")
        if view.progress is not None:
            width = max(10, min(60, size.width - LABEL - len(text) - 12))
            done = round(view.progress * width)
            bar = Text.assemble(("█" * done, GOOD), ("░" * (width - done), DIM))
            text = Text.assemble(bar, f" {view.progress:6.1%}  ", text)
        lines.append(_line("progress", text))
    times = {"ran for": view.elapsed_s, "ETA": view.eta_s, "time limit in": view.limit_s}
    known = (f"{words} {duration(seconds)}" for words, seconds in times.items() if seconds is not None)
    text = Text(DOT.join(known) or "-")
    if view.eta_s is not None and view.limit_s is not None:
        short_s = view.eta_s - view.limit_s
        verdict = (
            (f"{duration(short_s)} too short", WATCH)
            if short_s > 0
            else (f"{duration(-short_s)} to spare", GOOD)
        )
        text = Text.assemble(text, ": ", verdict)
    lines.append(_line("time", text))
    if used := status.used.text(status.place.device):
        lines.append(_line("used", Text(used)))
    return lines


def _curve_value(view: RunView, name: str) -> Text:
    """Return the newest value of a curve, and a reference value for comparison."""
    if name == "loss":
        val_loss = view.status.progress.val_loss
        val = "" if val_loss is None else f"{DOT}validation {number(val_loss)}"
        return Text(loss_text(view.status, number(view.status.progress.loss)) + val)
    if name == "tokens_per_s":
        return _speed(view)
    return Text(number(view.grad_norm if name == "grad_norm" else view.lr))


def _numbers(view: RunView, size: Size) -> list[Text]:
    """Return one line for each number, with a sparkline if the number has a curve."""
    is_command = view.status.is_command
    lines = []
    for name in CURVE_NAMES:
        curve = view.curves[name]
        has_loss = view.status.progress.loss is not None or view.status.progress.diverged_since is not None
        if is_command and not curve and not (name == "loss" and has_loss):
            continue
        value = _curve_value(view, name)
        width = size.width - LABEL - max(VALUE, len(value) + 1)
        if len(curve) > 1 and width >= 10:
            value.pad_right(max(1, VALUE - len(value)))
            value.append(sparkline(resampled(curve, min(width, MAX_SPARKLINE))), "cyan")
        lines.append(_line(metric_name(view, name), value))
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
    times = f"{1e3 * found.own_s:,.1f} ms before it waits, other ranks {1e3 * found.usual_s:,.1f} ms"
    return [_line("slowest", Text(f"rank {found.rank} on {found.host}{DOT}{times}"))]


def _speed(view: RunView) -> Text:
    now, median = view.status.progress.tokens_per_s, view.median_tokens_per_s
    if now is None or not median:
        return Text(number(now))
    share = now / median
    return Text.assemble(f"{now:,.0f}{DOT}", (f"{share:.0%} of median", WATCH if share < 0.9 else ""))


def _memory(view: RunView) -> str:
    unit = "a GPU" if view.has_gpus else "a process"
    if view.mem_gib_peak is None:
        return "-"
    total = view.mem_gib_total if view.has_gpus else None
    of_all = "" if total is None else f" of {data_size(total * GIB)}"
    return f"peak {data_size(view.mem_gib_peak * GIB)}{of_all} {unit}"


def _checkpoint(view: RunView) -> Text:
    text = Text("none yet")
    if view.checkpoint_step is not None:
        text = Text(f"step {view.checkpoint_step:,}, {duration(view.checkpoint_age_s)} ago")
    if view.steps_at_risk:
        lost = "at risk" if view.status.is_active else "lost"
        text.append(DOT).append(f"{plural(view.steps_at_risk, 'step')}{_hours(view)} {lost}", WATCH)
    elif view.checkpoint_step is not None:
        text.append(DOT).append("nothing at risk", GOOD)
    return text


def _hours(view: RunView) -> str:
    """Return the hours of work at risk as text, such as `` = 3.2 GPU-hours``."""
    hours, unit = view.hours_at_risk, "GPU" if view.has_gpus else "process"
    return "" if hours is None else f" = {worker_time(hours, unit)}"


def nodes_lines(nodes: Sequence[NodeRow], size: Size, most: int, expected: int | None) -> list[Text]:
    """Return a heading, followed by the rows of the first `most` nodes."""
    if not nodes:
        return [_rule("nodes: no samples", size)]
    num_bad = sum(node.severity > 0 for node in nodes)
    total = f"{len(nodes)} of {expected}" if expected and expected > len(nodes) else f"{len(nodes)}"
    shown = nodes[:most]
    rest = "" if len(shown) == len(nodes) else f", {len(nodes) - len(shown)} more: press n"
    problems = f"{num_bad} with problems" if num_bad else "no problems"
    lines = [_rule(f"nodes: {total}, {problems}{rest}", size)]
    has_gpus = any(node.num_gpus for node in nodes)
    heading = ["", "node", *(["GPU", "GPU mem", "°C", "W"] if has_gpus else []), "CPU"]
    if size.is_wide or not has_gpus:
        heading += ["memory", "net MiB/s", "disk MiB/s"]
    heading += [*(["sampled"] if size.is_wide else []), "note"]
    rows = [heading, *([_cells(node, size)[name] for name in heading] for node in shown)]
    top, *others = table(rows, right=range(2, len(heading) - 1)).splitlines()
    styles = (BAD if node.severity >= 4 else WATCH if node.severity else "" for node in shown)
    return [*lines, Text(top, DIM), *map(Text, others, styles)]


def _cells(node: NodeRow, size: Size) -> dict[str, str]:
    """Map each column heading to the node's value for the column."""
    width = 24 if size.is_wide else 12
    return {
        "": "!" if node.severity else "",
        "node": node.host if len(node.host) <= width else node.host[: width - 1] + "…",
        "GPU": _percent(node.gpu_percent),
        "GPU mem": _used(node.gpu_mem_used_gib, node.gpu_mem_total_gib),
        "°C": cell(node.temperature_c, ".0f"),
        "W": cell(node.power_w, ".0f"),
        "CPU": _percent(node.cpu_percent),
        "memory": _used(node.mem_used_gib, node.mem_total_gib),
        "net MiB/s": cell(node.net_mib_s, ",.1f"),
        "disk MiB/s": cell(node.disk_mib_s, ",.1f"),
        "sampled": duration(node.age_s),
        "note": ", ".join(node.problems),
    }


def notices_lines(notices: Sequence[Notice], size: Size, most: int) -> list[Text]:
    """Return a heading, followed by the first `most` warnings."""
    if not notices:
        return [_rule("warnings: none", size)]
    more = "" if most >= len(notices) else f", {len(notices) - most} more: press w"
    lines = [_rule(f"warnings: {len(notices)}{more}", size)]
    return lines + [notice_line(notice) for notice in notices[:most]]


def _tail_lines(view: RunView, size: Size, space: int) -> list[Text]:
    """Return a heading, followed by the last lines of the log that fit into the remaining space.

    Returns no lines if there is space only for the heading.
    """
    if space < 3 or not view.log_tail or view.log is None:
        return []
    return [_rule(f"last lines of {Path(view.log).stem}", size), *map(Text, view.log_tail[1 - space :])]


def notice_line(notice: Notice) -> Text:
    """Return a warning with its time, and with its host and rank if the text does not contain them."""
    clock, text = "now" if notice.time is None else notice.time[11:19], notice.text
    where = [] if notice.host is None or notice.host in text else [notice.host]
    if notice.rank is not None and f"rank {notice.rank}" not in text:
        where.append(f"rank {notice.rank}")
    place = f"{' '.join(where)}: " if where else ""
    return Text.assemble((clock.ljust(8), DIM), "  ", (place + text, WATCH if notice.time is None else ""))


def charted(view: RunView) -> list[str]:
    """Return the metrics that can be drawn as charts."""
    return [name for name, points in view.curves.items() if len(points) > 1]


def metric_name(view: RunView, name: str) -> str:
    """Return the display name of a metric."""
    counts_samples = name == "tokens_per_s" and view.status.progress.samples_per_s is not None
    return "samples/s" if counts_samples else CURVE_NAMES.get(name, plain(name))


def _charts(view: RunView, names: Sequence[str], size: Size, space: int) -> list[Text]:
    """Return the charts that fit into the space; several charts may be placed side by side."""
    least, most = CHART_HEIGHT
    num_rows = -(-len(names) // max(1, size.width // CHART_WIDTH))
    num_columns = -(-len(names) // num_rows)
    num_rows = min(num_rows, space // (1 + least))
    if num_rows < 1:
        return []
    height = space // num_rows - 1 if len(names) == 1 else min(most, space // num_rows - 1)
    width = (size.width - len(GAP) * (num_columns - 1)) // num_columns
    lines = []
    for row in range(num_rows):
        own = names[row * num_columns : (row + 1) * num_columns]
        charts = [_chart(view, name, Size(width, height)) for name in own]
        lines += [Text(GAP).join(parts) for parts in zip(*charts, strict=True)]
    return lines


def _chart(view: RunView, name: str, size: Size) -> list[Text]:
    """Return a heading, followed by the rows of a curve with its lowest and highest value as labels.

    Each column shows the mean over a range of steps. A column for a range without steps repeats the previous
    column's value.
    """
    points, height = view.curves[name], size.height or 1
    ends = (number(pick(value for _, value in points)) for pick in (min, max))
    label = 1 + max(CHART_LABEL, *map(len, ends))
    width = max(1, size.width - label)
    values: list[float] = []
    for mean in resampled(points, width):
        values += [mean] if mean is not None else values[-1:]
    low, high = min(values), max(values)
    # If a curve has fewer values than columns, each value fills several columns.
    columns = (values[index * len(values) // width] for index in range(width))
    # Halve before subtracting, because the difference of two finite numbers may be infinite.
    span = high / 2 - low / 2 or 1.0
    most = height * len(BLOCKS) - 1
    levels = [1 + round(min(1.0, (value / 2 - low / 2) / span) * most) for value in columns]
    title = cut(metric_name(view, name), size.width // 2)
    lines = [_rule(f"{title}, steps {points[0][0]:,} to {points[-1][0]:,}", size)]
    for row in reversed(range(height)):
        text = "".join(_block(level - row * len(BLOCKS)) for level in levels)
        edge = number(high) if row == height - 1 else number(low) if row == 0 else ""
        lines.append(Text.assemble((f"{edge:>{label - 1}} ", DIM), (text, "cyan")))
    return [_exactly(line, size.width) for line in lines]


def _block(level: int) -> str:
    return " " if level <= 0 else BLOCKS[min(level, len(BLOCKS)) - 1]


def _exactly(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def resampled(points: Sequence[tuple[int, float]], width: int) -> list[float | None]:
    """Return the mean value in each of `width` equal step ranges, or all points if there are fewer."""
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
    """Draw values as block characters with eight heights; the lowest block represents the lowest value.

    A missing value is drawn as a space.
    """
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    # Halve before subtracting, as in `_chart`. Divide by the span instead of multiplying by its inverse,
    # which overflows if the span is tiny.
    span = high / 2 - low / 2 or 1.0
    levels = (None if value is None else (value / 2 - low / 2) / span for value in values)
    return "".join(" " if level is None else BLOCKS[round(level * (len(BLOCKS) - 1))] for level in levels)


def _line(label: str, value: Text) -> Text:
    return Text.assemble((label.ljust(LABEL), DIM), value)


def _rule(text: str, size: Size) -> Text:
    return Text.assemble(("── ", DIM), (text, TITLE), (" " + "─" * max(0, size.width - len(text) - 4), DIM))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _used(used: float | None, total: float | None) -> str:
    if used is None or total is None:
        return "-"
    return f"{used:.0f}/{total:.0f}G" if used >= 1 or not used else f"{1024 * used:.0f}M/{total:.0f}G"
