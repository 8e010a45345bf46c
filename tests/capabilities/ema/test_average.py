"""Tests the average of the weights: its values, its way through checkpoints, and validation on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import Case, close, make_trainer, run_cases, run_chain, saved_tensors
from tests.support.runs import losses, make_attempt, train
from trainkit.config import read_effective
from trainkit.errors import EXIT_STOPPED
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.memory import checkpoint_bytes
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import work_of
from trainkit.run.events import read_metrics
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.state import StateTensors
from trainkit.trainer.split_master import SplitMaster

pytestmark = pytest.mark.slow(seconds=6)

PREFIX = "capability/ema/"
COMMON = ("data.num_workers=0", "checkpoint.async=false", "ema.decay=0.5")
VALIDATES = ("train.eval_every=1", "train.eval_batches=1")


@pytest.fixture
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return the trainer of one process, with the options of the test's parameter."""
    found = make_trainer(0, make_attempt(tmp_path / "run", [*COMMON, "train.steps=8", *request.param]))
    yield found
    close(found)


def masters(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the float32 weights."""
    tensors = StateTensors(trainer.built.weights, trainer.optimizer).tensors
    weights = {name: item for name, item in tensors.items() if name.startswith("model.")}
    return {
        name.removeprefix("model."): (item.join() if isinstance(item, SplitMaster) else item).clone()
        for name, item in weights.items()
    }


def averages(trainer: Any) -> dict[str, torch.Tensor]:
    found = trainer._hooks.state_tensors()
    return {name.removeprefix(PREFIX): tensor.clone() for name, tensor in found}


def averages_in(run: Path) -> dict[str, torch.Tensor]:
    """Return the averages in the newest checkpoint of a run, by the names of the weights."""
    tensors = saved_tensors(run).items()
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors if name.startswith(PREFIX)}


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the newest checkpoint of a run."""
    tensors = saved_tensors(run).items()
    return {name.removeprefix("model."): tensor for name, tensor in tensors if name.startswith("model.")}


def worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys() != set()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("trainer", "every"),
    [(["precision.dtype=fp32", "ema.every=2"], 2), (["precision.dtype=bf16"], 1)],
    indirect=["trainer"],
)
def test_every_update_is_the_formula(trainer: Any, every: int) -> None:
    """Step 4 has a gradient that is not finite, so it is skipped."""
    before = averages(trainer)
    assert worst(before, masters(trainer)) == 0.0
    weight = trainer.built.weights[0].param
    weight.register_hook(lambda grad: grad * (float("nan") if trainer.progress.current.step == 4 else 1.0))
    for step in range(1, 7):
        trainer.step()
        found, weights = averages(trainer), masters(trainer)
        if step == 4 or step % every:
            assert worst(found, before) == 0.0, step
        else:
            expected = {name: 0.5 * before[name].double() + 0.5 * weights[name].double() for name in weights}
            assert worst(found, expected) < 2**-23, step  # the distance of float32 numbers above 1
            assert worst(found, before) > 1e-6, step
        before = found


SPLITS = [
    Case("fsdp", 2, {"dp_shard": 2}),
    Case("replicas", 2, {"dp_replicate": 2}),
    Case("tensor", 2, {"tp": 2}),
    Case("pipeline", 2, {"pp": 2, "pp_schedule": "zbv"}, ("model.tie_embeddings=true",)),
    Case("offload", 2, {"dp_shard": 2, "offload": True}),
    Case("alone", 1, {}),
    Case("tied", 1, {}, ("model.tie_embeddings=true",)),
]


@pytest.mark.slow(seconds=25)
def test_every_layout_has_the_same_average(tmp_path: Path) -> None:
    run_cases(tmp_path, SPLITS, ["train.steps=3", "train.eval_every=3", *COMMON])
    for case in SPLITS[:-2]:
        alone = tmp_path / ("tied" if case.name == "pipeline" else "alone")
        assert worst(averages_in(tmp_path / case.name), averages_in(alone)) < 1e-6, case.name
        found, expected = (read_metrics(RunDir(path))[-1] for path in (tmp_path / case.name, alone))
        assert found["val_loss_ema"] == pytest.approx(expected["val_loss_ema"], abs=1e-5), case.name
        assert found["val_loss_ema"] != found["val_loss"]


