"""Models of Hugging Face: training with transformers and with trainkit's decoder, adapters and export."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.support.hf_models import LLAMA3_ROPE, logits_of, save_model
from tests.support.parity import Case, close, make_trainer, run_cases, worst_difference
from tests.support.runs import make_attempt
from trainkit.cli.main import main
from trainkit.manifest import published
from trainkit.rundir import AttemptDir, RunDir, read_json, read_metrics, write_json
from trainkit.safetensors import StoredWeights
from trainkit.trainer.checkpoint.storage import SafeReader

for _module in ("transformers", "peft"):
    if not os.environ.get("CI"):
        pytest.importorskip(_module)
    __import__(_module)

pytestmark = pytest.mark.slow

COMMON = (
    "train.steps=4",
    "train.eval_every=2",
    "train.grad_clip=0.5",
    "optimizer.lr=0.003",
    "data.tokenizer=bytes",
)
LORA = "model.lora={r: 4, target_modules: [q_proj, v_proj]}"


def of(folder: Path, architecture: str = "transformers") -> tuple[str, ...]:
    return (f"model.hf={folder}", f"model.architecture={architecture}")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {"rope_parameters": LLAMA3_ROPE}), ("qwen2", {"tie_word_embeddings": True})],
)
def test_every_layout_of_both_implementations_has_the_same_curve(
    tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    folder = save_model(tmp_path / "model", kind, **changes)
    theirs, ours = of(folder), of(folder, "llama")
    cases = [
        Case("alone", 1, {}, theirs),
        Case("ddp", 2, {"dp_replicate": 2}, theirs),
        Case("fsdp", 2, {"dp_shard": 2, "activation_checkpointing": "full"}, theirs),
        Case("hsdp", 4, {"dp_shard": 2, "dp_replicate": 2}, theirs),
        Case("ours", 1, {}, ours),
        Case("ours-fsdp-cp", 4, {"dp_shard": 2, "cp": 2}, ours),
        Case("ours-tp-pp", 4, {"tp": 2, "pp": 2}, ours),
    ]
    run_cases(tmp_path, cases, COMMON, keep_labels=True)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in cases[1:]}
    assert max(found.values()) < 1e-5, found
    losses = [record["loss"] for record in read_metrics(RunDir(tmp_path / "alone"))]
    assert losses[-1] < losses[0]


def test_a_rank_reads_its_own_shard(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    cases = [
        Case("theirs", 4, {"dp_shard": 4}, of(folder)),
        Case("ours", 4, {"dp_shard": 4}, of(folder, "llama")),
    ]
    run_cases(tmp_path, cases, COMMON, function=train_counted)
    for case in cases:
        for rank in range(4):
            num_bytes = read_json(tmp_path / case.name / f"read-{rank}.json")["bytes"]
            assert num_bytes <= 1.2 * size / 4, (case.name, rank, num_bytes, size)


def train_counted(rank: int, attempt: AttemptDir) -> None:
    """Build the trainer of a rank, and count the bytes of files that this reads below the model's folder."""
    counted = {"bytes": 0}
    read = StoredWeights.read

    def counting(self: StoredWeights, name: str, index: object = ()) -> torch.Tensor:
        before = _bytes_read()
        value = read(self, name, index)  # type: ignore[arg-type]
        counted["bytes"] += _bytes_read() - before
        return value

    StoredWeights.read = counting  # type: ignore[method-assign]
    try:
        close(make_trainer(rank, attempt, keep_labels=True))
    finally:
        StoredWeights.read = read  # type: ignore[method-assign]
    write_json(attempt.run.path / f"read-{rank}.json", counted)


