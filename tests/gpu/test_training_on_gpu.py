"""Repeats the training tests on one GPU, and layouts on two, with CUDA's kernels, streams and nccl.

`make gpu` runs these tests with TEST_DEVICE=cuda. All other runs use a CPU, so that the tests keep working.
"""

import os

import pytest
import torch

from tests.support.parity import Case, run_cases, worst_difference
from tests.support.runs import (
    ForkedWorker,
    fork_workers,
    log_text,
    losses,
    make_attempt,
    train,
    wait_for,
    wait_until,
)
from trainkit.capabilities.simulation.worker import simulate
from trainkit.config import read_effective
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.memory import memory_of
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import work_of
from trainkit.run.events import read_metrics
from trainkit.run.files import read_json
from trainkit.run.manifest import Checkpoint, find_damage, published
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.checkpoint.loader import load_tensors
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.distributed import World
from trainkit.trainer.parallel.context import (
    attention_to_last,
    cudnn_attention_to_last,
    masked_attention_to_last,
)
from trainkit.trainer.stateless_random import dropout

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

KIND = os.environ.get("TEST_DEVICE", "cpu")
DEVICE = torch.device(KIND)
ON_DEVICE = f"device={KIND}"
COMPILES = "true" if KIND == "cuda" else "false"  # tests/trainer compiles for CPUs
MESH = ("parallel.mesh_of_one=true",)
"""Options for process groups, FSDP and DTensor staging on one process, on a GPU with nccl."""
SIZE = 1024 if KIND == "cuda" else 128
SHAPE = (
    *("model.num_layers=8", f"model.dim={SIZE}", f"model.ffn_dim={3 * SIZE}", "data.seq_len=512"),
    *(f"model.vocab_size={30 * SIZE}", "train.device_batch_size=4", "train.global_batch_size=null"),
    "train.steps=3",
    *("parallel.compile=false", f"precision.dtype={'bf16' if KIND == 'cuda' else 'fp32'}"),
)

WIDE = (f"model.dim={4 * SIZE}", "model.num_layers=1", f"model.ffn_dim={4 * SIZE}", "data.seq_len=64")
"""Options for a model so wide that the compiler has several kernels for its norms."""

RESUMED = {"alone": (), "wide": WIDE, "mesh": MESH, "8bit": (*MESH, "optimizer.name=adamw_8bit")}


@pytest.mark.parametrize("name", RESUMED if KIND == "cuda" else ["mesh"])  # tests/trainer resumes on CPUs
def test_resumes_exactly_after_sigkill(tmp_path, name):
    """Wide norms resume with empty caches, as on another node. The other cases share a cache to save time."""
    caches, own = iter(range(3)), RESUMED[name]

    def start(attempt: AttemptDir) -> list[ForkedWorker]:
        cache = str(tmp_path / f"cache-{next(caches) if name == 'wide' else 0}")
        return fork_workers(attempt, env={"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache})

    options = [
        *(ON_DEVICE, "precision.dtype=bf16", "model.dropout=0.1", "train.deterministic=true"),
        *("train.steps=20000", "checkpoint.every_steps=5", *own),
    ]
    run = RunDir(tmp_path / "killed")
    attempt = make_attempt(run.path, options)
    [worker] = start(attempt)
    wait_until(lambda: any(found.step >= 5 for found in published(run.checkpoints_dir)))
    worker.kill()
    worker.wait()
    saved = max(found.step for found in published(run.checkpoints_dir))
    for folder in (run.path, tmp_path / "whole"):
        attempt = make_attempt(folder, [*options, f"train.stop_at_step={saved + 5}"])
        assert wait_for(start(attempt)) == [75], log_text(attempt)
    expected = losses(tmp_path / "whole")
    assert len(expected) == saved + 5
    assert losses(run.path) == expected


def test_the_mesh_of_one_changes_nothing(tmp_path):
    options = [ON_DEVICE, "precision.dtype=bf16", "train.steps=10", "parallel.compile=false"]
    train(tmp_path / "alone", options)
    train(tmp_path / "mesh", [*options, *MESH])
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "alone"), abs=1e-6)


