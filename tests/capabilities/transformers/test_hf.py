"""Tests models of Hugging Face: training with transformers and with trainkit's decoder, adapters, export."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.hf_models import LLAMA3_ROPE, export_run, logits_of, need, save_model
from tests.support.json_outputs import checked
from tests.support.parity import Case, close, make_trainer, run_cases, saved_tensors, worst_difference
from tests.support.runs import make_attempt
from trainkit.capabilities.export.worker import ExportRequest, decoder_settings, export
from trainkit.capabilities.transformers.task import create_model, read_whole
from trainkit.cli.main import main
from trainkit.config import RunConfig, load_config
from trainkit.config.hf_model import find_hf_model
from trainkit.errors import FatalError, TrainkitError
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json, write_json
from trainkit.run.manifest import published
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.safetensors import StoredWeights
from trainkit.trainer.models.decoder import Decoder, rope_table
from trainkit.trainer.task_check import definite_problem
from trainkit.trainer.user_task import UserTask

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]


@pytest.fixture(autouse=True)
def libraries() -> None:
    need("transformers", "peft")


COMMON = (
    *("train.steps=4", "train.eval_every=2", "train.grad_clip=0.5", "optimizer.lr=0.003"),
    "data.tokenizer=bytes",
)
UNEVALUATED = (*COMMON, "train.steps=2", "train.eval_every=null", "checkpoint.best_metric=null")
LORA = "model.lora={r: 4, target_modules: [q_proj, v_proj]}"


def of(folder: Path, architecture: str = "transformers") -> tuple[str, ...]:
    return (f"model.hf={folder}", f"model.architecture={architecture}", "model.preset=tiny")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_every_layout_of_both_implementations_has_the_same_curve(
    tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    folder = save_model(tmp_path / "model", kind, **changes)
    theirs, ours = of(folder), of(folder, "llama")
    cases = [
        Case("alone", 1, {}, theirs),
        Case("ours", 1, {}, ours),
        Case("ours-tp", 2, {"tp": 2}, ours),
    ]
    if kind == "qwen3":
        whole_stream = {"tp": 2, "sequence_parallel": False, "activation_checkpointing": "selective"}
        cases += [Case("ours-whole-stream", 2, whole_stream, ours)]
    else:
        cases += [
            Case("fsdp", 2, {"dp_shard": 2, "activation_checkpointing": "full"}, theirs),
            Case("ours-pp", 2, {"pp": 2}, ours),
        ]
    if kind == "llama":
        cases += [
            Case("ddp", 2, {"dp_replicate": 2, "activation_checkpointing": "pointwise"}, theirs),
            Case("ours-cp", 2, {"cp": 2}, ours),
        ]
    run_cases(tmp_path, cases, (*COMMON, "train.steps=2"), keep_labels=True)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in cases[1:]}
    assert max(found.values()) < 1e-5, found
    losses = [record["loss"] for record in read_metrics(RunDir(tmp_path / "alone"))]
    assert losses[-1] < losses[0]


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    LLAMA3_ROPE,
    YARN,
    {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5},
]


def test_rotary_embeddings_are_scaled_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for number, rope in enumerate(ROPES):
        folder = save_model(tmp_path / str(number), rope_parameters=rope)
        config = load_config(
            None, overrides=[f"model.hf={folder}", "data.tokenizer=bytes"], layers=False
        ).config
        assert config.model.architecture == "llama"
        shape = resolve_model_shape(config.model, 320)
        found = rope_table(torch.arange(128), shape.head_dim, shape.rope_theta, shape.rope_scaling)
        theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
        for mine, whole in zip(found, theirs(torch.zeros(1), torch.arange(128)[None]), strict=True):
            torch.testing.assert_close(mine, whole[0, :, : shape.head_dim // 2], rtol=1e-5, atol=1e-5)
        scratch = config.model.model_copy(update={"hf": None})
        settings = decoder_settings(shape, config.model_copy(update={"model": scratch}), torch.float32)
        write_json(folder / "config.json", settings)
        again = scratch.model_copy(update=find_hf_model(str(folder), tmp_path).values)
        assert resolve_model_shape(again, 320).rope_scaling == shape.rope_scaling


def test_a_rank_reads_its_own_shard(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    names = {"theirs": "transformers", "ours": "llama"}
    cases = [Case(name, 2, {"dp_shard": 2}, of(folder, names[name])) for name in names]
    run_cases(tmp_path, cases, COMMON, function=build_counted)
    for name, rank in product(names, range(2)):
        num_bytes = read_json(tmp_path / name / f"read-{rank}.json")
        assert num_bytes <= 1.2 * size / 2, (name, rank, num_bytes, size)


def build_counted(rank: int, attempt: AttemptDir) -> None:
    """Build the trainer of a rank, and count the bytes that it reads from files below the model's folder."""
    num_bytes, read = 0, StoredWeights.read

    def counting(self: StoredWeights, name: str, index: object = ()) -> torch.Tensor:
        nonlocal num_bytes
        before = _bytes_read()
        value = read(self, name, index)  # type: ignore[arg-type]
        num_bytes += _bytes_read() - before
        return value

    with patch.object(StoredWeights, "read", counting):
        close(make_trainer(rank, attempt, keep_labels=True))
    write_json(attempt.run.path / f"read-{rank}.json", num_bytes)


