"""Tests the task multimodal_lm: questions about images and curves, and rows that cannot be used."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hf_models import need, save_model
from tests.support.parity import Case, run_cases, saved_tensors, worst_difference
from tests.support.said import said
from trainkit.capabilities.multimodal.task import IGNORE, MediumFormat, MediumSamples, MultimodalLM
from trainkit.capabilities.task_check.worker import Smoke, unreadable_samples
from trainkit.cli.main import main
from trainkit.config import load_config
from trainkit.config.schema import RunConfig
from trainkit.errors import EXIT_FAILED, EXIT_USAGE, TrainkitError, UsageError
from trainkit.run.events import read_metrics
from trainkit.run.rundir import RunDir
from trainkit.trainer.user_task import UserTask, load_task

CURVE = MediumFormat("curve", 16, 4)
ANSWERS = ("up", "down")
ARGS = "medium: curve, size: 16, patch: 4, width: 32, queries: 3"


def write(file: Path, rows: list[Any]) -> Path:
    texts = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    lines = [text if isinstance(text, bytes) else text.encode() for text in texts]
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return file


def curves(file: Path, count: int) -> Path:
    rows = []
    for index in range(count):
        sign = 1 if index % 2 else -1
        curve = [sign * (t + math.sin(index)) for t in range(10 + index % 3)]
        question = "which way" + " now" * (index % 4)
        rows.append({"curve": curve, "question": question, "answer": ANSWERS[index % 2]})
    return write(file, rows)


def options(folder: Path, *, args: str = ARGS, steps: int = 4) -> tuple[str, ...]:
    files = f"train: {curves(folder / 'train.jsonl', 64)}, val: {curves(folder / 'val.jsonl', 16)}"
    return (
        *("task=multimodal_lm", f"task_args={{{files}, {args}}}", f"train.steps={steps}"),
        *("train.eval_every=2", "optimizer.lr=0.003", "data.seq_len=64", "model.num_layers=2"),
    )


@pytest.mark.slow
@pytest.mark.smoke
def test_shards_have_the_curve_of_one_process(tmp_path):
    common = options(tmp_path)
    cases = [Case("alone", 1, {}), Case("fsdp", 2, {"dp_shard": 2, "activation_checkpointing": "full"})]
    run_cases(tmp_path, cases, common)
    assert worst_difference(tmp_path / "fsdp", tmp_path / "alone") < 1e-5
    records = read_metrics(RunDir(tmp_path / "alone"))
    assert records[-1]["val_loss"] < records[1]["val_loss"]
    assert {"token_accuracy", "answer_accuracy", "val_answer_accuracy"} <= set(records[-1])


@pytest.mark.slow
def test_a_second_phase_starts_from_the_aligner_of_the_first(tmp_path):
    first = options(tmp_path, args=f"{ARGS}, frozen: ['lm.*']")
    run_cases(tmp_path, [Case("phase-1", 2, {"dp_shard": 2})], first)
    second = options(tmp_path, args=f"{ARGS}, frozen: ['encoder.*']", steps=2)
    start = (f"model.init_from={tmp_path / 'phase-1'}", "model.init_include=[encoder.*, aligner.*]")
    run_cases(tmp_path, [Case("phase-2", 1, {})], (*second, *start))
    before, after = (weights(tmp_path / name) for name in ("phase-1", "phase-2"))
    initial = UserTask(config_of(*first, "model.num_kv_heads=4"), None).build_model().state_dict()
    for name in before:
        part = name.partition(".")[0]
        # Phase 1 does not change the language model, and phase 2 does not change the encoder of phase 1.
        if part == "lm":
            assert torch.equal(before[name], initial[name])
        elif part == "encoder":
            assert torch.equal(after[name], before[name])
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(name.startswith("aligner.") for name in changed)
    assert any(name.startswith("lm.") for name in changed)
    assert any(not torch.equal(before[name], initial[name]) for name in before if "encoder." in name)


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, overrides=["model.preset=nano", *overrides], layers=False).config


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = saved_tensors(run).items()
    return {name.removeprefix("model."): value for name, value in found if name.startswith("model.")}


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_a_language_model_of_transformers(tmp_path):
    need("transformers")
    folder = save_model(tmp_path / "model")
    own = [item for item in options(tmp_path) if "num_layers" not in item]
    common = (*own, f"model.hf={folder}", "data.tokenizer=bytes")
    cases = [Case("alone", 1, {}), Case("fsdp", 2, {"dp_shard": 2})]
    run_cases(tmp_path, cases, common)
    assert worst_difference(tmp_path / "fsdp", tmp_path / "alone") < 1e-5


def test_the_smoke_test_has_no_problems(tmp_path):
    assert list(Smoke(config_of(*options(tmp_path))).problems()) == []


def test_only_answers_count(tmp_path):
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
    # Padding does not change the loss.
    alone = task.loss(task.build_model(), task.collate([samples[0]]))
    assert alone.count == len(answers[0])


def test_a_logit_sees_the_medium_and_the_tokens_before_it(tmp_path):
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


def test_the_patches_of_an_image(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    image.fromarray(pixels).save(tmp_path / "x.png")
    patches = MediumFormat("image", 8, 4).read_image(tmp_path / "x.png")
    assert patches.shape == (4, 48)
    expected = torch.from_numpy(pixels[4:, :4].astype(np.float32) / 127.5 - 1).flatten()
    assert torch.allclose(patches[2], expected)


def test_a_curve_is_sampled_at_equal_times():
    uneven = [[0.0, 0.0], [1.0, 2.0], [4.0, 8.0]]
    patches = CURVE.read_curve(uneven)
    assert patches.shape == (4, 36)
    values = patches.view(16, 9)[:, 0]
    assert torch.allclose(values, torch.linspace(0, 8, 16))
    assert torch.allclose(CURVE.read_curve([0.0, 8.0]).view(16, 9)[:, 0], values)


def test_a_row_without_its_image(tmp_path):
    row = {"image": "1.png", "question": "q", "answer": "x"}
    file = write(tmp_path / "train.jsonl", [row])
    with pytest.raises(UsageError, match=r"train\.jsonl:1: the image .*1\.png does not exist"):
        MediumSamples(file, MediumFormat("image", 8, 4), "bytes", 50)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("medium: curve, size: 10, patch: 4", "task_args.patch is 4, which is not a divisor"),
        ("medium: sound", "task_args.medium is sound"),
        ("medium: curve, size: 16, patch: 4, width: 30", "task_args.heads is 4, which is not a divisor"),
        ("medium: curve, size: 16, patch: 4, layers: 0", "task_args.layers is 0"),
        ("size: 0", "task_args.size is 0"),
        ("patch: '4'", "task_args.patch is 4"),
        ("queries: -1", "task_args.queries is -1"),
        ("medium: curve, size: 64, patch: 1", "data.seq_len is 64, but the curve alone takes 64 tokens"),
        ("mediun: curve", "task_args do not fit: got an unexpected keyword argument 'mediun'"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, args, message):
    with pytest.raises(TrainkitError) as caught:
        load_task(config_of(*options(tmp_path, args=args)))
    assert message in caught.value.message


def test_frozen_names_a_parameter(tmp_path):
    task = load_task(config_of(*options(tmp_path, args=f"{ARGS}, frozen: [llm.*]")))
    with pytest.raises(UsageError, match=r"'llm\.\*', which matches no parameter"):
        task.build_model()


def test_the_example_files(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    script = Path(__file__).parents[3] / "examples" / "make_questions.py"
    monkeypatch.setattr("sys.argv", [script.name, str(tmp_path / "data"), "--train", "3", "--val", "2"])
    runpy.run_path(str(script), run_name="__main__")
    image = MediumFormat("image", 32, 8)
    samples = MediumSamples(tmp_path / "data" / "images" / "train.jsonl", image, "bytes", 50)
    assert len(samples) == 3
    assert samples[0][0].shape == (16, 192)
    samples = MediumSamples(tmp_path / "data" / "curves" / "val.jsonl", CURVE, "bytes", 50)
    assert len(samples) == 2


GOOD = {"curve": [1, 2.5, 3], "question": "up?", "answer": "yes"}
BAD_CURVE = "the row's curve is not a list of at least two finite numbers or pairs of finite numbers"
BAD: list[tuple[Any, str]] = [
    ("{", "the line is not JSON in UTF-8: Expecting property name"),
    (
        b'{"answer": "\xff"}',
        "the line is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xff in position 12",
    ),
    ([1], "the line is not a JSON object"),
    ({"question": "a", "answer": "b"}, "the row has no key 'curve'"),
    ({**GOOD, "question": " "}, "the row's question is empty"),
    ({**GOOD, "answer": ""}, "the row's answer is empty"),
    ({**GOOD, "answer": None}, "the row's answer is empty"),
    ({**GOOD, "answer": "\ud800"}, "the row's answer contains an unpaired surrogate"),
    ({**GOOD, "curve": [1, float("nan")]}, BAD_CURVE),
    ({**GOOD, "curve": [1]}, BAD_CURVE),
    ({**GOOD, "curve": [[0, 1], [1]]}, BAD_CURVE),
    ({**GOOD, "curve": [[0, 1, 2], [1, 2, 3]]}, BAD_CURVE),
    ({**GOOD, "curve": "1, 2"}, BAD_CURVE),
    ({**GOOD, "question": "long " * 20}, "the row has 105 tokens, more than 60"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row(tmp_path, row, message):
    file = write(tmp_path / "rows.jsonl", [GOOD, "", row, {**GOOD, "curve": [[0, 1], [1, 2]], "answer": 3}])
    with pytest.raises(UsageError) as caught:
        MediumSamples(file, MediumFormat("curve", 16, 4), "bytes", 60)
    assert caught.value.message.startswith(f"{file}:3: {message}")
    assert "\n" not in caught.value.message
    assert '"answer": "…"' in caught.value.hint


def config(folder: Path, rows: list[Any], args: str = "medium: curve, size: 16, patch: 4") -> str:
    train = write(folder / "train.jsonl", rows)
    file = folder / "task.yaml"
    file.write_text(
        f"task: multimodal_lm\ndata: {{seq_len: 64, num_workers: 0}}\ntask_args: {{train: {train}, {args}}}\n"
    )
    return str(file)


@pytest.mark.slow
def test_the_rows_and_images_of_a_config(tmp_path, capsys):
    assert main(["data", "validate", config(tmp_path, [GOOD, *[row for row, _ in BAD] * 3])]) == EXIT_FAILED
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) == 21
    said(f"{lines[0]}\n{lines[13]}\n{lines[20]}")
    assert "1 problem\n" in shown.err
    image = pytest.importorskip("PIL.Image")
    image.effect_noise((64, 64), 50).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:999])
    question = {"question": "what?", "answer": "noise"}
    rows = [{"image": name, **question} for name in ("good.png", "cut.png", "good.png")]
    loaded = load_config(Path(config(tmp_path, rows, "medium: image")), layers=False)
    [found] = unreadable_samples(loaded.config)
    said(found.message.partition(" opened")[0])


def test_configs_without_files_to_check(tmp_path, capsys):
    path = config(tmp_path, [GOOD])
    assert main(["data", "validate", path, "stdlib"]) == EXIT_USAGE
    said(capsys.readouterr().err)
    Path(path).write_text("task: causal_lm\n")
    assert main(["data", "validate", path]) == EXIT_USAGE
    said(capsys.readouterr().err)


OWN = """
import torch
from torch import nn
from trainkit.task import Loss, Task

class Rows(list):
    def __getitem__(self, index):
        if index % 4 == 3:
            raise KeyError("column")
        return super().__getitem__(index)

class Mine(Task):
    def build_model(self): return nn.Linear(1, 1)
    def train_dataset(self): return Rows(range(100))
    def val_dataset(self): return [1, 2]
    def loss(self, model, batch): return Loss(model(batch).sum(), len(batch))
"""


@pytest.mark.slow
def test_the_samples_of_an_own_task(tmp_path, capsys):
    code = tmp_path / "mine.py"
    code.write_text(OWN)
    (tmp_path / "mine.yaml").write_text(f"task: {code}:Mine\n")
    assert main(["data", "validate", str(tmp_path / "mine.yaml")]) == EXIT_FAILED
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) == 21
    said(f"{lines[0]}\n{lines[20]}")
    assert "25 problems" in shown.err