def test_compiled_and_eager_agree(tmp_path):
    """A compiling step takes longer than any other, but the watchdog allows for the first step."""
    options = [ON_DEVICE, "precision.dtype=fp32", "train.steps=8", "requeue.hang_min_s=1"]
    train(tmp_path / "eager", [*options, "parallel.compile=false"])
    train(tmp_path / "compiled", [*options, f"parallel.compile={COMPILES}"])
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), abs=2e-4)


def test_tf32_is_another_rounding(tmp_path):
    options = [ON_DEVICE, "precision.dtype=fp32", "train.steps=4", "parallel.compile=false"]
    train(tmp_path / "fp32", options)
    attempt = train(tmp_path / "tf32", [*options, "precision.tf32=true"])
    assert losses(tmp_path / "tf32") == pytest.approx(losses(tmp_path / "fp32"), abs=1e-2)
    assert (losses(tmp_path / "tf32") != losses(tmp_path / "fp32")) == (KIND == "cuda")
    assert ("TF32" in log_text(attempt)) == (KIND == "cuda")


@pytest.mark.skipif(KIND != "cuda", reason="float8 needs a GPU; emulated in tests/trainer")
def test_weights_gathered_in_float8_are_those_that_are_cast_after(tmp_path):
    pytest.importorskip("torchao")
    options = [ON_DEVICE, "precision.dtype=bf16", "train.steps=6", "parallel.compile=false", *MESH]
    for ways in ("true", "gather"):
        train(tmp_path / ways, [*options, f"precision.float8={ways}"])
    assert losses(tmp_path / "gather") == losses(tmp_path / "true")


def test_the_mask_of_documents_is_computed_or_read(tmp_path):
    """Only attention that is compiled for a GPU in half precision computes the mask."""
    options = [ON_DEVICE, "precision.dtype=bf16", "train.steps=8", "data.document_mask=true"]
    train(tmp_path / "read", [*options, "parallel.compile=false"])
    options.append(f"parallel.compile={COMPILES}")
    train(tmp_path / "computed", [*options, "parallel.activation_checkpointing=selective"])
    assert losses(tmp_path / "computed") == pytest.approx(losses(tmp_path / "read"), abs=1e-2)


def test_fp16_skips_what_overflows_and_then_learns(tmp_path):
    options = ["precision.dtype=fp16", "precision.init_loss_scale=1.0e9", "train.steps=60"]
    options.append("train.global_batch_size=4")
    attempt = train(tmp_path / "run", [ON_DEVICE, *options, "optimizer.lr=0.01", "schedule.warmup_steps=1"])
    assert 0 < log_text(attempt).count("skipped:") < 30
    finite = [loss for loss in losses(tmp_path / "run").values() if loss is not None]
    assert len(finite) == 60  # only the scaled gradient overflows
    assert finite[-1] < finite[0] - 0.5


def test_dropout_masks_are_those_of_a_cpu():
    x = torch.randn(4, 64, 32)
    keys = torch.arange(4, dtype=torch.int32)
    expected = dropout(x, 0.3, keys, 7)
    assert torch.equal(dropout(x.to(DEVICE), 0.3, keys.to(DEVICE), 7).cpu(), expected)


@pytest.mark.parametrize("head_dim", [128, 64])
def test_attention_to_the_last_keys(head_dim):
    """Context-parallel ranks compute this attention. Hopper merges two calls of cuDNN for it."""
    dtype = torch.bfloat16 if KIND == "cuda" else torch.float32
    sizes = ((8, 256), (2, 1024), (2, 1024))
    inputs = [
        torch.randn(2, length, heads, head_dim, device=DEVICE, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads, length in sizes
    ]
    to_last = attention_to_last(DEVICE, dtype, head_dim)
    if KIND == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert to_last is cudnn_attention_to_last
    found, expected = to_last(*inputs), masked_attention_to_last(*(item.double() for item in inputs))
    weights = torch.randn_like(found)
    pairs = zip(
        (found, *torch.autograd.grad((found * weights).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * weights).sum(), inputs)),
        strict=True,
    )
    assert all((one - other).norm() < 0.01 * other.norm() for one, other in pairs)


