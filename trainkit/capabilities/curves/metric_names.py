"""Decides which numbers on a line of output are metrics, and derives metric names from the printed text.

Metric names are lower case, with words joined by ``_``. The characters ``/``, ``.``, ``-`` and ``@`` are kept
in names. Times, dates, memory sizes, versions, counts and step numbers are not considered metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile

MAX_NAME = 64
"""Maximum number of characters in a metric name. Longer text before a number is not considered a metric
name."""
MAX_WORDS = 3
"""Maximum number of words in a metric name. Longer text before a number is considered prose."""
OF_VALIDATION = frozenset({"val", "valid", "validation", "eval", "evaluation", "dev"})
"""Words that mark a metric as a validation metric."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


TELLING = _set(
    """
    acc accuracy ap auc auroc bleu bpb bpc cer dice elbo entropy f fid iou kl map mae miou mse nll perplexity
    ppl precision psnr recall return returns reward rewards rmse rouge score ssim wer
    """
)
"""Words that rarely occur outside training output, so that a line with one of them can start a curve."""
NO_LOSS = frozenset(
    {"stop", "packet", "frame", "weight", "scale", "scaler", "best", "min", "lowest", "no", "test", "fn"}
)
"""Words next to ``loss`` that indicate that a number is not the loss of a training step."""
_NEVER = _set(
    """
    time times timestamp ts eta elapsed remaining runtime duration date wall walltime memory mem ram vram
    version port pid seed best lowest highest packet frame stop py cpp cu cc
    """
)
"""Words that never occur in metric names."""
_SELDOM = _set(
    """
    day days hour hours minute minutes min sec secs second seconds ms us dt mib gib mb gb
    cpu cpus gpu gpus device devices node nodes host rank ranks worker workers thread threads
    torch python cuda epoch epochs step steps iter iters iteration iterations batch batches update updates
    sample samples example examples item items token tokens file files line lines page shard shards
    size sizes bsz wpb num number count counts total len length dim dims param params parameters id index idx
    last next previous every warmup skipped nan code exit consumed data attempt retry
    took saved loaded wrote read done found got using used try
    in on to for by with from after at of and or than about over under until within since this that the a an
    """
)
"""Words that usually appear with counts or in prose; a metric name contains one only together with a word
from `TELLING`."""
_PROSE = frozenset({"and", "then", "with", "the", "a", "an", "of", "for", "to", "in", "on", "at", "this"})
"""Words that never begin a metric name."""
_UNITS = frozenset({"", "%", "k", "m", "x", "db", "nat", "nats", "bit", "bits"})
"""Units that may follow a metric's number without a space. Units of time and memory are excluded, because
times and memory sizes are not metrics."""
_FACTORS = {"k": 1_000, "m": 1_000_000}
_OTHER = re.compile(
    r"[:/.-]\d|\|[^A-Za-z]|\s(?:[kmgt]i?b|ms|us|s|secs?|seconds?|mins?|minutes?|h|hours?|it/s|days?)\b(?!\s?[:=])",
    re.I,
)
"""Matches text that follows a number and shows that the number is not a metric.

The matched text shows that the number begins a date, a time of day or a version, is the percentage of a
progress bar, or has a unit.
"""
_OF_A_PART = OF_VALIDATION | {"test", "testing", "train", "training"}
_IN_A_ROW = re.compile(
    r"\s*(?:$|[|,;)\]}])|\s+[(|-]|\s+[A-Za-z][\w./@-]*(?:\s[A-Za-z][\w./@-]*)?\s?[:=]?\s?[-+]?(?:\.?\d|nan\b|inf\b)",
    re.I,
)
"""Matches the text after a number in a row of metrics without ``:`` or ``=``, such as ``loss 0.5 acc
0.91``."""
_FILLERS = frozenset({"is", "was", "of", "at", "now", "value", "idx", "index", "no", "tensor"})
_WORD = re.compile(r"[^\W\d_][\w./@-]*")
_PART = re.compile(r"[a-z]+")
_SENTENCE = re.compile(r"[.!?]\s+|[:=]")


