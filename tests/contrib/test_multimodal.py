"""The task multimodal_lm: questions about images and curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hf_models import need, save_model
from tests.support.parity import Case, run_cases, worst_difference
from trainkit.config.schema import RunConfig
from trainkit.contrib.multimodal.task import IGNORE, MediumFormat, MediumSamples, MultimodalLM
from trainkit.errors import TrainkitError, UsageError
from trainkit.run.events import read_metrics
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.task_check import Smoke
from trainkit.trainer.user_code import load_task
from trainkit.trainer.user_task import UserTask

CURVE = MediumFormat("curve", 16, 4)
ANSWERS = ("up", "down")
ARGS = "medium: curve, size: 16, patch: 4, width: 32, queries: 3"


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def curves(file: Path, count: int) -> Path:
    rows = []
    for index in range(count):
        sign = 1 if index % 2 else -1
        curve = [sign * (t + math.sin(index)) for t in range(10 + index % 3)]
        question = "which way" + " now" * (index % 4)
        rows.append({"curve": curve, "question": question, "answer": ANSWERS[index % 2]})
    return write_rows(file, rows)


def options(folder: Path, *, args: str = ARGS, steps: int = 4) -> tuple[str, ...]:
    files = f"train: {curves(folder / 'train.jsonl', 64)}, val: {curves(folder / 'val.jsonl', 16)}"
    return (
        *("task=multimodal_lm", f"task_args={{{files}, {args}}}", f"train.steps={steps}"),
        *("train.eval_every=2", "optimizer.lr=0.003", "data.seq_len=64", "model.num_layers=2"),
    )


@pytest.mark.slow
@pytest.mark.smoke
def test_every_layout_has_the_same_curve(tmp_path: Path) -> None:
    common = options(tmp_path)
    cases = [
        Case("alone", 1, {}),
        Case("ddp", 2, {"dp_replicate": 2}),
        Case("fsdp", 2, {"dp_shard": 2, "activation_checkpointing": "full"}),
        Case("hsdp", 4, {"dp_shard": 2, "dp_replicate": 2}),
    ]
    run_cases(tmp_path, cases, common)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in cases[1:]}
    assert max(found.values()) < 1e-5, found
    records = read_metrics(RunDir(tmp_path / "alone"))
    assert records[-1]["val_loss"] < records[1]["val_loss"]
    assert {"token_accuracy", "answer_accuracy", "val_answer_accuracy"} <= set(records[-1])


@pytest.mark.slow
def test_a_second_phase_starts_from_the_aligner_of_the_first(tmp_path: Path) -> None:
    first = options(tmp_path, args=f"{ARGS}, frozen: ['lm.*']")
    run_cases(tmp_path, [Case("phase-1", 2, {"dp_shard": 2})], first)
    second = options(tmp_path, args=f"{ARGS}, frozen: ['encoder.*']", steps=2)
    start = (
        f"model.init_from={tmp_path / 'phase-1'}",
        "model.init_include=[encoder.*, aligner.*]",
    )
    run_cases(tmp_path, [Case("phase-2", 1, {})], (*second, *start))
    before, after = (weights(tmp_path / name) for name in ("phase-1", "phase-2"))
    initial = UserTask(config_of(*first, "model.num_kv_heads=4"), None).build_model().state_dict()
    for name in before:
        part = name.partition(".")[0]
        # Phase 1 leaves the language model as it was, phase 2 the encoder as phase 1 made it.
        if part == "lm":
            assert torch.equal(before[name], initial[name])
        elif part == "encoder":
            assert torch.equal(after[name], before[name])
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(name.startswith("aligner.") for name in changed)
    assert any(name.startswith("lm.") for name in changed)
    assert any(not torch.equal(before[name], initial[name]) for name in before if "encoder." in name)


def config_of(*overrides: str) -> RunConfig:
    from trainkit.config import load_config

    return load_config(None, overrides=["model.preset=nano", *overrides], layers=False).config


def weights(run: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import state_dict_loader

    reader = SafeReader(published(RunDir(run).checkpoints_dir)[-1].path)
    saved = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(item.size)  # type: ignore[union-attr]
        for name, item in saved.items()
        if name.startswith("model.")
    }
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): value for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_a_language_model_of_transformers(tmp_path: Path) -> None:
    need("transformers")
    folder = save_model(tmp_path / "model")
    common = (
        *(item for item in options(tmp_path) if "num_layers" not in item),
        *(f"model.hf={folder}", "data.tokenizer=bytes"),
    )
    cases = [Case("alone", 1, {}), Case("fsdp", 2, {"dp_shard": 2})]
    run_cases(tmp_path, cases, common)
    assert worst_difference(tmp_path / "fsdp", tmp_path / "alone") < 1e-5


def test_the_smoke_test_has_no_problems(tmp_path: Path) -> None:
    assert list(Smoke(config_of(*options(tmp_path))).problems()) == []


def test_the_smoke_test_names_the_lines_of_bad_rows(tmp_path: Path) -> None:
    config = config_of(*options(tmp_path))
    write_rows(tmp_path / "val.jsonl", [{"curve": [1, 2], "question": "q"}])
    [found] = Smoke(config).problems()
    assert "val.jsonl:1: it has no key 'answer'" in found.message
    assert '"answer": "…"' in found.hint


def test_only_answers_count(tmp_path: Path) -> None:
    config = config_of(*options(tmp_path))
    task = load_task(config)
    assert isinstance(task, MultimodalLM)
    samples = task.train_dataset()
    batch = task.collate([samples[0], samples[3]])
    answers = [[*answer.encode(), 256] for answer in ("up", "down")]
    for labels, answer in zip(batch["labels"], answers, strict=True):
        assert labels[labels != IGNORE].tolist() == answer
    loss = task.loss(task.build_model(), batch)
    assert loss.count == sum(map(len, answers))
    # Padding changes nothing.
    alone = task.loss(task.build_model(), task.collate([samples[0]]))
    assert alone.count == len(answers[0])


def test_a_logit_sees_the_medium_and_the_tokens_before_it(tmp_path: Path) -> None:
    task = load_task(config_of(*options(tmp_path)))
    torch.manual_seed(0)
    model = task.build_model().eval()
    patches, tokens, _ = task.collate([task.train_dataset()[0]]).values()
    with torch.no_grad():
        logits = model(patches, tokens)
        changed = tokens.clone()
        changed[0, 5] += 1
        other = model(patches, changed)
        assert torch.allclose(logits[:, :6], other[:, :6], atol=1e-6)
        assert not torch.allclose(logits[:, 6:], other[:, 6:], atol=1e-6)
        assert not torch.allclose(logits[:, 0], model(patches + 1, tokens)[:, 0], atol=1e-6)


def test_the_patches_of_an_image(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    image.fromarray(pixels).save(tmp_path / "x.png")
    patches = MediumFormat("image", 8, 4).read_image(tmp_path / "x.png")
    assert patches.shape == (4, 48)
    expected = torch.from_numpy(pixels[4:, :4].astype(np.float32) / 127.5 - 1).flatten()
    assert torch.allclose(patches[2], expected)


def test_a_curve_is_sampled_at_equal_times() -> None:
    uneven = [[0.0, 0.0], [1.0, 2.0], [4.0, 8.0]]
    patches = CURVE.read_curve(uneven)
    assert patches.shape == (4, 36)
    values = patches.view(16, 9)[:, 0]
    assert torch.allclose(values, torch.linspace(0, 8, 16))
    assert torch.allclose(CURVE.read_curve([0.0, 8.0]).view(16, 9)[:, 0], values)


def test_a_row_without_its_image(tmp_path: Path) -> None:
    row = {"image": "1.png", "question": "q", "answer": "x"}
    file = write_rows(tmp_path / "train.jsonl", [row])
    with pytest.raises(UsageError, match=r"train\.jsonl:1: there is no image .*1\.png"):
        MediumSamples(file, MediumFormat("image", 8, 4), "bytes", 50)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("medium: curve, size: 10, patch: 4", "task_args.patch is 4, which does not divide"),
        ("medium: sound", "task_args.medium is sound"),
        ("medium: curve, size: 16, patch: 4, width: 30", "task_args.heads is 4, which does not divide"),
        ("medium: curve, size: 16, patch: 4, layers: 0", "task_args.layers is 0"),
        ("size: 0", "task_args.size is 0"),
        ("patch: '4'", "task_args.patch is 4"),
        ("queries: -1", "task_args.queries is -1"),
        ("medium: curve, size: 64, patch: 1", "data.seq_len is 64, of which the medium takes 64"),
        ("mediun: curve", "task_args do not fit: got an unexpected keyword argument 'mediun'"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path: Path, args: str, message: str) -> None:
    with pytest.raises(TrainkitError) as caught:
        load_task(config_of(*options(tmp_path, args=args)))
    assert message in caught.value.message


def test_frozen_names_a_parameter(tmp_path: Path) -> None:
    task = load_task(config_of(*options(tmp_path, args=f"{ARGS}, frozen: [llm.*]")))
    with pytest.raises(UsageError, match=r"'llm\.\*', which no parameter matches"):
        task.build_model()


def test_the_example_files(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    import runpy
    import sys

    script = Path(__file__).parents[2] / "examples" / "make_questions.py"
    before, sys.argv = sys.argv, ["make_questions.py", str(tmp_path / "data"), "--train", "3", "--val", "2"]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    image = MediumFormat("image", 32, 8)
    samples = MediumSamples(tmp_path / "data" / "images" / "train.jsonl", image, "bytes", 50)
    assert len(samples) == 3
    assert samples[0][0].shape == (16, 192)
    samples = MediumSamples(tmp_path / "data" / "curves" / "val.jsonl", CURVE, "bytes", 50)
    assert len(samples) == 2
