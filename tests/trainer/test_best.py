"""Which checkpoint is the best: the best of those that are there."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.loop import Trainer


class Saver:
    """Publishes what it is given, unless the disk is full."""

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.best: list[int] = []
        self.disk_is_full = False
        self._pending: Any = None

    def save(self, request: Any, blocking: bool) -> None:
        self.finish()
        self._pending = request
        if blocking:
            self.finish()

    def finish(self) -> None:
        request, self._pending = self._pending, None
        if request is None or self.disk_is_full:
            return
        self.last_step = request.step
        if request.is_best:
            self.best.append(request.step)


@pytest.fixture
def trainer() -> Any:
    trainer: Any = object.__new__(Trainer)
    trainer.config = SimpleNamespace(checkpoint=SimpleNamespace(best_metric="val_loss"))
    trainer.state = TrainingState()
    trainer.saver = Saver()
    trainer.progress = SimpleNamespace(enter=lambda phase: None)
    trainer.metrics = SimpleNamespace(exclude=lambda seconds: None)
    trainer.loss_scale = SimpleNamespace(enabled=False)
    trainer.manifest_record = {}
    return trainer


def reach(trainer: Any, step: int, val_loss: float, blocking: bool) -> None:
    trainer.state.step = step
    trainer._update_best("val_loss", val_loss)
    trainer._save("every_steps", blocking)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_best_one_that_could_not_be_saved_keeps_no_later_one_from_being_it(
    trainer: Any, blocking: bool
) -> None:
    reach(trainer, 5, 2.3, blocking)
    trainer.saver.finish()
    trainer.saver.disk_is_full = True
    reach(trainer, 7, 2.1, blocking)
    trainer.saver.finish()
    trainer.saver.disk_is_full = False
    reach(trainer, 9, 2.2, blocking)
    trainer.saver.finish()
    assert trainer.saver.best == [5, 9]
    assert (trainer.state.best_value, trainer.state.best_step) == (2.2, 9)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_worse_one_is_not_the_best(trainer: Any, blocking: bool) -> None:
    reach(trainer, 5, 2.1, blocking)
    reach(trainer, 7, 2.2, blocking)
    trainer.saver.finish()
    assert trainer.saver.best == [5]
    assert (trainer.state.best_value, trainer.state.best_step) == (2.1, 5)
