"""How far `prepare` is: a bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 10.0
_MIB = 1 << 20


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes the bytes that are done and those in all."""
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console  # 50 ms that only a terminal needs
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, what: str) -> None:
        self.what = what
        self.next_time = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() < self.next_time:
            return
        self.next_time = time.monotonic() + _SECONDS_BETWEEN_LINES
        print(f"{self.what}: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB", file=sys.stderr, flush=True)
