"""Whatever the layout, the same training: losses, gradient norms and validation of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.models import SEQ_LEN, nano_shape, sample_keys, tokens
from tests.support.runs import events, run_ranks, train
from trainkit.plan.launch import Layout
from trainkit.run.events import read_metrics
from trainkit.run.rundir import RunDir
from trainkit.trainer.build import CompileCache
from trainkit.trainer.distributed import World
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import StageSpec
from trainkit.trainer.parallel import data_parallel

pytestmark = [pytest.mark.slow(seconds=4), pytest.mark.xdist_group("layouts")]

REPLICATE = ["parallel.dp_replicate=-1", "parallel.dp_shard=1"]
SHARD: list[str] = []
HSDP = ["parallel.dp_replicate=2", "parallel.dp_shard=-1"]
WIDE = [
    *("model.dim=512", "model.ffn_dim=4096", "data.seq_len=16"),
    *("train.device_batch_size=2", "train.global_batch_size=8", "train.steps=3"),
]
"""Blocks so large that each is a communication unit of its own."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A text of 50 samples: one epoch is three steps of 16 and one of fewer."""
    folder = tmp_path_factory.mktemp("corpus")
    words = "".join(f"line {number} says {number * number}\n" for number in range(1000))
    for name, start, num_samples in (("train.txt", 0, 50), ("val.txt", 5000, 21)):
        (folder / name).write_text(words[start : start + 64 * num_samples])
    return [
        *(f"data.source={folder / 'train.txt'}", f"data.val_source={folder / 'val.txt'}"),
        *("train.steps=null", "train.epochs=1", "train.eval_every=2"),
        *("model.dropout=0.1", "model.tie_embeddings=true"),
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> list[dict[str, Any]]:
    return curve(tmp_path_factory.mktemp("alone") / "run", corpus)


def curve(run_dir: Path, options: list[str], num_procs: int = 1) -> list[dict[str, Any]]:
    train(run_dir, options, num_procs)
    return read_metrics(RunDir(run_dir))


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    for key in ("step", "lr", "tokens", "samples_seen"):
        assert [record[key] for record in found] == [record[key] for record in expected]
    for key in ("loss", "grad_norm", "val_loss"):
        values = [record.get(key) for record in expected]
        assert [record.get(key) for record in found] == [
            value if value is None else pytest.approx(value, abs=tolerance) for value in values
        ], key


def test_the_reference_has_a_ragged_end_and_validates(alone: list[dict[str, Any]]) -> None:
    assert len(alone) == 4
    assert alone[-1]["samples_seen"] % 16 in range(1, 4), "less than one sample a rank on four"
    assert [record["step"] for record in alone if "val_loss" in record] == [2, 4]
    assert alone[-1]["loss"] < alone[0]["loss"]


def test_document_mask(tmp_path: Path) -> None:
    """Tensor parallelism and shards see the documents of a sample, and validation masks too."""
    rows = "".join(json.dumps({"text": f"line {n} " * (n % 9)}) + "\n" for n in range(300))
    (tmp_path / "rows.jsonl").write_text(rows)
    common = [f"data.source={tmp_path}/rows.jsonl", "data.val_fraction=0.2", "train.steps=4"]
    common += ["train.eval_every=2", "model.dropout=0.1"]
    masked = [*common, "data.document_mask=true"]
    expected = curve(tmp_path / "alone", masked)
    assert expected[-1]["loss"] != pytest.approx(curve(tmp_path / "plain", common)[-1]["loss"], abs=1e-5)
    full = "parallel.activation_checkpointing=full"
    assert_same(curve(tmp_path / "tp", [*masked, "parallel.tp=2", full], 2), expected)
    assert_same(
        curve(tmp_path / "shard", [*masked, "parallel.activation_checkpointing=selective"], 2), expected
    )


@pytest.mark.parametrize(
    ("num_procs", "options"),
    [
        pytest.param(1, ["parallel.activation_checkpointing=full"], id="1 full recompute"),
        pytest.param(1, ["train.device_batch_size=16"], id="1 without accumulation"),
        pytest.param(2, [*REPLICATE, "parallel.activation_checkpointing=selective"], id="2 replicate sel."),
        pytest.param(2, [*SHARD, "parallel.activation_checkpointing=full"], id="2 shard full recompute"),
        pytest.param(2, [*SHARD, "train.device_batch_size=1"], id="2 shard, accumulating 8"),
        pytest.param(4, SHARD, id="4 shard"),
        pytest.param(4, [*HSDP, "train.device_batch_size=2"], id="2 x 2, accumulating 2"),
    ],
)
def test_a_layout_changes_nothing(
    tmp_path: Path, corpus: list[str], alone: list[dict[str, Any]], num_procs: int, options: list[str]
) -> None:
    assert_same(curve(tmp_path / "run", [*corpus, *options], num_procs), alone)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return curve(tmp_path_factory.mktemp("wide") / "run", WIDE)


@pytest.mark.parametrize("options", [REPLICATE, SHARD], ids=["replicate", "shard"])
def test_several_communication_units(tmp_path: Path, wide: list[dict[str, Any]], options: list[str]) -> None:
    with torch.device("meta"):
        blocks = list(Decoder(nano_shape(dim=512, ffn_dim=4096), 16).blocks)
    units = data_parallel.communication_units(blocks, data_parallel.MIN_UNIT_BYTES)
    assert len(units) == 2, "the test would test nothing"
    assert_same(curve(tmp_path / "run", [*WIDE, *options], 2), wide)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("num_procs", [1, 2])
def test_low_precision_stays_close(
    tmp_path: Path, corpus: list[str], alone: list[dict[str, Any]], dtype: str, num_procs: int
) -> None:
    found = curve(tmp_path / "run", [*corpus, f"precision.dtype={dtype}"], num_procs)
    assert [record["samples_seen"] for record in found] == [record["samples_seen"] for record in alone]
    for record, expected in zip(found, alone, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], abs=0.02)
        assert record["loss"] != expected["loss"]
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_compiled_on_one_process(tmp_path: Path, corpus: list[str], alone: list[dict[str, Any]]) -> None:
    """With recomputation, which the compiler has to see through; a later attempt takes what is compiled."""
    options = [*corpus, "parallel.compile=true", "parallel.activation_checkpointing=selective"]
    for stop, code in (("2", 75), ("null", 0)):
        attempt = train(tmp_path / "run", [*options, f"train.stop_at_step={stop}"], expect=code)
    for event in events(tmp_path / "run", "first_step"):
        assert (event["step_s"] > 0, event["compiled"] in ("cold", "run", "host")) == (True, True)
    saved_at = attempt.run.compiled_file.stat().st_mtime
    assert saved_at < attempt.path.stat().st_mtime, "it is saved once"
    assert_same(read_metrics(attempt.run), alone, tolerance=1e-4)