@pytest.mark.slow(seconds=25)
def test_a_run_on_4_then_1_then_2_ranks(tmp_path: Path) -> None:
    links: list[tuple[int, dict[str, object]]] = [(4, {"dp_shard": 4}), (1, {}), (2, {"tp": 2})]
    run_chain(tmp_path, links, COMMON)
    assert worst(averages_in(tmp_path / "chain"), averages_in(tmp_path / "alone")) < 1e-6


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    options = ["train.steps=4", "ema.decay=0.9", "precision.dtype=bf16"]
    train(tmp_path / "whole", options)
    train(tmp_path / "cut", [*options, "train.stop_at_step=2"], expect=EXIT_STOPPED)
    train(tmp_path / "cut", options)
    assert worst(averages_in(tmp_path / "cut"), averages_in(tmp_path / "whole")) == 0.0


def test_the_section_can_be_added_and_removed(tmp_path: Path) -> None:
    without = train(tmp_path / "run", ["train.steps=6", "train.stop_at_step=2"], expect=EXIT_STOPPED)
    line = "the average of the weights starts with the weights of step 2 (ema.decay)"
    assert "average of the weights" not in without.rank_log(0).read_text()
    added = train(tmp_path / "run", ["train.steps=6", "train.stop_at_step=4", *COMMON], expect=EXIT_STOPPED)
    assert added.rank_log(0).read_text().count(line) == 1
    assert worst(averages_in(tmp_path / "run"), weights_in(tmp_path / "run")) < 1e-3
    removed = train(tmp_path / "run", ["train.steps=6"])
    assert "resumed from step-00000004" in removed.rank_log(0).read_text()
    assert averages_in(tmp_path / "run") == {}


@pytest.mark.parametrize(
    "option",
    ["precision.dtype=bf16", "precision.dtype=fp16", "parallel.dp_shard=2", "parallel.dp_replicate=2"],
)
def test_validation_on_the_average_is_exact_and_leaves_no_trace(tmp_path: Path, option: str) -> None:
    """A run that starts with the average has the same loss, and training has the same bits as without it."""
    num_procs = 2 if option.startswith("parallel") else 1
    common = ["train.steps=3", *COMMON, option, "precision.init_loss_scale=1"]
    train(tmp_path / "plain", common, num_procs)
    train(tmp_path / "run", [*common, *VALIDATES, "checkpoint.best_metric=val_loss_ema"], num_procs)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert worst(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "plain")) == 0.0
    start = [f"model.init_from={tmp_path / 'run'}", "model.init_weights=ema", "train.eval_at_start=true"]
    log = train(tmp_path / "next", [*common, *VALIDATES, *start, "train.steps=1"], num_procs).rank_log(0)
    record = read_metrics(RunDir(tmp_path / "run"))[-1]
    assert f"step=0/1 val_loss={record['val_loss_ema']:.4f}" in log.read_text()
    assert record["val_loss_ema"] > record["val_loss"]
    progress = published(RunDir(tmp_path / "run").checkpoints_dir)[-1].manifest().progress
    assert (progress["best_step"], progress["best_value"]) == (3, record["val_loss_ema"])


@pytest.mark.parametrize("trainer", [[*VALIDATES, "train.eval_at_start=false"]], indirect=True)
def test_a_stop_signal_during_validation_on_the_average(trainer: Any, tmp_path: Path) -> None:
    validate, calls = trainer.evaluator.run, []

    def run(*args: Any) -> Any:
        calls.append(masters(trainer))
        trainer.stop.signal_name = "SIGUSR2" if len(calls) == 2 else None
        return validate(*args)

    trainer.evaluator.run = run
    assert trainer.step() == EXIT_STOPPED
    assert worst(*calls) > 0, "the second validation uses the average"
    [checkpoint] = published(trainer.attempt.run.checkpoints_dir)
    assert checkpoint.step == 1
    assert worst(weights_in(tmp_path / "run"), calls[0]) == 0.0
    assert worst(averages_in(tmp_path / "run"), calls[1]) == 0.0


def test_the_plan_counts_the_bytes_of_the_average(tmp_path: Path) -> None:
    """The estimate of a checkpoint's size grows by the size of the averages that the checkpoint contains."""
    sizes = {}
    for name, options in (("without", []), ("run", ["ema.decay=0.9"])):
        attempt = train(tmp_path / name, ["train.steps=1", "data.source=stdlib", *options])
        config, plan = read_effective(attempt.config_file), LaunchPlan.read(attempt.plan_file)
        work = work_of(config, resolve_model_shape(config.model, 257), plan.layout, plan.batch, "cpu")
        sizes[name] = checkpoint_bytes(work)
    saved = sum(tensor.nbytes for tensor in averages_in(tmp_path / "run").values())
    assert sizes["run"] - sizes["without"] == saved > 0
