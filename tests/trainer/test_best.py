"""Tests that the best checkpoint is the best of the existing ones."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import tasks
from tests.support.runs import log_text, train
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.errors import EXIT_NO_RESTART
from trainkit.plan.keep import KeepRule
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json
from trainkit.run.manifest import best_step
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.loop import Trainer
from trainkit.trainer.progress import Progress


class Saver:
    """Publishes the checkpoints that it gets, unless the disk is full."""

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
    trainer.config = SimpleNamespace(checkpoint=SimpleNamespace(best_metric="val_loss", best_mode="min"))
    trainer._keep = KeepRule()
    trainer.state = TrainingState()
    trainer.saver = Saver()
    trainer.progress = Progress()
    trainer.metrics = SimpleNamespace(exclude=lambda seconds: None, tensorboard=None)
    trainer.loss_scale = SimpleNamespace(enabled=False)
    trainer.manifest_record = {}
    trainer._hooks = SimpleNamespace(saved=dict)
    return trainer


def reach(trainer: Any, step: int, val_loss: float, blocking: bool) -> None:
    trainer.state.step = step
    trainer._update_best({"val_loss": val_loss})
    trainer._save("every_steps", blocking)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_best_one_that_could_not_be_saved_keeps_no_later_one_from_being_it(trainer, blocking):
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


def test_the_highest_value_of_a_metric_of_the_task(trainer):
    trainer.config.checkpoint = SimpleNamespace(best_metric="val_accuracy", best_mode="max")
    for step, accuracy in ((5, 0.2), (7, 0.6), (9, 0.5), (11, math.nan)):
        trainer.state.step = step
        trainer._update_best({"val_loss": 1.0 / step, "val_accuracy": accuracy})
        trainer._save("every_steps", blocking=True)
    assert trainer.saver.best == [5, 7]
    assert (trainer.state.best_value, trainer.state.best_step) == (0.6, 7)


def test_which_steps_are_saved(trainer):
    """The rule adds steps 1, 2, 4, 8 and 7; a save records the value of the metric only for its own step."""
    trainer.config.checkpoint = SimpleNamespace(
        best_metric="val_loss", best_mode="min", every_steps=6, every_minutes=None, async_save=False
    )
    trainer._keep, trainer.total_steps, saved = KeepRule(at=(7, 12), log_spaced=True), 12, []
    trainer.saver = SimpleNamespace(
        save=lambda request, blocking: saved.append(request),
        poll=lambda: None,
        finish=lambda: None,
        last_step=0,
    )
    for step in range(1, 13):
        trainer.state.step = step
        if step in (2, 3, 6):
            trainer._update_best({"val_loss": 9.0})
            trainer._is_best = False
        trainer._save_if_due(SimpleNamespace(loss=1.0, metrics={}, save=False))
    assert [(one.step, one.reason) for one in saved] == [
        *((1, "keep"), (2, "keep"), (4, "keep"), (6, "every_steps"), (7, "keep"), (8, "keep"))
    ]
    assert all(one.needs_space for one in saved)
    assert {one.step: one.record["metric"]["value"] for one in saved if "metric" in one.record} == {
        2: 9.0,
        6: 9.0,
    }


@pytest.mark.slow
def test_the_best_by_accuracy_is_linked_listed_and_kept_after_a_resume(tmp_path, capsys):
    run = tmp_path / "run"
    options = [
        *(f"task={tasks.__file__}:Classify", "optimizer.lr=0.05", "train.steps=12", "train.eval_every=2"),
        *("checkpoint.best_metric=val_accuracy", "checkpoint.best_mode=max", "checkpoint.keep_last=1"),
    ]
    train(run, [*options, "train.stop_at_step=8"], expect=75)
    attempt = train(run, options)
    found = {r["step"]: r["val_accuracy"] for r in read_metrics(RunDir(run)) if "val_accuracy" in r}
    assert len(found) > 4
    step = min((step for step in found if step), key=lambda step: (-found[step], step))
    assert best_step(RunDir(run).checkpoints_dir) == step
    assert f"best val_accuracy={found[step]:.4f} at step {step}" in log_text(attempt)
    assert main(["ckpt", "ls", str(run)]) == 0
    assert f"best val_accuracy={found[step]:.4f}" in capsys.readouterr().out
    attempt = train(run, [*options, "checkpoint.best_metric=val_loss"])
    said("\n".join(re.findall("checkpoint.best_metric .*", log_text(attempt))))


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["val_accurcy", "accurcy"])
def test_a_metric_that_never_comes_ends_the_run_at_once(tmp_path, metric):
    options = [f"task={tasks.__file__}:Classify", "train.eval_every=2", f"checkpoint.best_metric={metric}"]
    attempt = train(tmp_path / "run", options, expect=EXIT_NO_RESTART)
    assert metric in read_json(attempt.rank_error(0))["message"]
    assert "step=2" not in log_text(attempt)


@pytest.mark.parametrize("phase", ["evaluate", "record"])
def test_the_upload_of_the_best_one_is_waited_for_as_a_save(trainer, monkeypatch, phase):
    """The upload would soon count as a hang in another phase."""
    waited_in = []
    finish = trainer.saver.finish

    def finish_slowly() -> None:
        waited_in.append(trainer.progress.current.phase)
        finish()

    reach(trainer, 5, 2.3, blocking=False)
    monkeypatch.setattr(trainer.saver, "finish", finish_slowly)
    trainer.progress.enter(phase)
    trainer._update_best({"val_loss": 2.2})
    assert waited_in == ["save"]
    assert trainer.progress.current.phase == phase
    trainer._update_best({"val_loss": 2.1})
    assert waited_in == ["save"], "nothing to wait for"


@pytest.mark.parametrize("reason", ["asked", ""])
def test_the_last_upload_is_waited_for_as_a_save(trainer, monkeypatch, reason):
    waited_in: list[str] = []
    reach(trainer, 5, 2.3, blocking=False)
    monkeypatch.setattr(trainer.saver, "finish", lambda: waited_in.append(trainer.progress.current.phase))
    monkeypatch.setattr(trainer.saver, "last_step", 5)
    trainer.saver.require_saved = lambda step: None
    trainer.metrics.flush = lambda: None
    trainer.world = SimpleNamespace(is_main=False)
    trainer.state.has_updated_weights = True
    trainer._end(reason)
    assert waited_in == ["save"]
    assert trainer.progress.current.phase == "end"


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({"every_steps": 4}, 1, True),
        ({"every_steps": 4}, 4, True),
        ({"every_steps": 4}, 9, False),  # the next save is the one at the end
        ({"every_steps": 4, "async_save": False}, 1, False),
        ({"every_minutes": 5}, 9, True),
        ({"best_metric": "val_loss"}, 1, True),
        ({"best_metric": "loss"}, 1, False),  # the loss of a step counts only if the step is saved anyway
        ({}, 1, False),
    ],
)
def test_staging_buffers_are_made_only_for_saves_that_may_come(trainer, settings, step, expected):
    nothing = {"every_steps": None, "every_minutes": None, "best_metric": None, "async_save": True}
    trainer.config = SimpleNamespace(checkpoint=SimpleNamespace(**{**nothing, **settings}))
    trainer.state.step, trainer.total_steps, trainer.evaluator = step, 12, object()
    assert trainer._saves_in_background == expected
    trainer._keep = KeepRule(at=(11,))
    assert trainer._saves_in_background == settings.get("async_save", True)
    trainer._keep = KeepRule()
    if settings == {"best_metric": "val_loss"}:
        trainer.evaluator = None
        assert not trainer._saves_in_background
