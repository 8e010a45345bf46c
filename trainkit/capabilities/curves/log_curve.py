"""Extracts metrics from the output of a COMMAND's rank 0, and writes them to metrics.jsonl."""

from __future__ import annotations

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType

from trainkit.capabilities.curves.printed_curve import (
    CONTROL,
    MAX_LINE,
    MAX_NAMES,
    Found,
    PrintedCurve,
    shown_lines,
)
from trainkit.capability import Companion
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import Entry, log_event
from trainkit.run.files import append_jsonl, read_jsonl_reversed, utc_now
from trainkit.run.rundir import AttemptDir

SOURCE = "log"
"""Value of ``source`` in metrics.jsonl records that were extracted from a log."""
READ_BYTES = 2**17
"""Maximum number of bytes read per poll. If the log has grown by more than this number of bytes, only its
last part is read."""
MAX_RECORDS = 100
"""Maximum number of records written per poll, not counting records with a rare metric. If a poll finds more
steps, only evenly spaced steps are written.

Steps with a rare metric are always written.
"""
RARE = 10
"""A metric is considered rare if at most this number of steps in a poll contain it."""
FEW_LOSSES = 20
"""If this number of lines have a loss but no step, an event reports that no curve was found."""
MATCH_S = 1.0
"""Maximum time in seconds for a user's pattern to match the lines of one poll."""


