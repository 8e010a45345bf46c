"""A task with bad samples, on which the loss is far higher than on all other samples, or not finite."""

from typing import Any

from tests.support.tasks import Classify, Points
from trainkit.config import RunConfig
from trainkit.task import Samples


class SpikyPoints(Points):
    def __init__(self, count: int, bad: range, value: float) -> None:
        super().__init__(count, 0)
        self.bad, self.value = bad, value

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return {**item, "x": item["x"] + 0 * self.value + (self.value if index in self.bad else 0)}


class Spiky(Classify):
    def __init__(
        self, config: RunConfig, *, bad: tuple[int, int], value: float = 100.0, samples: int = 1000
    ) -> None:
        super().__init__(config, samples=samples, dropout=0.1)
        self.bad, self.value = range(*bad), value

    def train_dataset(self) -> Samples:
        return SpikyPoints(self.samples, self.bad, self.value)
