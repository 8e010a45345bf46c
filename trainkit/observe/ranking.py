"""Which metric ranks a set of runs, decided once from what they have, and the result of each by it.

A metric is ranked by its best value in the run, and the training loss by its last one. A run that has
diverged has no result: its model is lost, also if its best value was from before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainkit.errors import UsageError
from trainkit.formats import did_you_mean, mask_secrets
from trainkit.observe.logs import clean
from trainkit.run.end import Best
from trainkit.run.events import (
    BEGINNINGS,
    best_of,
    by_step,
    diverged_since,
    first_steps,
    read_events,
    read_steps,
    steps_of,
)
from trainkit.run.files import Record, read_jsonl
from trainkit.run.rundir import RunDir

Mode = Literal["min", "max"]
"""Whether the lowest or the highest value of a metric is the best, as in ``checkpoint.best_mode``."""
NOT_METRICS = frozenset({"step", "time", "attempt", "tokens"})
"""The keys of metrics.jsonl that say of which step a record is."""
LESS = "loss err error nll ppl perplexity wer cer mse rmse mae fid"
"""The parts of the name of a metric of which less is better, whatever else is in it."""
MORE = (
    "acc accuracy top f1 f1score auc auroc ap map precision recall bleu rouge rougel iou miou dice psnr ssim"
    " r2 exact_match mrr ndcg success_rate spearman pearson mcc reward return score mfu per_s"
)
"""The parts of the name of a metric of which more is better, as in ``val_top1`` and ``tokens_per_s``."""
NUM_READERS = 4
"""Threads that read runs in parallel: a network filesystem takes about a millisecond per file."""
MAX_MEASURED = 16_384
"""Results of ended runs that are kept."""
MAX_NAMED = 20
"""Runs that are searched for the names of their metrics, for the hint of an error."""
MAX_NAMES = 40
"""Names in a hint."""


def mode_of(metric: str) -> Mode:
    """Whether less or more of a metric is better, by the parts of its name."""
    spelled = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric), metric)
    names = " ".join(f"_{re.sub(r'[^a-z0-9]+', '_', name.lower())}_" for name in spelled)
    less, more = (
        re.search(rf"_(?:{parts.replace(' ', '|')})\d*_", names) is not None for parts in (LESS, MORE)
    )
    return "max" if more and not less else "min"


@dataclass(frozen=True)
class Ranking:
    """The metric by which runs are ranked, and whether less or more of it is better."""

    metric: str
    mode: Mode = "min"

    @property
    def label(self) -> str:
        """The result of a run, in words: ``best val_loss``, ``best accuracy (max)``, ``last loss``."""
        which = "last" if self.metric == "loss" else "best"
        return f"{which} {self.metric}" + (" (max)" if self.mode == "max" else "")

    @property
    def heading(self) -> str:
        """The heading of a column of results: ``BEST VAL_LOSS``, ``BEST ACCURACY (max)``."""
        which, _, name = self.label.partition(" ")
        return f"{which.upper()} {name.replace(self.metric, self.metric.upper(), 1)}"

    def order(self, result: float | None) -> tuple[bool, float]:
        """The key by which results are sorted: the best first, what is missing last."""
        if result is None:
            return True, 0.0
        return False, -result if self.mode == "max" else result


BEST_METRIC, BEST_MODE = "checkpoint.best_metric", "checkpoint.best_mode"
VAL_LOSS, LOSS = Ranking("val_loss"), Ranking("loss")


def config_ranking(configs: Iterable[Mapping[str, object]]) -> Ranking | None:
    """The ranking by ``checkpoint.best_metric`` and ``best_mode`` of configs with dotted keys.

    None if those that can be read differ, or keep no best checkpoint.
    """
    own = map(Record, filter(None, configs))
    found = {(one.text(BEST_METRIC), one.text(BEST_MODE)) for one in own}
    metric, mode = found.pop() if len(found) == 1 else (None, None)
    return None if metric is None else Ranking(metric, "max" if mode == "max" else "min")


def candidates(asked: str | None, configured: Ranking | None) -> list[Ranking]:
    """The rankings of which the first one counts that any run has a result of."""
    known = [*([] if configured is None else [configured]), VAL_LOSS, LOSS]
    if asked is None:
        return known
    own = [ranking for ranking in known if ranking.metric == asked]
    return own[:1] or [Ranking(asked, mode_of(asked))]


@dataclass(frozen=True)
class Measured:
    """What a run has of a metric."""

    result: Best | None = None
    """None too if it has diverged."""
    diverged_since: int | None = None
    """The step from which on its loss, its validation loss or the metric is NaN or infinite."""
    is_logged: bool = False


def measure(run: RunDir, ranking: Ranking) -> Measured:
    """Read what a run has of a metric. Raises OSError."""
    metric, since = ranking.metric, diverged_since(run)
    if metric in NOT_METRICS:
        return Measured(None, since)
    if metric == "loss":
        last = best_of(run, read_events(run, *BEGINNINGS))
        return Measured(None if since is not None else last, since, since is not None or last is not None)
    begins = first_steps(run, read_events(run, *BEGINNINGS))
    values = by_step(read_events(run, "evaluated"), metric, begins) if metric == "val_loss" else {}
    if not values:
        # Not by the line alone: another program may write a name with escapes.
        words = [metric] if json.dumps(metric) == f'"{metric}"' else []
        values = by_step(steps_of(read_jsonl(run.metrics_file, words)), metric, begins)
    finite = [Best(metric, value, step) for step, value in values.items() if value is not None]
    # A metric that was never a number was not measured; a loss that never was one has diverged.
    is_logged = bool(finite) or (bool(values) and metric.endswith("loss"))
    if since is None and is_logged:
        for step, value in reversed(values.items()):
            if value is not None:
                break
            since = step
    best = min(finite, key=lambda one: ranking.order(one.value), default=None)
    return Measured(None if since is not None else best, since, is_logged)


def measure_ended(run: RunDir, ranking: Ranking) -> Measured:
    """`measure` a run that has ended, again only if its files have changed, as `watch` looks each second."""
    files = (run.metrics_file, run.events_file)
    found = [file.stat() if file.exists() else None for file in files]
    stamps = tuple((one.st_mtime_ns, one.st_size) if one is not None else None for one in found)
    return _measured(run.path, ranking, stamps)


@lru_cache(maxsize=MAX_MEASURED)
def _measured(folder: Path, ranking: Ranking, stamps: tuple[object, ...]) -> Measured:
    return measure(RunDir(folder), ranking)


def asked_metric(metric: str | None, sort: str | None, columns: Sequence[str]) -> str | None:
    """The metric that ``--metric`` asks for, or ``--sort`` if it names none of the columns."""
    if None in (metric, sort) or metric == sort:
        return sort if metric is None else metric
    raise UsageError(
        f"--sort {sort} is not a column of runs that are ranked by {metric}",
        hint=f"it can be {', '.join((*columns, str(metric)))}",
    )


def rank(
    runs: Sequence[RunDir], asked: str | None, configured: Ranking | None
) -> tuple[Ranking, list[Measured]]:
    """The first of the `candidates` that any run has a result of, and what each has of it, read in parallel.

    Raises UsageError for a metric that was asked for and that no run has logged, and OSError.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to load

    found = list[Measured]()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for ranking in candidates(asked, configured):
            found = list(readers.map(lambda run, by=ranking: measure(run, by), runs))
            if any(one.result if asked is None else one.is_logged for one in found):
                return ranking, found
    if asked is not None:
        raise UnknownMetricError(asked, runs)
    return LOSS, found