class LogCurve(Companion):
    """Follows the log of rank 0, and writes the curve found in it to metrics.jsonl.

    Each `poll` reads a limited number of bytes. Reading stops when the script itself writes metrics.jsonl.
    """

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, pattern: str) -> None:
        """Prepare to follow an attempt's log; `pattern` is ``auto`` or a regular expression."""
        self._attempt, self._file = attempt, attempt.run.metrics_file
        self._log, self._position, self._rest = attempt.rank_log(0), 0, b""
        self._pattern = None if pattern == "auto" else re.compile(pattern)
        self._is_shared = plan.workload.has_launcher and plan.world_size > 1
        self._curve, self._has_begun = PrintedCurve(is_shared=self._is_shared), False
        self._names: tuple[str, ...] = ()
        self._announced: tuple[object, ...] | None = None
        self._step: int | None = None
        """The newest step matched by a user's pattern."""
        self._has_warned = False
        self._is_off, self._size = False, 0

    def _begin(self) -> None:
        """Read the part of the curve that earlier attempts wrote.

        A read that raises OSError is retried in the next poll.
        """
        previous = None
        made = (
            Entry(event).record("made_of")
            for event in read_jsonl_reversed(self._attempt.run.events_file, ["curve"])
        )
        if last := next((one for one in made if one.values), None):
            kind, length = last.text("kind") or "", last.count("length")
            previous = Found(kind, (), None, length, last.count("first_epoch"))
        newest = next(map(Entry, read_jsonl_reversed(self._file)), None)
        self._is_off = newest is not None and newest.text("source") != SOURCE
        self._size = self._metrics_size()
        self._curve = PrintedCurve(is_shared=self._is_shared, previous=previous)
        self._has_begun = True

    def poll(self) -> None:
        """Read the output written since the last call; raise OSError if a file cannot be read or written."""
        self._read(is_over=False)

    def end(self, *, is_finished: bool) -> None:
        """Read the remaining output of an attempt that has exited.

        Raises OSError if a file cannot be read or written.
        """
        self._read(is_over=True)

    def _read(self, *, is_over: bool) -> None:
        if not self._has_begun:
            self._begin()
        if self._is_off:
            return
        lines = self._new_lines(is_over)
        if self._pattern is None:
            for line in lines:
                self._curve.read(line)
            if is_over:
                self._curve.finish()
        else:
            self._match(self._pattern, lines)
        if self._curve.records or self._curve.evaluations:
            self._write()
        self._announce(is_over)
        self._warn_of_names()

    def _new_lines(self, is_over: bool) -> list[str]:
        with self._log.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size - self._position > READ_BYTES:
                self._position, self._rest = size - READ_BYTES, b""
            stream.seek(self._position)
            data = stream.read(READ_BYTES)
        self._position += len(data)
        lines, rest = shown_lines(self._rest + data + (b"\n" if is_over else b""))
        self._rest = rest[-MAX_LINE:]
        return lines

    def _match(self, pattern: re.Pattern[str], lines: Sequence[str]) -> None:
        try:
            with _time_limit(MATCH_S):
                for line in lines:
                    found = pattern.search(CONTROL.sub("", line)[-MAX_LINE:])
                    if found is not None:
                        self._add_match(found.groupdict())
        except _TooSlow:
            self._is_off = True
            problem = f"logging.pattern took more than {MATCH_S:g} s to search one block of the log"
            problem += ", so this pattern is no longer used"
            log_line(f"warning: {problem}")
            log_event(self._attempt.run, self._attempt.number, "curve", reason=problem)

    def _add_match(self, groups: Mapping[str, str | None]) -> None:
        """Add the numbers from the named groups of a user's pattern to the curve."""
        values = {name: _number(text) for name, text in groups.items() if text is not None}
        step, val_loss = values.pop("step", None), values.pop("val_loss", None)
        known = {name: value for name, value in values.items() if value is not None}
        if groups.get("step") is not None:
            if step is None or not step.is_integer():
                return
            self._step = int(step)
        elif self._step is None:
            return
        if val_loss is not None:
            self._curve.evaluations.append((self._step, val_loss))
            self._curve.join(self._step, {"val_loss": val_loss})
        self._curve.join(self._step, known)
        self._names = tuple(dict.fromkeys((*self._names, *known)))

    def _write(self) -> None:
        if self._metrics_size() != self._size:
            self._is_off = True  # stop reading the log, because the script itself writes metrics.jsonl
            return
        run, number, now = self._attempt.run, self._attempt.number, utc_now()
        found = list(self._curve.records.items())
        if len(found) > MAX_RECORDS:
            counts = Counter(name for _, values in found for name in values)
            rare = {name for name, count in counts.items() if count <= RARE}
            chosen = {(index + 1) * len(found) // MAX_RECORDS - 1 for index in range(MAX_RECORDS)}
            found = [
                item for index, item in enumerate(found) if index in chosen or not rare.isdisjoint(item[1])
            ]
        records = [
            {
                **{"step": step, "time": now, "attempt": number},
                **{name: value if math.isfinite(value) else None for name, value in values.items()},
                "source": SOURCE,
            }
            for step, values in found
        ]
        self._curve.records = dict(found)  # do not let records accumulate while the disk is full
        if records:
            append_jsonl(self._file, *records)
            self._size = self._metrics_size()
        self._curve.records.clear()
        for step, val_loss in self._curve.evaluations:
            finite = val_loss if math.isfinite(val_loss) else None
            log_event(run, number, "evaluated", step=step, val_loss=finite)
        self._curve.evaluations.clear()

    def _announce(self, is_over: bool) -> None:
        """Record an event with the source of the curve, or with the reason why there is no curve.

        An event that was already recorded is not repeated.
        """
        found, values = self._curve.found, dict[str, object]()
        said: tuple[object, ...]
        if self._is_off:
            return
        losses = self._curve.ambiguous
        unknown = "the step number of the loss is unknown"
        if losses:
            unknown = f"it is unknown which of {', '.join(losses)} is the loss"
        unknown += "; set logging.pattern to an expression with the groups step and loss"
        if found is not None:
            has_loss = "loss" in found.names or not losses
            said = found.kind, found.total_steps, found.length is not None, has_loss
            values = {"total_steps": found.total_steps, "made_of": asdict(found)}
            step = "step" if found.kind == "step" else f"step ({found.kind})"
            step += "" if found.length is None else f", which restarts after {found.length}"
            reason = f"from the log: {', '.join((step, *found.names, *found.metrics))}; "
            reason += "logging.pattern changes it" if has_loss else unknown
        elif self._names:
            said, reason = self._names, f"from the log by logging.pattern: step, {', '.join(self._names)}"
        elif self._curve.num_losses >= FEW_LOSSES or (is_over and self._curve.num_losses > 1):
            said, reason = losses, f"no curve in the log: {unknown}"
        else:
            return
        if said != self._announced:
            self._announced = said
            log_event(self._attempt.run, self._attempt.number, "curve", **values, reason=reason)

    def _warn_of_names(self) -> None:
        """Warn, only once, that the script prints more metrics than a curve can contain."""
        name = self._curve.left_out
        if name is None or self._has_warned:
            return
        self._has_warned = True
        problem = f"the log has more than {MAX_NAMES} metrics, so {name} and others are omitted; "
        problem += "use logging.pattern to choose the metrics"
        log_line(f"warning: {problem}")
        log_event(self._attempt.run, self._attempt.number, "curve", reason=problem)

    def _metrics_size(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0


def _number(text: str) -> float | None:
    """Return the number in a string such as ``1,024`` or ``91.2%``, or None if the string is not a number."""
    try:
        return float(text.rstrip("%").replace(",", ""))
    except ValueError:
        return None  # a group in a user's pattern can match any text


class _TooSlow(Exception):
    """Raised if matching a user's pattern takes longer than `MATCH_S`."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow if a `with` block takes longer than `seconds`, even during a regular expression match.

    The time limit works only in the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