def _bytes_read() -> int:
    """Bytes that this process has read from files, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_adapters_alone_are_saved_and_resumed_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model")
    lora = (*of(folder), LORA, "train.steps=6")
    cases = [
        Case("whole", 1, {}, lora),
        Case("ddp", 2, {"dp_replicate": 2}, lora),
        Case("fsdp", 2, {"dp_shard": 2}, lora),
        Case("parts", 2, {"dp_shard": 2}, (*lora, "train.stop_at_step=3")),
    ]
    run_cases(tmp_path, cases, COMMON)
    run_cases(tmp_path, [Case("parts", 2, {"dp_shard": 2}, lora)], COMMON)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "whole") for case in cases[1:]}
    assert max(found.values()) < 1e-5, found
    assert worst_difference(tmp_path / "parts", tmp_path / "fsdp") == 0.0
    [checkpoint] = published(RunDir(tmp_path / "fsdp").checkpoints_dir)[-1:]
    saved = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
    weights = [name for name in saved if name.startswith("model.")]
    assert len(weights) == 8 * 2 * 2
    assert all(".lora_" in name for name in saved)
    num_bytes = sum(file.stat().st_size for file in checkpoint.path.iterdir())
    assert num_bytes < (folder / "model.safetensors").stat().st_size / 2  # mostly the overhead of the format

    tokens = torch.arange(24).view(1, -1) * 7 % 257
    run = tmp_path / "fsdp"
    assert main(["ckpt", "export", str(run), "--out", str(tmp_path / "adapters")]) == 0
    assert main(["ckpt", "export", str(run), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    capsys.readouterr()
    assert {item.name for item in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    with torch.no_grad():
        expected = adapted(input_ids=tokens).logits
    merged = logits_of(tmp_path / "merged", tokens)
    assert (merged - expected).abs().max() < 1e-5
    assert (merged - logits_of(folder, tokens)).abs().max() > 1e-4


@pytest.mark.parametrize("architecture", ["llama", "transformers"])
def test_an_export_has_the_logits_of_the_run(
    tmp_path: Path, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    options = (*COMMON, "train.eval_every=null", "checkpoint.best_metric=null", *of(folder, architecture))
    run_cases(tmp_path, [Case("run", 2, {"dp_shard": 2})], options, keep_labels=True)
    out = tmp_path / "exported"
    assert main(["ckpt", "export", str(tmp_path / "run"), "--out", str(out), "--json"]) == 0
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["files"]
    tokens = torch.arange(48).view(2, -1) * 5 % 257
    assert (logits_of(out, tokens) - logits_of(folder, tokens)).abs().max() > 1e-3  # it was trained

    # The trained weights, trained on for no step by the other implementation.
    other = "transformers" if architecture == "llama" else "llama"
    expected = trained_logits(tmp_path / "run", tokens, options)
    assert (logits_of(out, tokens) - expected).abs().max() < 1e-5
    again = (*options[:-2], *of(out, other), "train.steps=1")
    run_cases(tmp_path, [Case("other", 1, {}, again)], (), keep_labels=True)
    first = trained_logits(tmp_path / "other", tokens, again, initial=True)
    assert (first - expected).abs().max() < 1e-5


def trained_logits(
    run: Path, tokens: torch.Tensor, options: tuple[str, ...], initial: bool = False
) -> torch.Tensor:
    """The logits of a run's newest checkpoint, or of its initial weights, in trainkit on one process."""
    from trainkit.trainer.models.decoder import Decoder

    folder = run if not initial else run.with_name(f"{run.name}-initial")
    attempt = make_attempt(
        folder, ["data.seq_len=32", *[item for item in options if "steps" not in item], "train.steps=4"], 1
    )
    trainer = make_trainer(0, attempt, keep_labels=True)
    [part] = trainer.model_parts
    part.eval()
    with torch.no_grad():
        if isinstance(part, Decoder):
            keys = torch.zeros(len(tokens), dtype=torch.int32)
            padded = torch.nn.functional.pad(tokens, (0, 32 - tokens.shape[1]))
            logits: torch.Tensor = part(padded, keys)[:, : tokens.shape[1]]
        else:
            logits = part.model(input_ids=tokens).logits
    close(trainer)
    return logits


def test_the_decoder_of_the_quickstart_exports_with_its_tokenizer(tmp_path: Path) -> None:
    run_cases(tmp_path, [Case("run", 1, {})], ("train.steps=2", "train.eval_every=null"), keep_labels=True)
    out = tmp_path / "exported"
    assert main(["ckpt", "export", str(tmp_path / "run"), "--out", str(out)]) == 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "Grüße, 世界!\n\x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256
    assert logits_of(out, torch.arange(8).view(1, -1)).shape[-1] == 320
