"""Detects loss spikes from the loss that all ranks know, so that all ranks decide the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from trainkit.capabilities.spike.spike_plan import SPIKE, SpikePlan
from trainkit.capability import GoBack, NewEvent, TrainerHook
from trainkit.formats import JsonObject
from trainkit.run.files import Record
from trainkit.shipped import OVER


class SpikeRule(TrainerHook):
    """Requests a rollback if the loss stays high or non-finite for `train.spike.patience_steps` steps.

    A loss is high if it exceeds `train.spike.factor` times the median of the last `train.spike.window_steps`
    losses that were not high. Until there are this many losses, only a non-finite loss counts as high.
    """

    def __init__(self, part: SpikePlan) -> None:
        self._part = part
        self._window: list[float] = []
        """The last losses that were not high, oldest first."""
        self._since: int | None = None
        """The first step of the current spike; None if the last loss was not high."""
        self._step = 0

    def saved(self) -> JsonObject:
        return {"window": self._window, "since": self._since}

    def load(self, saved: Mapping[str, object]) -> None:
        found, window = Record(saved), saved.get("window")
        losses = window if isinstance(window, list) else []
        self._window = [float(loss) for loss in losses][-self._part.window_steps :]
        self._since = found.count("since")

    def after_step(self, step: int, *, has_updated: bool, loss: float) -> Iterable[NewEvent]:
        self._step, was_high = step, self._since is not None
        if not self._is_high(loss):
            self._window = [*self._window, loss][-self._part.window_steps :]
            self._since = None
            if was_high:
                yield f"{SPIKE}{OVER}", {"step": step}
        elif not was_high:
            self._since = step
            usual = median(self._window) if self._window else None
            yield SPIKE, {"step": step, "loss": loss if math.isfinite(loss) else None, "median": usual}

    def _is_high(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        is_full = len(self._window) == self._part.window_steps
        return is_full and loss > self._part.factor * median(self._window)

    def go_back(self) -> GoBack | None:
        since, part = self._since, self._part
        if since is None or self._step - since + 1 < part.patience_steps:
            return None
        high = f"above {part.factor:g} x its median, or not finite, from step {since} to {self._step}"
        return GoBack(since, f"the loss was {high}", part.max_rollbacks, "train.spike.max_rollbacks")
