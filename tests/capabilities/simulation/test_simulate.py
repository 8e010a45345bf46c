"""Tests that a simulated rank computes and stores the same as a rank among others."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.pipelining.stage import _PipelineStageBase

from tests.support.parity import Case, close, make_trainer, run_cases
from tests.support.ranks import start_ranks, wait_for_all
from tests.support.runs import make_attempt
from trainkit.capabilities.simulation import Simulation
from trainkit.capabilities.simulation.worker import simulate as simulate_rank
from trainkit.config import read_effective
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.memory import Memory, rank_memory
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import work_of
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.causal_lm import MAX_TOKENS_PER_READ
from trainkit.trainer.torch_private import memory_tracker

pytestmark = pytest.mark.slow

WIDE = (
    *("model.num_layers=4", "model.dim=1024", "model.ffn_dim=2816", "model.vocab_size=32000"),
    *("data.seq_len=1024", "precision.dtype=bf16", "train.device_batch_size=8"),
)
"""Sizes so large that small tensors do not matter. Tensors without values cost no extra time."""


def simulate(attempt: AttemptDir, rank: int = 0) -> Simulation:
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    if plan.layout.tp == plan.layout.ep == 1:
        return simulate_rank(read_effective(attempt.config_file), plan, rank)
    # DTensor remembers the process groups of a process after they were destroyed.
    found = attempt.path / "simulation.json"
    assert wait_for_all(start_ranks(simulate_apart, 1, attempt, rank, found), 600) == [0]
    return Simulation(**read_json(found))


def simulate_apart(_: int, attempt: AttemptDir, rank: int, file: Path) -> None:
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    write_json(file, asdict(simulate_rank(read_effective(attempt.config_file), plan, rank)))


def found_for(tmp_path: Path, num_procs: int, *options: str, rank: int = 0) -> Simulation:
    batch = ("train.global_batch_size=null", "data.num_workers=0")
    tmp_path.mkdir(exist_ok=True)
    return simulate(make_attempt(tmp_path / "run", [*batch, *options], num_procs), rank)


def memory_foretold(tmp_path: Path, rank: int) -> Memory:
    """Return the memory of a rank of the last attempt, as `trainkit plan` estimates it."""
    attempt = RunDir(tmp_path / "run").attempt(1)
    config, plan = read_effective(attempt.config_file), LaunchPlan.from_dict(read_json(attempt.plan_file))
    shape = resolve_model_shape(config.model, 1)
    work = work_of(config, shape, plan.layout, plan.batch, device="cpu")
    return rank_memory(work, plan.layout.place(rank).pp)


def foretold(tmp_path: Path, rank: int) -> int:
    return memory_foretold(tmp_path, rank).peak


def test_a_shard_of_32(tmp_path: Path) -> None:
    whole = found_for(tmp_path, 1, "train.device_batch_size=1")
    shard = found_for(tmp_path, 32, "train.device_batch_size=1")
    assert whole.num_params == pytest.approx(32 * shard.num_params, rel=0.2)
    assert shard.collectives == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("options", [["parallel.dp_shard=2"], ["parallel.tp=2"]])
def test_averages_in_8_bits(tmp_path: Path, options: list[str]) -> None:
    found = found_for(tmp_path, 2, *WIDE, *options, "optimizer.name=adamw_8bit")
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 0), rel=0.03)
    in_float32 = found_for(tmp_path, 2, *WIDE, *options)
    # A row of 1,024 elements has one scale per 128 elements, and a row of 2,816 has one per 176.
    saved = in_float32.peak_bytes["total"] - found.peak_bytes["total"]
    assert saved == pytest.approx(found.num_params * (8 - 2 - 8 / 128), rel=0.01)


SMALL = ("data.seq_len=16", "train.device_batch_size=1", "model.vocab_size=512")


@pytest.mark.parametrize(
    ("num_procs", "options", "collectives"),
    [
        (1, ["precision.dtype=fp32"], {}),
        (2, ["parallel.tp=2"], {"all_to_all": 2 * 4}),
        (4, ["parallel.dp_replicate=2", "parallel.dp_shard=2"], {"all_to_all": 2 * 3, "broadcast": 2 * 2}),
    ],
)
def test_muon_gathers_a_round_of_matrices(
    tmp_path: Path, num_procs: int, options: list[str], collectives: Any
) -> None:
    """The update needs the most memory, except with replicas, because the batch is small."""
    options = [*WIDE, *SMALL, "model.num_layers=2", "model.ffn_dim=8192", *options, "optimizer.name=muon"]
    found = found_for(tmp_path, num_procs, *options)
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 0), rel=0.005)
    assert {kind: found.collectives.get(kind) for kind in collectives} == collectives


def test_muon_gathers_a_round_of_experts(tmp_path: Path) -> None:
    """The update needs the most memory, because the model has many blocks."""
    experts = "model.moe={num_experts: 8, top_k: 1, expert_ffn_dim: 2048}"
    options = [experts, "model.num_layers=12", "parallel.dp_shard=4", "parallel.ep=2", "optimizer.name=muon"]
    found = found_for(tmp_path, 4, *WIDE, *SMALL, *options)
    update = memory_foretold(tmp_path, 0).phases["update"]
    assert found.peak_bytes["total"] == pytest.approx(update.total, rel=0.0005)


@pytest.mark.parametrize("options", [["parallel.dp_shard=2"], ["parallel.tp=2"]])
def test_an_average_of_the_weights(tmp_path: Path, options: list[str]) -> None:
    """The average takes 4 bytes per parameter of a rank, in the estimate and on the rank."""
    without = found_for(tmp_path / "without", 2, *WIDE, *options)
    found = found_for(tmp_path, 2, *WIDE, *options, "ema.decay=0.999")
    assert found.peak_bytes["total"] - without.peak_bytes["total"] == 4 * found.num_params
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 0), rel=0.03)


GEMMA = "model={post_norms: true, activation: gelu_tanh, attention_soft_cap: 50, logit_soft_cap: 30}"


@pytest.mark.parametrize(
    ("degree", "mode"),
    [("dp_shard", "none"), ("dp_shard", "selective"), ("dp_shard", "pointwise"), ("tp", "none")],
)
def test_soft_caps_and_the_z_loss(tmp_path: Path, degree: str, mode: str) -> None:
    options = (f"parallel.{degree}=2", f"parallel.activation_checkpointing={mode}", "train.z_loss=0.001")
    found = found_for(tmp_path, 2, *WIDE, GEMMA, "model.sliding_window=100", *options)
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 0), rel=0.005)


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("layout", [{"dp_shard": 8}, {"dp_shard": 2, "tp": 4}], ids=str)
def test_experts_on_several_ranks(tmp_path: Path, layout: dict[str, int], mode: str) -> None:
    """The plan expects a rank with more rows than the mean, and simulated ranks all have the mean."""
    moe = "model.moe={num_experts: 8, top_k: 2, expert_ffn_dim: 512, num_shared: 1}"
    degrees = {**layout, "ep": 4, "activation_checkpointing": mode}
    options = [moe, "model.num_kv_heads=4", *(f"parallel.{key}={value}" for key, value in degrees.items())]
    found = found_for(tmp_path, 8, *WIDE, *options)
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 0), rel=0.05)
    # Each of the four layers exchanges the numbers of rows once, and rows four times.
    assert found.collectives["all_to_all"] == 4 * 5


def test_every_rank_of_a_pipeline_has_its_stages(tmp_path: Path) -> None:
    options = ("parallel.pp=2", "parallel.dp_shard=2", "train.device_batch_size=4")
    found = [found_for(tmp_path, 4, *options, rank=rank) for rank in (0, 2)]
    # Both stages have the same number of layers. The last one also has a norm, and this rank has half of it.
    assert found[1].num_params == found[0].num_params + 32
    assert found[0].peak_bytes["total"] > found[1].peak_bytes["act"] > 0


def test_recomputing_holds_less(tmp_path: Path) -> None:
    kept = found_for(tmp_path, 2, "data.seq_len=256")
    recomputed = found_for(tmp_path, 2, "data.seq_len=256", "parallel.activation_checkpointing=full")
    assert recomputed.peak_bytes["total"] < 0.7 * kept.peak_bytes["total"]


def test_tensor_parallel_ranks_keep_reduced_results_instead_of_partial_ones(tmp_path: Path) -> None:
    options = ("parallel.tp=2", "parallel.activation_checkpointing=pointwise", "model.vocab_size=1024")
    found = found_for(tmp_path, 2, *WIDE, *options, "model.num_layers=8")
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 0), rel=0.03)


def test_shards_of_gradients_wait_for_the_next_pass(tmp_path: Path) -> None:
    once, twice = (
        found_for(tmp_path, 4, *WIDE, f"train.global_batch_size={size}", rank=3) for size in (32, 64)
    )
    more = twice.peak_bytes["total"] - once.peak_bytes["total"]
    assert more == pytest.approx(4 * once.num_params, rel=0.02)


def test_logits_that_are_split_are_nowhere_whole(tmp_path: Path) -> None:
    options = ("parallel.pp=2", "parallel.tp=4", "model.num_kv_heads=4", "parallel.pp_microbatches=4")
    found = found_for(tmp_path, 8, *WIDE, *options, rank=4)
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, 4), rel=0.03)


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        *(("gpipe", 1), ("1f1b", 0), ("interleaved_1f1b", 1)),
        *(("interleaved_zero_bubble", 1), ("zbv", 0), ("dualpipe_v", 1)),
    ],
)
def test_schedules(tmp_path: Path, schedule: str, rank: int) -> None:
    schedules = (f"parallel.pp_schedule={schedule}", "parallel.pp=2", "parallel.pp_microbatches=4")
    found = found_for(tmp_path, 2, *WIDE, *schedules, rank=rank)
    assert found.collectives == {"all_reduce": 1}
    assert found.peak_bytes["total"] == pytest.approx(foretold(tmp_path, rank), rel=0.1)


def hold(rank: int, attempt: AttemptDir) -> None:
    """Record the memory of a rank among others at its peak in the second step."""
    trainer, tracker = make_trainer(rank, attempt), memory_tracker()
    tracker.track_external(
        *trainer.built.model_parts, *(tensor for _, tensor in trainer.optimizer.state_tensors())
    )
    for _ in range(2):
        with tracker:
            trainer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    (attempt.path / f"peak-{rank}.json").write_text(json.dumps(peak["Total"]))
    close(trainer)


def keep_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tensors that a rank with several stages sends until its step is over, as gloo does."""
    sent: list[Any] = []

    def keeping(get: Callable[..., Any]) -> Callable[..., Any]:
        def kept(stage: Any, index: int) -> Any:
            found = get(stage, index)
            sent.extend(item.tensor for item in found)
            return found

        return kept

    for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
        monkeypatch.setattr(_PipelineStageBase, name, keeping(getattr(_PipelineStageBase, name)))
    step = PipelineScheduleMulti.step

    def whole_step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(schedule, *args, **kwargs)
        sent.clear()
        return result

    monkeypatch.setattr(PipelineScheduleMulti, "step", whole_step)


def test_real_ranks_hold_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("model.dim=128", "model.ffn_dim=384", "model.vocab_size=1024", "data.seq_len=128")
    cases = [
        Case("1f1b", 2, {"pp": 2}, ("model.tie_embeddings=true",)),
        Case("zbv", 2, {"pp": 2, "pp_schedule": "zbv"}),
    ]
    run_cases(tmp_path, cases, [*sizes, "model.num_layers=4"], function=hold)
    read_ahead = 2 * 8 * MAX_TOKENS_PER_READ  # tokens and labels of the next steps, which stay on the host
    for case in cases:
        if case.name == "zbv":
            keep_what_is_sent(monkeypatch)
        attempt = RunDir(tmp_path / case.name).attempt(1)
        real = json.loads((attempt.path / "peak-1.json").read_text())
        found = simulate(attempt, 1).peak_bytes["total"]
        assert found == pytest.approx(real - read_ahead, rel=0.001), case.name