def _bytes_read() -> int:
    """Return the number of bytes that this process has read from files, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_adapters_alone_are_saved_and_resumed_exactly(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    lora = (*of(folder), LORA)
    cases = [
        Case("whole", 1, {}, lora),
        Case("fsdp", 2, {"dp_shard": 2}, lora),
        Case("parts", 2, {"dp_shard": 2}, (*lora, "train.stop_at_step=2")),
    ]
    run_cases(tmp_path, cases, COMMON)
    run_cases(tmp_path, [Case("parts", 2, {"dp_shard": 2}, lora)], COMMON)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "whole") for case in cases[1:]}
    assert max(found.values()) < 1e-5, found
    assert worst_difference(tmp_path / "parts", tmp_path / "fsdp") == 0.0
    [checkpoint] = published(RunDir(tmp_path / "fsdp").checkpoints_dir)[-1:]
    saved = saved_tensors(tmp_path / "fsdp")
    weights = [name for name in saved if name.startswith("model.")]
    assert len(weights) == 4 * 2 * 2
    assert all(".lora_" in name for name in saved)
    num_bytes = sum(file.stat().st_size for file in checkpoint.path.iterdir())
    # most of the rest is overhead of the format
    assert num_bytes < (folder / "model.safetensors").stat().st_size / 2


@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [("llama", "qwen3", {"head_dim": 32}), ("transformers", "qwen2", {"tie_word_embeddings": True})],
    ids=["llama", "transformers"],
)
def test_an_export_has_the_logits_of_the_run(
    tmp_path: Path,
    architecture: str,
    kind: str,
    changes: dict[str, object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_model(tmp_path / "model", kind, **changes)
    options = (*UNEVALUATED, *of(folder, architecture))
    run_cases(tmp_path, [Case("run", 2, {"dp_shard": 2})], options, keep_labels=True)
    out = tmp_path / "exported"
    if architecture == "llama":
        export_run(tmp_path / "run", out)
    else:
        assert main(["ckpt", "export", str(tmp_path / "run"), "--out", str(out), "--json"]) == 0
        assert "model.safetensors" in checked("ckpt-export", capsys.readouterr().out)["files"]
    tokens = torch.arange(48).view(2, -1) * 5 % 257
    assert (logits_of(out, tokens) - logits_of(folder, tokens)).abs().max() > 1e-3  # the weights were trained
    assert (logits_of(out, tokens) - trained_logits(tmp_path / "run", tokens, options)).abs().max() < 1e-5


def trained_logits(run: Path, tokens: torch.Tensor, options: tuple[str, ...]) -> torch.Tensor:
    """Return the logits of a run's newest checkpoint, computed by one process."""
    attempt = make_attempt(run, ["data.seq_len=32", *options, "train.steps=4"], 1)
    trainer = make_trainer(0, attempt, keep_labels=True)
    [part] = trainer.built.model_parts
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
    export_run(tmp_path / "run", out)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "Grüße, 世界!\n\x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256
    assert logits_of(out, torch.arange(8).view(1, -1)).shape[-1] == 320


