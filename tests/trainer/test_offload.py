"""Tests `parallel.offload` on one process: the same numbers, and checkpoints for runs without it."""

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.support import tasks
from tests.support.hf_models import need, save_model
from tests.support.parity import Case, close, curve, make_trainer, run_cases
from trainkit.run.events import read_metrics
from trainkit.run.rundir import AttemptDir, RunDir

pytestmark = pytest.mark.slow

ALONE: dict[str, object] = {}
OFFLOAD: dict[str, object] = {"offload": True}
COMMON = ("train.steps=4", "train.eval_every=2", "train.grad_clip=0.5", "optimizer.lr=0.003")
TASK = (f"task={Path(tasks.__file__)}:Classify", "task_args.frozen=true", "task_args.batch_norm=true")
LORA = "model.lora={r: 4, target_modules: [q_proj, v_proj]}"
# fp16, because a single process without offloading splits bf16 weights, which moves ties by one unit.
EIGHT_BIT = ("precision.dtype=fp16", "optimizer.name=adamw_8bit")


def train(rank: int, attempt: AttemptDir) -> None:
    """Train as one process, and check that `fully_shard` has wrapped the model if it is offloaded."""
    trainer = make_trainer(rank, attempt, keep_labels=True)
    [model] = trainer.built.model_parts
    assert isinstance(model, FSDPModule) == trainer.config.parallel.offload
    trainer.train()
    close(trainer)


def check(folder: Path, options: dict[str, tuple[str, ...]]) -> None:
    """Check that a run has the same curve with offloading, without it, and with a change in the middle."""
    cut = "train.stop_at_step=2"
    cases = [
        case
        for name, own in options.items()
        for case in (
            Case(name, 1, ALONE, own),
            Case(f"{name}-offload", 1, OFFLOAD, own),
            Case(f"{name}-from", 1, OFFLOAD, (*own, cut)),
            Case(f"{name}-from", 1, ALONE, own),
            Case(f"{name}-to", 1, ALONE, (*own, cut)),
            Case(f"{name}-to", 1, OFFLOAD, own),
        )
    ]
    run_cases(folder, cases, COMMON, function=train)
    for name in options:
        expected = curve(folder / name)
        losses = [record["loss"] for record in read_metrics(RunDir(folder / name))]
        assert losses[-1] < losses[0]
        for other in ("offload", "from", "to"):
            assert curve(folder / f"{name}-{other}") == expected, (name, other)


@pytest.mark.smoke
def test_the_decoder(tmp_path):
    check(tmp_path, {"fp32": ("model.dropout=0.1", "model.tie_embeddings=true"), "8bit": EIGHT_BIT})


def test_a_task(tmp_path):
    check(tmp_path, {"8bit": (*TASK, *EIGHT_BIT)})


@pytest.mark.xdist_group("transformers")
def test_models_of_transformers(tmp_path):
    need("transformers", "peft")
    folder = save_model(tmp_path / "model", tie_word_embeddings=True)
    own = (f"model.hf={folder}", "model.architecture=transformers", "data.tokenizer=bytes")
    check(tmp_path, {"lora-8bit": (*own, "model.preset=tiny", LORA, *EIGHT_BIT)})