@dataclass(frozen=True)
class Label:
    """The text that precedes a number in a line of output."""

    words: tuple[str, ...]
    """The words in the text, excluding trailing fillers such as ``is``."""
    parts: tuple[str, ...]
    """The letter sequences in the last three words of the text."""
    own: tuple[str, ...]
    """The letter sequences in the last word of the text."""
    name: str | None
    """The metric name derived from the text, or None if the text does not name a metric."""
    is_telling: bool
    """True if the metric name shows that the line is training output."""
    is_tensor: bool
    """True if the number is part of a printed tensor, such as ``tensor(0.5)``."""
    has_colon: bool
    """True if the text contains ``:``; if another ``:`` directly precedes the number, the line is probably
    code."""


@lru_cache(4096)
def read_label(text: str) -> Label:
    """Parse the lower-case text that precedes a number.

    Parsed labels are cached, because a training loop prints the same labels repeatedly.
    """
    words, own = _words(text), _words(_SENTENCE.split(text)[-1])
    own = list(dropwhile(_PROSE.__contains__, own))
    parts = [_PART.findall(word) for word in words[-3:]]
    of_name = [part for word in own for part in _PART.findall(word)]
    is_loss = not {"loss", "losses"}.isdisjoint(of_name) and NO_LOSS.isdisjoint(of_name)
    is_telling = is_loss or not TELLING.isdisjoint(of_name)
    is_metric = (
        1 <= len(own) <= MAX_WORDS
        and _NEVER.isdisjoint(of_name)
        and (is_telling or _SELDOM.isdisjoint(of_name))
        and not (
            of_name and _OF_A_PART.issuperset(of_name)
        )  # excludes progress counters such as "Train: 0 [50/1251]"
    )
    name = "_".join(own).strip("./-")
    return Label(
        words=tuple(words),
        parts=tuple(part for found in parts for part in found),
        own=tuple(parts[-1]) if parts else (),
        name=name if is_metric and len(name) <= MAX_NAME else None,
        is_telling=is_telling,
        is_tensor=text.endswith("tensor"),
        has_colon=":" in text,
    )


def _words(text: str) -> list[str]:
    words = _WORD.findall(text)
    while words and words[-1] in _FILLERS:
        words.pop()
    return words


def metric_of(label: Label, number: re.Match[str], *, is_assigned: bool) -> tuple[str, float] | None:
    """Return the metric name and value of a labelled number, or None if the number is not a metric.

    `is_assigned` is True if the label and the number are separated by ``:`` or ``=``. A number without ``:``
    or ``=`` is considered a metric only if it is followed by a separator, another metric or the end of the
    line.
    """
    name, unit, end = label.name, number["unit"].lower(), number.end()
    if name is None or unit not in _UNITS or _OTHER.match(number.string, end):
        return None
    is_short = len(label.words) == 1 or label.is_telling
    if not is_assigned and not (is_short and _IN_A_ROW.match(number.string, end)):
        return None
    value = _value(name, number, unit, is_telling=label.is_telling)
    return None if value is None else (name, value)


def _value(name: str, number: re.Match[str], unit: str, *, is_telling: bool) -> float | None:
    """Return the value of a printed number.

    An MFU is converted to a fraction, and ``9845/10000`` to 0.9845.
    """
    value = float(number["value"].replace(",", ""))
    if number["total"] is not None:
        total = float(number["total"])
        return value / total if is_telling and total else None
    if name == "mfu" and (unit == "%" or value > 1):
        return round(value / 100, 6)
    return value * _FACTORS.get(unit, 1)


def of_part(metrics: Mapping[str, float], part: str) -> dict[str, float]:
    """Return the metrics of a validation or test line, with names prefixed by ``val_`` or ``test_``."""
    return {name if is_of_part(name) else f"{part}_{name}": value for name, value in metrics.items()}


def is_of_part(name: str) -> bool:
    """Return whether a metric is a validation or test metric, judging by its name."""
    return not {*_PART.findall(name)}.isdisjoint(OF_VALIDATION | {"test"})
