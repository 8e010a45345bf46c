"""Chooses the metric for ranking a set of runs, and reads each run's result for that metric.

A run's result is the metric's best value or, for the training loss, its last value. A run that has diverged
has no result, because its model is unusable even if a good value was logged earlier.
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
    later_metrics,
    read_events,
    read_steps,
    steps_of,
)
from trainkit.run.files import Record, read_jsonl
from trainkit.run.rundir import RunDir
from trainkit.shipped import metrics_files

Mode = Literal["min", "max"]
"""Whether a metric's lowest or highest value is the best, as in ``checkpoint.best_mode``."""
NOT_METRICS = frozenset({"step", "time", "attempt", "tokens"})
"""Keys in metrics.jsonl that are not metrics but describe a step."""
LESS = "loss err error nll ppl perplexity wer cer mse rmse mae fid"
"""Words in a metric's name that mean that lower values are better. Words in `LESS` take precedence over
those in `MORE`."""
MORE = (
    "acc accuracy top f1 f1score auc auroc ap map precision recall bleu rouge rougel iou miou dice psnr ssim"
    " r2 exact_match mrr ndcg success_rate spearman pearson mcc reward return score mfu per_s"
)
"""Words in a metric's name that mean that higher values are better, as in ``val_top1`` and
``tokens_per_s``."""
NUM_READERS = 4
"""Number of threads for reading runs in parallel. On a network file system, reading one file takes about a
millisecond."""
MAX_MEASURED = 16_384
"""Maximum number of cached results of ended runs."""
MAX_NAMED = 20
"""Maximum number of runs whose metric names are listed in an error's hint."""
MAX_NAMES = 40
"""Maximum number of metric names to list in an error's hint."""


def mode_of(metric: str) -> Mode:
    """Return whether lower or higher values of a metric are better, judging by the words in its name."""
    spelled = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric), metric)
    names = " ".join(f"_{re.sub(r'[^a-z0-9]+', '_', name.lower())}_" for name in spelled)
    less, more = (
        re.search(rf"_(?:{parts.replace(' ', '|')})\d*_", names) is not None for parts in (LESS, MORE)
    )
    return "max" if more and not less else "min"


@dataclass(frozen=True)
class Ranking:
    """The metric for ranking runs, and whether lower or higher values are better."""

    metric: str
    mode: Mode = "min"

    @property
    def label(self) -> str:
        """Return the label for a result: ``best val_loss``, ``best accuracy (max)`` or ``last loss``."""
        which = "last" if self.metric == "loss" else "best"
        return f"{which} {self.metric}" + (" (max)" if self.mode == "max" else "")

    @property
    def heading(self) -> str:
        """Return the heading for a column of results: ``BEST VAL_LOSS`` or ``BEST ACCURACY (max)``."""
        which, _, name = self.label.partition(" ")
        return f"{which.upper()} {name.replace(self.metric, self.metric.upper(), 1)}"

    def order(self, result: float | None) -> tuple[bool, float]:
        """Return a sort key for a result. The best result comes first, and a missing result comes last."""
        if result is None:
            return True, 0.0
        return False, -result if self.mode == "max" else result


BEST_METRIC, BEST_MODE = "checkpoint.best_metric", "checkpoint.best_mode"
VAL_LOSS, LOSS = Ranking("val_loss"), Ranking("loss")


def config_ranking(configs: Iterable[Mapping[str, object]]) -> Ranking | None:
    """Return the ranking that ``checkpoint.best_metric`` and ``best_mode`` define in `configs` (dotted keys).

    Returns None if the configs differ or do not keep a best checkpoint. Configs that cannot be read are
    ignored.
    """
    own = map(Record, filter(None, configs))
    found = {(one.text(BEST_METRIC), one.text(BEST_MODE)) for one in own}
    metric, mode = found.pop() if len(found) == 1 else (None, None)
    return None if metric is None else Ranking(metric, "max" if mode == "max" else "min")


def candidates(asked: str | None, configured: Ranking | None) -> list[Ranking]:
    """Return the rankings to try in order; the first one for which any run has a result is used."""
    known = [*([] if configured is None else [configured]), VAL_LOSS, LOSS]
    if asked is None:
        return known
    own = [ranking for ranking in known if ranking.metric == asked]
    return own[:1] or [Ranking(asked, mode_of(asked))]


@dataclass(frozen=True)
class Measured:
    """A run's result for one metric."""

    result: Best | None = None
    """The best value or, for the loss, the last value; None if there is no value or the run has diverged."""
    diverged_since: int | None = None
    """The step at which the loss, the validation loss or the metric became NaN or infinite and stayed so;
    None if the run has not diverged."""
    is_logged: bool = False


