"""Extracts the curve from a COMMAND's output: steps with their loss, learning rate and other metrics.

The words before a number are its name, as in ``step 10/100 | train loss: 2.31``. A number may also be the
position of a progress bar. If several numbers on a line could be the step, a number that increases from line
to line is chosen. If the printed step restarts from a low value, for example in each epoch, the step of the
curve continues to increase. The curve starts only after the step number has increased.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainkit.capabilities.curves.metric_names import (
    NO_LOSS,
    OF_VALIDATION,
    Label,
    is_of_part,
    metric_of,
    of_part,
    read_label,
)

MAX_LINE = 1000
"""Maximum number of characters to read from a line. Only the last part of a longer line is read."""
KINDS = ("global step", "step", "iteration", "batch", "progress bar", "epoch")
"""Kinds of printed positions that can serve as the step, in order of preference."""
_COUNTS = {
    **dict.fromkeys(("update", "updates"), "global step"),
    **dict.fromkeys(("step", "steps"), "step"),
    **dict.fromkeys(("iter", "iters", "itr", "iteration", "iterations"), "iteration"),
    **dict.fromkeys(("batch", "minibatch"), "batch"),
    **dict.fromkeys(("epoch", "ep"), "epoch"),
}
_PARTS_OF_A_COUNT = frozenset(
    {"global", "train", "training", "num", "optim", "optimizer", "current", "cur", "idx", "index"}
)
_NOT_OF_A_STEP = OF_VALIDATION | {
    "micro",
    "num",
    "number",
    "max",
    "total",
    "warmup",
    "per",
    "every",
    "skipped",
    "remaining",
    "left",
    "best",
    "last",
    "next",
    "after",
    "until",
    "test",
    "nan",
}
"""Words before ``step`` that indicate that a number is not a training step."""
_PLAIN = frozenset(
    {
        "train",
        "training",
        "total",
        "avg",
        "average",
        "mean",
        "running",
        "current",
        "batch",
        "step",
        "lm",
        "iter",
        "epoch",
        "the",
    }
)
"""Words next to ``loss`` that do not distinguish one loss from other losses on the line."""
_VALUES = {
    **dict.fromkeys(("lr", "learning rate"), "lr"),
    **dict.fromkeys(("grad norm", "gradient norm", "gnorm"), "grad_norm"),
    **dict.fromkeys(("tok s", "tok sec", "tokens s", "tokens sec", "tokens per sec"), "tokens_per_s"),
    **dict.fromkeys(("tokens per s", "tokens per second", "tps"), "tokens_per_s"),
}
"""Maps the last words before a number to the number's name in metrics.jsonl."""
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_OF_TWO = re.compile(r"\d/\s*\d")
_RANK = re.compile(r"\s*\[(?:rank|default|Rank )(\d+)\]")
"""Matches the rank prefix that torchrun and DeepSpeed add to output lines."""
_NUMBER = re.compile(
    r"(?<![\w.@])(?<!\w-)(?P<value>[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:e[-+]?\d+)?|[-+]?\.\d+(?:e[-+]?\d+)?"
    r"|[-+]?(?:nan|inf)\b)(?:\s{0,9}/\s{0,9}(?P<total>\d+)(?![\d/.]))?(?P<unit>%|[a-z]*)",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r",\d")
"""Matches the beginning of the fractional part of a number with a decimal comma, as in ``loss 1,45``."""
_SEPARATOR = re.compile(r"[|,;{}()\t]|\s-\s|\s{4}|\]\s")
"""Matches a separator between two metrics. Words between a number and the next separator belong to the
number."""
NO_LABEL = read_label("")
_BEFORE_A_NUMBER = " \t:=\"'[(#"
_IN_A_LIST = re.compile(r"[\[(#]")
_BAR = re.compile(r"[━╸╺█▏▎▍▌▋▊▉|]\s*$"), re.compile(r"\s*\[\d+:\d\d|\s+[\d-]+:")
_POSITION = re.compile(r"(?:\[|^)\s*$"), re.compile(r"\s*\[\d+:\d\d|\s*[━█#=>]{3}|\s+-\s|\s*\]|\s*\(\d")
"""Patterns for the text before and after a printed step, such as ``10/100``.

`_BAR` matches progress bars of tqdm and rich; `_POSITION` matches Keras bars, and positions in brackets.
"""
_BEGINS_VALIDATION = re.compile(
    r"\W*(?:val|valid|validation|validating|eval|evaluation|evaluating)\b(?!.*epoch)", re.I
)
_BEGINS_TEST = re.compile(r"\W*(?:test|testing)\b", re.I)
_EPOCH_AND_BATCH = re.compile(r"\s*\[\s*(\d+),\s*(\d+)\]")
"""Matches ``[1, 2000]``, the epoch and batch as printed in PyTorch's first tutorial."""


