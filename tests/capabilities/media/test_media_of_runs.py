"""Tests the media that a task and a loop log in real runs with two ranks and two attempts."""

import os
import shutil

import pytest

from tests.support.ranks import start_script, wait_for_all
from tests.support.runs import TIMEOUT_S, train
from tests.support.tasks import Classify
from trainkit.capabilities.media.items import read_image, read_items
from trainkit.run.events import read_metrics
from trainkit.run.files import read_jsonl
from trainkit.run.rundir import RunDir

pytestmark = pytest.mark.slow

LOOP = """
import torch
from trainkit.loop import attach

run = attach("run")
run.log_text("before", "the first step")
layer = torch.nn.Linear(4, 1)
run.track(layer=layer)
for step in run.steps(6, save_every=2, log_every=1):
    run.log(loss=1 / step, accuracy=step / 6)
    run.log_image("noise", torch.rand(3, 4, 4))
    run.log_histogram("weight", layer.weight, step=10 * step)
"""


class Pictures(Classify):
    """A task whose loss logs its inputs."""

    def loss(self, model, batch):
        self.log_image("inputs", batch["x"].sigmoid(), caption=f"training {model.training}")
        self.log_histogram("inputs/values", batch["x"])
        self.log_text("labels", str(batch["y"].tolist()))
        return super().loss(model, batch)


def board(run: RunDir):
    """Return the media of a run that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(
        str(run.tensorboard_dir), size_guidance=dict.fromkeys(("tensors", "images", "histograms"), 0)
    )
    found.Reload()
    return found


def test_a_task_logs_in_training_and_validation_and_a_resume_replaces_it(tmp_path):
    overrides = [
        *(f"task={__file__}:Pictures", "train.steps=4", "train.eval_every=2", "train.log_every=1"),
        *("checkpoint.every_steps=2", "checkpoint.async=false", "checkpoint.best_metric=null"),
        *("train.eval_at_start=false", "logging.tensorboard=true"),
    ]
    run = RunDir(tmp_path / "run")
    train(run.path, [*overrides, "train.stop_at_step=3"], 2, expect=75)
    first = read_items(run)
    assert {item.step for item in first if item.name == "inputs"} == {1, 2, 3}
    shutil.rmtree(run.checkpoint_dir(3))
    train(run.path, overrides, 2)
    items = read_items(run)
    names = ("inputs", "inputs/values", "labels")
    labels = [(item.step, item.attempt) for item in items if item.name == "labels"]
    assert labels == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert {item.name for item in items} == {*names, *(f"val_{name}" for name in names)}
    assert {item.step for item in items if item.name.startswith("val_")} == {2, 4}
    # The texts are equal after the resume, because the samples are the same.
    before, after = (
        {item.step: item.text("text") for item in own if item.name == "labels"} for own in (first, items)
    )
    assert before[3] == after[3]
    images = [item for item in items if item.kind == "image"]
    assert all(read_image(run, item) for item in images)
    assert {item.text("caption") for item in images} == {"training True", "training False"}
    shown = board(run)
    assert [event.step for event in shown.Images("inputs")] == [1, 2, 3, 4]
    assert [event.step for event in shown.Histograms("val_inputs/values")] == [2, 4]
    assert "labels/text_summary" in shown.Tags()["tensors"]
    last = read_metrics(run)[-1]
    for name in ("accuracy", "val_accuracy", "val_loss"):
        assert shown.Scalars(name)[-1].value == pytest.approx(last[name])


def test_a_loop_logs_numbers_and_images_under_one_name(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    script = start_script(tmp_path, ["loop.py"], tmp_path / "log", os.environ)
    assert wait_for_all([script], TIMEOUT_S) == [0], (tmp_path / "log").read_text()
    run = RunDir(tmp_path / "run")
    items = read_items(run)
    assert [(item.step, item.name) for item in items if item.kind == "text"] == [(0, "before")]
    assert [item.step for item in items if item.name == "noise"] == [*range(1, 7)]
    assert [item.step for item in items if item.name == "weight"] == [*range(10, 70, 10)]
    shown, records = board(run), read_metrics(run)
    assert [event.value for event in shown.Scalars("accuracy")] == pytest.approx(
        [r["accuracy"] for r in records]
    )
    assert [event.step for event in shown.Images("noise")] == [*range(1, 7)]
    assert len(list(read_jsonl(run.metrics_file))) == 6