def test_an_asynchronous_save_has_the_values_of_the_call(tmp_path):
    """Kernels of before the call still run during the save, and others change the state after it."""
    state = {f"model.layer{index}": torch.randn(1 << 20, device=DEVICE) for index in range(8)}
    saver = CheckpointSaver(
        RunDir(tmp_path).attempt(1), World(0, 1, DEVICE, None, None), state, KeepRule(last=9)
    )
    saver.allocate_buffers()
    work = torch.randn(2 * SIZE, 2 * SIZE, device=DEVICE)
    for step in range(1, 5):
        for _ in range(20):
            work = torch.tanh(work @ work)
        for tensor in state.values():
            tensor.add_(work[0, 0].nan_to_num())
        saver.save(SaveRequest(step, {}, is_best=False, reason="test"), blocking=False)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        saver.wait_until_staged()
        for tensor in state.values():
            tensor.mul_(2.0)
        saver.finish()
        checkpoint = Checkpoint(RunDir(tmp_path).checkpoint_dir(step), step)
        found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        load_tensors(checkpoint, found, World(0, 1, torch.device("cpu"), None, None))
        assert not find_damage(checkpoint)
        assert all(torch.equal(found[name], expected[name].cpu()) for name in expected)
    saver.close()


def test_memory_is_what_the_simulation_and_the_plan_say(tmp_path):
    attempt = train(tmp_path / "run", [ON_DEVICE, *SHAPE])
    measured = 2**30 * max(record["mem_gib_peak"] for record in read_metrics(attempt.run))
    assert measured > 0
    config, plan = read_effective(attempt.config_file), LaunchPlan.from_dict(read_json(attempt.plan_file))
    work = work_of(config, resolve_model_shape(config.model, 1), plan.layout, plan.batch, device=KIND)
    planned, simulated = memory_of(work).peak, simulate(config, plan, 0).peak_bytes["total"]
    if KIND == "cuda":
        assert measured == pytest.approx(planned, rel=0.1)
        # The simulation uses the kernels of a CPU, which store the inputs of norms in float32.
        assert measured == pytest.approx(simulated, rel=0.2)
    else:
        assert simulated == pytest.approx(planned, rel=0.1)


def test_a_profile_says_where_the_time_went(tmp_path):
    options = ("profiler.start_step=2", "profiler.num_steps=2", "profiler.memory=true")
    attempt = train(tmp_path / "run", [ON_DEVICE, *SHAPE, *options])
    share = read_json(attempt.profile_dir / "rank-0000.summary.json")["share"]
    busy = sum(share.values()) - share["idle"]  # a small model waits for its kernels to be launched
    assert share["gemm"] > 0.1 * busy
    assert sum(share.values()) > 0.5
    memory = attempt.profile_dir / "rank-0000.memory.pickle"
    assert memory.exists() == (KIND == "cuda")


LAYOUTS = {
    "shard": {"dp_shard": 2},
    "replicate": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "zbv": {"pp": 2, "pp_schedule": "zbv"},
}


@pytest.mark.xdist_group("gpus")
@pytest.mark.skipif(KIND == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layouts_on_two_gpus_have_the_curve_of_one(tmp_path):
    names = list(LAYOUTS) if KIND == "cuda" else ["shard"]
    cases = [Case(name, 2, dict(LAYOUTS[name])) for name in names]
    common = [f"device={KIND}", "parallel.compile=false", "train.steps=4", "train.eval_every=2"]
    run_cases(tmp_path, [Case("alone", 1, {}), *cases], common)
    found = {name: worst_difference(tmp_path / name, tmp_path / "alone") for name in names}
    assert max(found.values()) < (1e-4 if KIND == "cuda" else 1e-5), found