@dataclass
class Reading:
    """The positions and values found on one line of output."""

    positions: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Maps each kind of position to the printed position and total; the total is None if it is not
    printed."""
    has_part_of_epoch: bool = False
    """True if the line contains a fractional epoch, such as ``epoch: 0.1``."""
    is_validation: bool = False
    """True if the line is validation output, so that its losses are validation losses."""
    is_part: bool = False
    """True if the line describes a single validation batch."""
    losses: dict[str, float] = field(default_factory=dict)
    """Maps the word next to ``loss`` to the value of that training loss.

    The key is ``""`` if there is no such word, and ``train`` if the word is in `_PLAIN`.
    """
    val_loss: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    """Values such as the learning rate, keyed by their names in metrics.jsonl."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics and training losses on the line, excluding those in `values`, keyed by their printed
    names."""
    called: dict[str, str] = field(default_factory=dict)
    """Maps each key in `losses` to the name of the same loss in `metrics`."""
    is_telling: bool = False
    """True if a metric name shows that the line is training output."""


def read_line(line: str) -> Reading:
    """Return the positions and values found on a line.

    Lines prefixed with a rank other than 0 produce an empty result.
    """
    found, text = Reading(), line.lower()
    # A chain of substring searches is several times faster than a regular expression with alternatives.
    says_something = "loss" in text or "step" in text or "epoch" in text or "iter" in text or "val" in text
    if not (says_something or "test" in text or _OF_TWO.search(text)):
        return found
    line = CONTROL.sub("", line)[-MAX_LINE:]
    rank = _RANK.match(line)
    if rank is not None and int(rank[1]) != 0:
        return found
    end, found.is_validation = 0, _BEGINS_VALIDATION.match(line) is not None
    if (both := _EPOCH_AND_BATCH.match(line)) is not None:
        found.positions |= {"epoch": (int(both[1]), None), "batch": (int(both[2]), None)}
        end = both.end()
    for number in _NUMBER.finditer(line, end):
        before = line[end : number.start()]
        label = before.rstrip(_BEFORE_A_NUMBER)
        is_label = label[-1:].isalnum() and "==" not in before[len(label) :]
        named = read_label(_SEPARATOR.split(label)[-1].lower()) if is_label else NO_LABEL
        words, between = named.words, before[len(label) :]
        is_assigned = ":" in between or "=" in between or named.is_tensor
        is_nan = number["value"].lower() == "nan"
        is_in_row = bool(found.metrics) and before.lower().split() == [*words]
        if is_nan and not (words and (is_assigned or is_in_row or words[-1].endswith(("loss", "norm")))):
            continue  # here, "nan" is a part of the text, not a value, as in "number of nan iterations: 0"
        end = number.end()
        begins, ends = _POSITION if not words and not _BAR[0].search(before) else _BAR
        is_position = number["total"] is not None and number["value"].isdigit()
        if is_position and begins.search(before) and ends.match(line, end):
            found.positions.setdefault("progress bar", (int(number["value"]), int(number["total"])))
        elif words and not _DECIMAL_COMMA.match(line, end):
            num_losses = len(found.losses)
            if not _read_named(found, number, named) or (_IN_A_LIST.search(between) and not named.is_tensor):
                continue
            if between == ":" and named.has_colon:
                continue
            is_loss = len(found.losses) > num_losses
            metric = metric_of(named, number, is_assigned=is_assigned or is_loss)
            if metric is not None and metric[0] not in found.metrics:
                found.metrics[metric[0]] = metric[1]
                found.is_telling |= named.is_telling
                if is_loss:
                    found.called[next(reversed(found.losses))] = metric[0]
    if _BEGINS_TEST.match(line) and found.positions.keys() <= {"epoch", "progress bar"}:
        found.losses.clear()
        found.is_part |= "progress bar" in found.positions
        found.metrics = of_part(found.metrics, "test")
    elif found.is_validation:
        found.metrics = of_part(found.metrics, "val")
    return found


def _read_named(found: Reading, number: re.Match[str], label: Label) -> bool:
    """Add a number to the field that its label selects; return True if the number may also be a metric."""
    text, unit = number["value"].replace(",", ""), number["unit"].lower()
    parts, own = label.parts, label.own
    if not own or unit == "%":
        return not {"loss", "losses", *_COUNTS}.intersection(own)
    kind = _COUNTS.get(own[-1])
    if kind is not None and {*own[:-1]} <= _PARTS_OF_A_COUNT:
        if not text.isdigit() or unit not in _FACTORS:
            found.has_part_of_epoch |= kind == "epoch"
            return False
        context = {*parts[: -len(own)]}
        found.is_validation |= bool(OF_VALIDATION & context)
        # Megatron prints "validation loss at iteration 100 | lm loss value: 2.31", where the iteration is the
        # training step.
        if not _NOT_OF_A_STEP & context or (found.is_validation and "loss" in context):
            kind = "global step" if kind == "step" and "global" in parts else kind
            total = None if number["total"] is None else int(number["total"])
            found.positions.setdefault(kind, (int(text) * _FACTORS[unit], total))
        elif found.is_validation and kind != "epoch":
            found.is_part = True
        return False
    value = float(text) * _FACTORS.get(unit, 1)
    near = parts if len(own) == 1 else own
    if {"loss", "losses"} & {*near[-2:]}:
        others = [part for part in near if part not in ("loss", "losses")]
        if found.is_validation or OF_VALIDATION & {*others}:
            if found.val_loss is not None:
                return True
            found.val_loss = value
            return False
        if not NO_LOSS & {*others}:
            special = [part for part in others if part not in _PLAIN]
            found.losses.setdefault(special[-1] if special else "train" if others else "", value)
        return True
    for length in (1, 2, 3):
        name = _VALUES.get(" ".join(parts[-length:]))
        if name is not None:
            if math.isfinite(value):
                found.values.setdefault(name, value)
            return False
    return True


@dataclass
class _Counter:
    """Tracks a printed number that may be the step."""

    first: int
    last: int
    epoch: int | None
    """The epoch during which `last` was printed, or None if unknown."""
    interval: int = 0
    offset: int = 0
    """Number to add to the printed number: the steps counted before the printed number last restarted."""
    length: int | None = None
    """Number of steps after which the printed number restarts, or None if it has never restarted."""
    has_grown: bool = False

    @property
    def step(self) -> int:
        return self.offset + self.last


_Key = tuple[str, int, int | None]
"""Key of a possible source of the curve: the kind of position, the priority of the loss as returned by
`_loss_of`, and the total."""
_WITHOUT_LOSS = 3
"""Loss priority in a `_Key` for lines that have metrics but no loss."""
MAX_NAMES = 64
"""Maximum number of different metrics in a curve. Additional metrics are omitted."""
MAX_ROWS = 256
"""Number of newest steps whose values are kept in memory, so that later lines can add values to them."""


@dataclass
class _Source:
    """A possible source of the curve: all lines with the same kind of position and the same kind of loss."""

    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Records from the source, stored until the step number of the source has increased."""
    is_curve: bool = False