def config_of(folder: Path, *overrides: str) -> RunConfig:
    common = ["model.architecture=transformers", "data.tokenizer=bytes", "data.seq_len=32"]
    return load_config(None, overrides=[f"model.hf={folder}", *common, *overrides], layers=False).config


def whole_model(folder: Path, *overrides: str) -> Any:
    """Return the model of a run with all its initial values."""
    return UserTask(config_of(folder, *overrides), None, opens_data=False).build_whole_model().eval()


def logits_in(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


TOKENS = torch.arange(24).view(1, -1) * 7 % 257


@pytest.mark.parametrize(
    "lora",
    [
        "{r: 4, target_modules: [q_proj], modules_to_save: [lm_head]}",
        "{r: 4, target_modules: [q_proj], init_lora_weights: false}",
        "{r: 4, target_modules: [q_proj], use_dora: true}",
        "{r: 4, target_modules: [q_proj], trainable_token_indices: [1, 2]}",
        "{r: 4, target_modules: [embed_tokens, v_proj]}",
    ],
)
def test_adapters_start_finite_and_at_the_model(tmp_path: Path, lora: str) -> None:
    folder = save_model(tmp_path / "model")
    logits = logits_in(whole_model(folder, f"model.lora={lora}"), TOKENS)
    if "false" in lora:
        assert logits.isfinite().all()
    else:
        assert (logits - logits_of(folder, TOKENS)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_other_models_start_with_their_weights(tmp_path: Path, kind: str) -> None:
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "n_embd": 64, "n_layer": 2, "n_head": 2}
    folder = save_model(tmp_path / "model", kind, **sizes, num_local_experts=4)
    assert (logits_in(whole_model(folder), TOKENS) - logits_of(folder, TOKENS)).abs().max() < 1e-5


def test_buffers_are_read_from_the_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", "gemma4_text", num_hidden_layers=2, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    buffers = [item for name, item in model.named_buffers() if name.endswith("layer_scalar")]
    assert buffers
    for buffer in buffers:
        buffer.fill_(0.3)
    model.save_pretrained(folder)
    assert (logits_in(whole_model(folder), TOKENS) - logits_of(folder, TOKENS)).abs().max() < 1e-5


def test_files_without_a_part_of_the_model_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(FatalError, match=r"has no weights for lm_head\.weight"):
        whole_model(folder)


def test_samples_longer_than_the_table_of_positions_are_refused(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "model", "gpt2", n_embd=32, n_layer=1, n_head=2, max_position_embeddings=16
    )
    with pytest.raises(TrainkitError, match=r"data\.seq_len is 32, but .* has .* positions"):
        whole_model(folder)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rr: 4}", "model.lora is {'rr': 4}: "),
        ("{r: 4, layer_replication: [[0, 4], [2, 6]]}", "model.lora.layer_replication is set"),
        ("{r: 4, ensure_weight_tying: true}", "model.lora.ensure_weight_tying is set"),
        ("{r: 4, target_modules: [q_proj, v_prj]}", "model.lora.target_modules has v_prj, which matches no "),
        ("{r: 4, use_dora: true, target_modules: [v_prj]}", "model.lora.target_modules has v_prj, which "),
        ("{r: 4, target_modules: '.*v_prj'}", "model.lora.target_modules has .*v_prj, which matches "),
        ("{r: 4, target_modules: '*v'}", "model.lora does not fit "),
        ("{r: 4, target_modules: [self_attn]}", "model.lora does not fit "),
    ],
)
def test_adapters_that_cannot_be_trained_are_found_by_submit(tmp_path: Path, lora: str, message: str) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    problem = definite_problem(config_of(folder, f"model.lora={lora}"))
    assert f"{problem.key} {problem.message}".startswith(message)
    if "prj" in message:
        assert problem.hint.startswith("modules with weights: ")
        assert "q_proj" in problem.hint
    assert problem.hint