class UnknownMetricError(UsageError):
    """No run has logged a metric that was asked for."""

    def __init__(self, metric: str, runs: Sequence[RunDir]) -> None:
        # Programs of others chose the names.
        self.names = sorted(clean(mask_secrets(name)) for name in logged_names(runs[:MAX_NAMED]))
        logged = f"they have logged {_some(self.names)}" if self.names else "they have logged nothing yet"
        super().__init__(f"no run has logged {metric}", hint=did_you_mean(metric, self.names) + logged)
        self.metric = metric

    def as_sort_key(self, columns: Iterable[str]) -> UsageError:
        """The error for ``--sort``, which takes these columns too."""
        known = (*columns, *self.names)
        return UsageError(
            f"--sort {self.metric}: no column and no metric has this name",
            hint=f"{did_you_mean(self.metric, known)}it can be {_some(known)}",
        )


def _some(names: Sequence[str]) -> str:
    """The first names of many, in a hint."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def logged_names(runs: Iterable[RunDir]) -> set[str]:
    """The metrics that runs have logged."""
    found = set[str]()
    for run in runs:
        for record in read_steps(run):
            found |= {
                name for name, value in record.values.items() if value is None or type(value) in (int, float)
            }
        if any("val_loss" in event.values for event in read_events(run, "evaluated")):
            found.add("val_loss")
    return found - NOT_METRICS