@dataclass(frozen=True)
class Found:
    """The source of a log's curve, recorded in an event for the user and for the next attempt."""

    kind: str
    names: tuple[str, ...]
    total_steps: int | None
    length: int | None
    """Number of steps per epoch if the printed step restarts in each epoch, or None otherwise."""
    first_epoch: int | None
    metrics: tuple[str, ...] = ()
    """The printed names of metrics other than the loss."""


class PrintedCurve:
    """Reads output line by line, and collects records for metrics.jsonl."""

    def __init__(self, *, is_shared: bool = False, previous: Found | None = None) -> None:
        """Initialize an empty curve.

        `is_shared` is True if several ranks print to the same log. In a shared log, the values from the rank
        that prints a step first are used. `previous` describes the curve of an earlier attempt, whose epoch
        count is continued.
        """
        self.records: dict[int, dict[str, float]] = {}
        """Maps each step to its values. The caller removes records from this mapping after writing them to a
        file."""
        self.evaluations: list[tuple[int, float]] = []
        """The steps at which a validation loss was printed, each with the value of the loss."""
        self.left_out: str | None = None
        """The first metric omitted because of `MAX_NAMES`, or None if no metric was omitted."""
        self._names: dict[str, None] = {}
        self._rows: dict[int, dict[str, float]] = {}
        """Maps each of the newest steps to the values found for it so far."""
        self._val_loss: float | None = None
        """The newest validation loss, stored because a progress bar repeats this loss until the next
        validation."""
        self.found: Found | None = None
        self.ambiguous: tuple[str, ...] = ()
        """Names of the losses on a line with several losses, if none of them is clearly the training loss."""
        self.num_losses = 0
        """Number of lines with a loss, with or without a step."""
        self._is_shared = is_shared
        self._previous = previous
        self._counters: dict[tuple[str, int | None], _Counter] = {}
        self._sources: dict[_Key, _Source] = {}
        self._primary: _Key | None = None
        self._epoch: int | None = None
        self._num_epochs: int | None = None
        self._first_epoch = None if previous is None else previous.first_epoch
        self._ignores_epochs = False
        self._waiting: Reading | None = None
        """A line with a loss but no position; the next redraw of the progress bar provides the position."""
        self._repeated = 0
        self._step: int | None = None

    def read(self, line: str) -> None:
        """Process a line of output, given in the form shown on a terminal."""
        reading = read_line(line)
        self._ignores_epochs |= reading.has_part_of_epoch
        if self._ignores_epochs:
            reading.positions.pop("epoch", None)
        self._note_epoch(reading)
        has_loss = bool(reading.losses) or reading.val_loss is not None
        has_value = has_loss or reading.is_telling
        has_bar = "progress bar" in reading.positions
        if has_value and (reading.is_part or (has_bar and reading.is_validation)):
            return
        self.num_losses += has_loss
        if self._waiting is not None and has_bar and not has_value:
            reading = replace(self._waiting, positions=reading.positions)
            has_value, self._waiting = True, None
        self.finish()
        if reading.positions and (has_value or (reading.metrics and self._primary is not None)):
            self._add_reading(reading)
        elif has_value:
            self._waiting = reading
            if self._primary is not None and self._primary[0] != "progress bar":
                self._add_evaluation(reading)

    def finish(self) -> None:
        """Process the line that is still waiting for a redraw of the progress bar."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._primary is not None and self._primary[0] == "progress bar":
            self._add_evaluation(waiting)

    def _add_evaluation(self, reading: Reading) -> None:
        """Add validation or test values from a line without a position to the newest step."""
        self._add_validation(reading, self._step)
        self.join(self._step, self._own({n: v for n, v in reading.metrics.items() if is_of_part(n)}))

    def _note_epoch(self, reading: Reading) -> None:
        if "epoch" in reading.positions:
            self._epoch, total = reading.positions["epoch"]
            self._num_epochs = total or self._num_epochs
            if self._first_epoch is None:
                self._first_epoch = self._epoch

    def _add_reading(self, reading: Reading) -> None:
        self._continue_epochs(reading)
        counted = {kind: self._count(kind, *position) for kind, position in reading.positions.items()}
        kinds = [kind for kind in KINDS if counted.get(kind) is not None]
        if not kinds:
            return
        counters = {kind: self._counters[kind, reading.positions[kind][1]] for kind in kinds}
        own = [kind for kind in kinds if kind != "epoch"] or kinds
        # Prefer counters that have grown and, among such counters, a counter that has never restarted.
        kind = min(own, key=lambda kind: (not counters[kind].has_grown, counters[kind].length is not None))
        counter = counters[kind]
        is_own = kind != "epoch" or self._primary is None or self._primary[0] == "epoch"
        self._add_validation(reading, counter.step if is_own else self._step)
        loss, total = self._loss_of(reading), reading.positions[kind][1]
        if loss is None:
            self._add_without_loss(reading, kind, counter)
        else:
            rank, value, called = loss
            if self._primary is not None and self._primary[0] in own and self._primary[0] != kind:
                # The counter used so far as the step has restarted, so use the counter `kind`, which has not
                # restarted.
                self._primary = kind, rank, total
                self._sources[self._primary] = _Source(is_curve=True)
            values = {
                "loss": value,
                **reading.values,
                **self._own(reading.metrics, reading.called.get(called)),
            }
            self._add((kind, rank, total), counter, values)

    def _add_without_loss(self, reading: Reading, kind: str, counter: _Counter) -> None:
        """Add a line's metrics to the step printed on it or, at the end of an epoch, to the newest step."""
        values = {**reading.values, **self._own(reading.metrics)}
        primary, key = self._primary, (kind, _WITHOUT_LOSS, reading.positions[kind][1])
        if primary is None or key == primary or _order(key) < _order(primary):
            if reading.is_telling or key == primary:
                self._add(key, counter, values)
        elif primary[0] in reading.positions:
            value, total = reading.positions[primary[0]]
            if _is_one_count(total, primary[2]):
                self.join(self._counters[primary[0], primary[2]].offset + value, values)
        elif kind == "epoch":
            self.join(self._step, values)

    def _own(self, metrics: Mapping[str, float], loss: str | None = None) -> dict[str, float]:
        """Return the metrics that still fit into the curve, excluding the metric that serves as its loss."""
        for name in metrics:
            if name in self._names or name in (loss, "loss", "val_loss"):
                continue
            if len(self._names) < MAX_NAMES:
                self._names[name] = None
            elif self.left_out is None:
                self.left_out = name
        return {name: value for name, value in metrics.items() if name != loss and name in self._names}

    def join(self, step: int | None, values: Mapping[str, float]) -> None:
        """Add values to the record of a step, or do nothing if `step` is None."""
        if step is None or not values:
            return
        row = self._rows.get(step)
        if row is None:
            if len(self._rows) == MAX_ROWS:
                oldest = next(iter(self._rows))
                if step < oldest:
                    return  # the earlier values of this step are no longer in memory
                del self._rows[oldest]
            row = {}
        # If several ranks print the same value, keep the value printed first.
        row = {**values, **row} if self._is_shared else {**row, **values}
        self._rows[step] = self.records[step] = row

    def _continue_epochs(self, reading: Reading) -> None:
        """Continue counting steps if the epoch is longer or shorter than the previous epoch."""
        if self._primary is None or self._primary[0] not in reading.positions:
            return
        kind, rank, length = self._primary
        counter, total = self._counters[kind, length], reading.positions[kind][1]
        if None in (total, length, self._epoch, counter.epoch) or total == length:
            return
        if (self._epoch or 0) > (counter.epoch or 0):
            counter.offset, counter.length = counter.offset + (length or 0), length
            counter.last, counter.epoch = -1, self._epoch
            self._counters[kind, total] = counter
            self._primary = kind, rank, total
            self._sources[self._primary] = _Source(is_curve=True)

    def _add_validation(self, reading: Reading, step: int | None) -> None:
        if step is not None and reading.val_loss is not None and reading.val_loss != self._val_loss:
            self._val_loss = reading.val_loss
            self.evaluations.append((step, reading.val_loss))
            self.join(step, {"val_loss": reading.val_loss})

    def _loss_of(self, reading: Reading) -> tuple[int, float, str] | None:
        """Return the priority, value and key of the training loss, or None if the line is ambiguous.

        The priority is 0 for ``loss`` alone, 1 for a word in `_PLAIN` next to ``loss``, and 2 for any other
        word. The key is a key of `Reading.losses`.
        """
        losses = reading.losses
        for rank, called in enumerate(("", "train")):
            if called in losses:
                return rank, losses[called], called
        if len(losses) > 1:
            self.ambiguous = tuple(reading.called.get(called, f"{called}_loss") for called in losses)
        called = next(iter(losses), "")
        return (2, losses[called], called) if len(losses) == 1 else None

    def _count(self, kind: str, value: int, total: int | None) -> int | None:
        """Return the step for a printed number, or None if a different rank printed an older step."""
        key, epoch = (kind, total), None if kind == "epoch" else self._epoch
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = _Counter(value, value, epoch)
            before, first = self._previous, self._first_epoch
            if before is not None and before.kind == kind and before.length is not None:
                counter.length = before.length
                counter.offset = 0 if epoch is None or first is None else (epoch - first) * before.length
            return counter.step
        epochs = 0 if epoch is None or counter.epoch is None else epoch - counter.epoch
        if epochs < 0 and self._is_shared:
            return None
        if value > counter.last:
            counter.interval, counter.has_grown = value - counter.last, True
        elif value < counter.last or (epochs > 0 and value == total):
            is_over = total is not None and counter.last + counter.interval >= total
            if epochs > 0 or (value <= counter.first and (is_over or not self._is_shared)):
                counter.length = total or counter.last + counter.interval - counter.first
                counter.offset += counter.length
            elif self._is_shared:
                return None
        counter.last, counter.epoch = value, epoch
        return counter.step

    def _add(self, key: _Key, counter: _Counter, values: dict[str, float]) -> None:
        source = self._sources.setdefault(key, _Source())
        step = counter.step
        if not source.is_curve:
            if source.records and step < source.records[-1][0]:
                source.records.clear()
            source.records.append((step, values))
            if step <= source.records[0][0]:
                del source.records[1:-1]
                return
            source.is_curve = True
        new = [(step, values)]
        if self._primary is None or _order(key) < _order(self._primary):
            new, self._primary, self._step = source.records or new, key, None
            for (kind, rank, total), other in self._sources.items():
                if (kind, rank) == (key[0], _WITHOUT_LOSS) and _is_one_count(total, key[2]):
                    for at, others in other.records:
                        self.join(at, others)
        source.records = []
        if key != self._primary:
            return
        for step, values in new:
            self._put(step, values, is_bar=key[0] == "progress bar")
        self._describe(key[0], counter, values, key[2])

    def _put(self, step: int, values: dict[str, float], *, is_bar: bool) -> None:
        self._repeated = self._repeated + 1 if step == self._step else 0
        if self._repeated and self._is_shared and not is_bar:
            return
        if self._repeated > 1 and is_bar:
            return  # `tqdm` also redraws its bar within a step, so this bar may show the next step's values
        if self._step is not None and step < self._step:
            # The script has resumed from a checkpoint, so discard later steps.
            self._rows = {other: row for other, row in self._rows.items() if other < step}
        self._step = step
        self.join(step, values)

    def _describe(self, kind: str, counter: _Counter, values: Mapping[str, float], total: int | None) -> None:
        known = (name for name in values if name not in self._names)
        names = (*known, *(("val_loss",) if self.evaluations else ()))
        if self.found is not None:
            names = tuple(dict.fromkeys((*self.found.names, *names)))
        in_epochs = counter.length is not None or self._epoch is not None
        if total is not None and in_epochs:
            total = None if self._num_epochs is None or counter.length is None else total * self._num_epochs
        self.found = Found(kind, names, total, counter.length, self._first_epoch, tuple(self._names))


def _order(key: _Key) -> tuple[bool, bool, int, int]:
    """Return the sort key of a possible source; the first source in sorted order provides the curve.

    Sources with a loss come first, then sources counted in steps rather than epochs, then sources whose loss
    is simply named `loss`.
    """
    kind, rank, _ = key
    return rank == _WITHOUT_LOSS, kind == "epoch", rank, KINDS.index(kind)


def _is_one_count(total: int | None, other: int | None) -> bool:
    """Return whether two totals are equal, where None matches any total."""
    return total == other or None in (total, other)


_ENDS = re.compile(rb"[\r\n]|\x08+")
"""Matches the end of a line as shown on a terminal. A progress bar moves the cursor to the beginning of the
line to overwrite it."""


def shown_lines(data: bytes) -> tuple[list[str], bytes]:
    """Return the lines of output as a terminal shows them, and the remaining incomplete line."""
    *lines, rest = _ENDS.split(data)
    return [line.decode("utf-8", errors="replace") for line in lines if line.strip()], rest
