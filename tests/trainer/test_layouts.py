"""Tests units of communication, their types, and compiled blocks. `test_parity.py` compares curves."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.models import SEQ_LEN, nano_shape, sample_keys, tokens
from tests.support.parity import worst_difference
from tests.support.runs import events, run_ranks, train
from trainkit.plan.launch import Layout
from trainkit.run.rundir import RunDir
from trainkit.trainer.build import CompileCache
from trainkit.trainer.distributed import World
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import StageSpec
from trainkit.trainer.parallel import data_parallel

pytestmark = [pytest.mark.slow(seconds=4), pytest.mark.xdist_group("layouts")]


def test_compiled_on_one_process(tmp_path):
    """The compiler must handle recomputation, and a later attempt uses the compiled code."""
    common = ["train.steps=4", "model.num_layers=1", "model.dropout=0.1", "model.tie_embeddings=true"]
    train(tmp_path / "eager", common)
    options = [*common, "parallel.compile=true", "parallel.activation_checkpointing=selective"]
    for stop, code in (("2", 75), ("null", 0)):
        attempt = train(tmp_path / "run", [*options, f"train.stop_at_step={stop}"], expect=code)
    for event in events(tmp_path / "run", "first_step"):
        assert (event["step_s"] > 0, event["compiled"] in ("cold", "run", "host")) == (True, True)
    saved_at = attempt.run.compiled_file.stat().st_mtime
    assert saved_at < attempt.path.stat().st_mtime, "it is saved once"
    assert worst_difference(attempt.run.path, tmp_path / "eager") < 1.5e-5


def test_another_host_gets_what_is_compiled(tmp_path, monkeypatch, caplog):
    """If the file is damaged or cannot be read or written, the host compiles, and saves the result."""
    run = RunDir(tmp_path)
    run.compiled_file.mkdir()
    CompileCache(run).load()
    assert f"from {run.compiled_file} ({run.compiled_file} is not loaded" in caplog.text
    run.compiled_file.rmdir()
    run.compiled_file.write_bytes(bytes(100))
    found = []
    # compiling the headers would take seconds on each host
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    for host in ("first", "second", "second"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / host))
        torch.compiler.reset()
        counters.clear()
        cache = CompileCache(run)
        if len(found) < 2:
            cache.load()
        with torch.no_grad():
            torch.compile(torch.nn.Linear(2, 2))(torch.ones(2))
        cache.save()
        found.append((cache.source(), run.compiled_file.stat().st_mtime_ns))
    sources, times_ns = zip(*found, strict=True)
    assert sources == ("cold", "run", "host")
    assert times_ns[0] == times_ns[1], "what was loaded is not saved again"
    CompileCache(RunDir(tmp_path / "removed")).save()
    assert "cannot save the" in caplog.text


def test_units_are_groups_of_blocks():
    with torch.device("meta"):
        blocks = list(Decoder(nano_shape(num_layers=7), SEQ_LEN).blocks)
    size = sum(p.numel() * 4 for p in blocks[0].parameters())
    count = lambda min_bytes: [len(u) for u in data_parallel.communication_units(blocks, min_bytes)]  # noqa: E731
    assert count(1) == [1] * 7
    assert count(2 * size) == [2, 2, 2], "the last one goes with the root"
    assert count(3 * size - 1) == [3, 3]
    assert count(100 * size) == []


def test_large_ends_are_units_of_their_own():
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
    """Check that the rotation table stays float32, and the residual stream has one type in all units."""
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
def test_mixed_precision_leaves_the_rotation_table_alone(layout):
    run_ranks(check_inputs, 2, layout)