def test_another_host_gets_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the file is damaged, cannot be read or cannot be written: then it compiles, and saves it."""
    run = RunDir(tmp_path)
    run.compiled_file.mkdir()
    CompileCache(run).load()
    assert f"cannot load what was compiled from {run.compiled_file} ([Errno 21]" in caplog.text
    run.compiled_file.rmdir()
    run.compiled_file.write_bytes(bytes(100))
    found = []
    for host in ("first", "second", "second"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / host))
        torch.compiler.reset()
        counters.clear()
        cache = CompileCache(run)
        if len(found) < 2:
            cache.load()
        torch.compile(torch.nn.Linear(2, 2))(torch.ones(2, requires_grad=True)).sum().backward()
        cache.save()
        found.append((cache.source(), run.compiled_file.stat().st_mtime_ns))
    sources, times_ns = zip(*found, strict=True)
    assert sources == ("cold", "run", "host")
    assert times_ns[0] == times_ns[1], "what was loaded is not saved again"
    CompileCache(RunDir(tmp_path / "removed")).save()
    assert "cannot save what was compiled" in caplog.text


def test_units_are_groups_of_blocks() -> None:
    with torch.device("meta"):
        blocks = list(Decoder(nano_shape(num_layers=7), SEQ_LEN).blocks)
    size = sum(p.numel() * 4 for p in blocks[0].parameters())
    count = lambda min_bytes: [len(u) for u in data_parallel.communication_units(blocks, min_bytes)]  # noqa: E731
    assert count(1) == [1] * 7
    assert count(2 * size) == [2, 2, 2], "the last one goes with the root"
    assert count(3 * size - 1) == [3, 3]
    assert count(100 * size) == []


def test_large_ends_are_units_of_their_own() -> None:
    with torch.device("meta"):
        model, tied = (Decoder(nano_shape(tie_embeddings=is_tied), SEQ_LEN) for is_tied in (False, True))
        first, last = (Decoder(nano_shape(), SEQ_LEN, StageSpec(range(1), at == 0, at == 1)) for at in (0, 1))
    size = 320 * 64 * 4
    assert data_parallel.end_units(model, size) == ([model.embedding], [model.norm, model.head])
    assert data_parallel.end_units(model, size + 1) == ([], [model.norm, model.head])
    assert data_parallel.end_units(model, 2 * size) == ([], [])
    assert data_parallel.end_units(tied, 1) == ([], []), "one parameter cannot be in two units"
    assert data_parallel.end_units(first, 1) == ([first.embedding], [])
    assert data_parallel.end_units(last, 1) == ([], [last.norm, last.head])


def check_inputs(world: World, layout: Layout) -> None:
    """The rotation table stays float32 and the residual stream has one type in every unit."""
    data_parallel.MIN_UNIT_BYTES = 1
    mesh = torch.distributed.init_device_mesh(
        "cpu", (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    with torch.device("meta"):
        model = Decoder(nano_shape(num_layers=3, dropout=0.1), SEQ_LEN)
    data_parallel.apply_data_parallel(model, mesh, layout, torch.bfloat16)
    model.to_empty(device="cpu")
    model.rebuild_buffers()
    for param in model.parameters():
        torch.nn.init.constant_(param, 0.01)
    seen = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(
            lambda _, args: seen.append(tuple(a.dtype for a in args if a is not None))
        )
    model(tokens(), sample_keys()).float().sum().backward()
    assert seen == [(torch.bfloat16, torch.float32)] * 3, seen


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=["replicate", "shard"])
def test_mixed_precision_leaves_the_rotation_table_alone(layout: Layout) -> None:
    run_ranks(check_inputs, 2, layout)