def test_adapters_for_existing_modules_are_no_problem(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    targets = ("[q_proj, mlp.up_proj]", "all-linear", "'.*(q|v)_proj'", "[lm_head, embed_tokens]", "null")
    for names in targets:
        for more in ("", ", use_dora: true"):
            lora = f"model.lora={{r: 4, target_modules: {names}{more}}}"
            assert definite_problem(config_of(folder, lora)) is None, lora


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_config_that_does_not_fit_is_found_by_submit(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    change_config(folder, intermediate_size=128)
    problem = definite_problem(config_of(folder))
    assert problem.key == "model.hf"
    assert "has shape [96, 64], but its config.json implies [128, 64]" in problem.message
    change_config(folder, hidden_act="nothing")
    problem = definite_problem(config_of(folder))
    assert f"{problem.key} {problem.message}".startswith(f"model.hf is {folder}, but ")
    with pytest.raises(TrainkitError, match=rf"^model\.hf is {folder}, but build_model\(\) failed: KeyError"):
        whole_model(folder)


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    single = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").write_bytes(single)
    assert (folder / "model.safetensors.index.json").is_file()
    assert (logits_in(whole_model(folder), TOKENS) - logits_of(folder, TOKENS)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "lora",
    [
        "{r: 4, target_modules: [embed_tokens, v_proj]}",
        "{r: 4, target_modules: [q_proj], modules_to_save: [lm_head]}",
    ],
)
def test_adapters_are_exported_without_reading_the_model(
    tmp_path: Path, lora: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model")
    run_cases(tmp_path, [Case("run", 1, {}, (*UNEVALUATED, *of(folder), f"model.lora={lora}"))], ())
    [checkpoint] = published(RunDir(tmp_path / "run").checkpoints_dir)[-1:]
    config = RunDir(tmp_path / "run").attempt(1).config_file
    read, names = StoredWeights.read, []

    def recording(self: StoredWeights, name: str, index: object = ()) -> torch.Tensor:
        names.append(name)
        return read(self, name, index)  # type: ignore[arg-type]

    monkeypatch.setattr(StoredWeights, "read", recording)
    monkeypatch.setattr("trainkit.capabilities.transformers.task.read_whole", None)
    out = tmp_path / "adapters"
    out.mkdir()
    request = (str(tmp_path / "run"), str(config), str(checkpoint.path), str(out), "fp32")
    export(ExportRequest(*request, merge=False))
    # peft saves the embedding together with its adapter.
    assert names == (["model.embed_tokens.weight"] if "embed_tokens" in lora else [])

    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, out).eval()
    monkeypatch.undo()
    (tmp_path / "merged").mkdir()
    export(ExportRequest(*request[:3], str(tmp_path / "merged"), "fp32", merge=True))
    expected = logits_of(tmp_path / "merged", TOKENS)
    assert (logits_in(adapted, TOKENS) - expected).abs().max() < 1e-5
    assert (expected - logits_of(folder, TOKENS)).abs().max() > 1e-4


def test_damaged_weights_are_found_by_submit(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    problem = definite_problem(config_of(folder, "model.architecture=llama"))
    assert (problem.key, "is incomplete" in problem.message) == ("model.hf", True)


def test_a_run_resumes_with_the_same_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    options = (
        *(*of(folder), LORA, *COMMON, "train.stop_at_step=1"),
        *("model.num_layers=null", "model.num_kv_heads=null"),
    )
    run_cases(tmp_path, [Case("run", 1, {})], options)
    change_config(folder, rms_norm_eps=0.1)
    attempt = make_attempt(tmp_path / "run", ["data.seq_len=32", *options, "train.stop_at_step=null"], 1)

    def refuse(self: StoredWeights, name: str, index: object = ()) -> torch.Tensor:
        raise AssertionError(f"{name} is read before the model is known to be the same")

    monkeypatch.setattr(StoredWeights, "read", refuse)
    with pytest.raises(TrainkitError, match=r"the fingerprint of model\.hf is .* cannot be resumed"):
        make_trainer(0, attempt)


@pytest.mark.parametrize("read", [create_model, read_whole])
def test_code_in_the_folder_of_a_model_is_not_executed(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    names = {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": names}))
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        read(tmp_path)
    assert not (tmp_path / "executed").exists()