def measure(run: RunDir, ranking: Ranking) -> Measured:
    """Read a run's result for a metric; raise OSError if a file cannot be read."""
    metric, since = ranking.metric, diverged_since(run)
    if metric in NOT_METRICS:
        return Measured(None, since)
    if metric == "loss":
        last = best_of(run, read_events(run, *BEGINNINGS))
        return Measured(None if since is not None else last, since, since is not None or last is not None)
    begins = first_steps(run, read_events(run, *BEGINNINGS))
    values = by_step(read_events(run, "evaluated"), metric, begins) if metric == "val_loss" else {}
    if not values:
        # Preselect lines by the metric's name only if JSON needs no escapes for the name, because other
        # programs may escape the name differently.
        words = [metric] if json.dumps(metric) == f'"{metric}"' else []
        values = by_step(steps_of(read_jsonl(run.metrics_file, words)), metric, begins)
        values = values or {**later_metrics(run).get(metric, {})}
    finite = [Best(metric, value, step) for step, value in values.items() if value is not None]
    # A metric without finite values is treated as not measured, but a loss without finite values is
    # considered diverged.
    is_logged = bool(finite) or (bool(values) and metric.endswith("loss"))
    if since is None and is_logged:
        for step, value in reversed(values.items()):
            if value is not None:
                break
            since = step
    best = min(finite, key=lambda one: ranking.order(one.value), default=None)
    return Measured(None if since is not None else best, since, is_logged)


def measure_ended(run: RunDir, ranking: Ranking) -> Measured:
    """Call `measure` for a run that has ended, and cache the result until the run's files change.

    The cache speeds up `watch`, which reads the results every few seconds.
    """
    files = (run.metrics_file, run.events_file, *metrics_files(run.path))
    found = [file.stat() if file.exists() else None for file in files]
    stamps = tuple((one.st_mtime_ns, one.st_size) if one is not None else None for one in found)
    return _measured(run.path, ranking, stamps)


@lru_cache(maxsize=MAX_MEASURED)
def _measured(folder: Path, ranking: Ranking, stamps: tuple[object, ...]) -> Measured:
    return measure(RunDir(folder), ranking)


def asked_metric(metric: str | None, sort: str | None, columns: Sequence[str]) -> str | None:
    """Return the metric that ``--metric`` requests, or else the metric that ``--sort`` names."""
    if None in (metric, sort) or metric == sort:
        return sort if metric is None else metric
    raise UsageError(
        f"--sort {sort} is not a column of runs that are ranked by {metric}",
        hint=f"choose {', '.join((*columns, str(metric)))}",
    )


def rank(
    runs: Sequence[RunDir], asked: str | None, configured: Ranking | None
) -> tuple[Ranking, list[Measured]]:
    """Return the first of the `candidates` for which any run has a result, and the results of all runs.

    The runs are read in parallel. Raises UsageError if no run has logged the requested metric, and OSError if
    a file cannot be read.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import, so imported only here

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
    """Raised if no run has logged the requested metric."""

    def __init__(self, metric: str, runs: Sequence[RunDir]) -> None:
        # Mask secrets and remove control characters, because other programs may have chosen these names.
        self.names = sorted(clean(mask_secrets(name)) for name in logged_names(runs[:MAX_NAMED]))
        logged = (
            f"the runs logged {_some(self.names)}" if self.names else "the runs have logged no metric yet"
        )
        super().__init__(f"no run has logged {metric}", hint=did_you_mean(metric, self.names) + logged)
        self.metric = metric

    def as_sort_key(self, columns: Iterable[str]) -> UsageError:
        """Return the error for a metric requested by ``--sort``. The error's hint also lists `columns`."""
        known = (*columns, *self.names)
        return UsageError(
            f"--sort {self.metric}: no column and no metric has this name",
            hint=f"{did_you_mean(self.metric, known)}valid names are {_some(known)}",
        )


def _some(names: Sequence[str]) -> str:
    """Return a list's first names as text for a hint, with the number of omitted names."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def logged_names(runs: Iterable[RunDir]) -> set[str]:
    """Return the names of all metrics that any of the runs has logged."""
    found = set[str]()
    for run in runs:
        for record in read_steps(run):
            found |= {
                name for name, value in record.values.items() if value is None or type(value) in (int, float)
            }
        if any("val_loss" in event.values for event in read_events(run, "evaluated")):
            found.add("val_loss")
        found |= later_metrics(run).keys()
    return found - NOT_METRICS
