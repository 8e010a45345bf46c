"""Tests batch arithmetic, and the sizes that its message proposes."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.config import LoadedConfig, load_config
from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError
from trainkit.folders import shipped_config_names
from trainkit.plan import batch as batch_module
from trainkit.plan.batch import BatchRequest, batch_reason, scaled_lr
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.plan.layout_rules import make_layout, microbatch_problems

sizes = st.integers(1, 64)


ALL_SET = frozenset((batch_module.GLOBAL, batch_module.DEVICE, batch_module.MICROBATCHES))


def requested(device: int, total: int | None, fixed: frozenset[str] = ALL_SET) -> BatchRequest:
    return BatchRequest(device, total, ParallelConfig(), fixed)


def make_batch(device: int, total: int | None, dp: int, seq_len: int) -> Batch:
    """Make a batch whose values are all set by the user."""
    return batch_module.make_batch(requested(device, total), Layout(dp_shard=dp), seq_len)


def test_accumulation():
    assert make_batch(8, None, 3, 128) == Batch(8, 1, 24, 3072)
    batch = make_batch(8, 32, 2, 256)
    assert batch == Batch(8, 2, 32, 8192)
    reason = "32 samples per step = 8 per process x 2 data-parallel x 2 accumulation"
    assert batch_reason(batch, requested(8, 32), 2) == reason


def test_what_would_do():
    for device, total, dp in ((8, 32, 3), (6, 32, 1), (8, 4, 2)):
        with pytest.raises(ConfigError) as error:
            make_batch(device, total, dp, 256)
        said(error.value.message)


@given(device=sizes, total=st.integers(1, 4096), dp=sizes)
def test_a_batch_adds_up_or_every_proposed_size_does(device, total, dp):
    try:
        batch = make_batch(device, total, dp, 16)
    except ConfigError as error:
        assert total % (device * dp)
        proposals = re.findall(r"\d+", error.problems[0].hint)
        assert proposals
        for size in map(int, proposals):
            make_batch(device, size, dp, 16)
    else:
        assert batch.device_batch_size * dp * batch.accumulation_steps == batch.global_batch_size == total
        assert batch.tokens_per_step == 16 * total


def quickstart(*overrides: str) -> LoadedConfig:
    return load_config("quickstart", overrides=overrides, environ={}, cwd=Path("/nowhere"))


def derived(loaded: LoadedConfig, layout: Layout) -> Batch:
    return batch_module.make_batch(BatchRequest.of(loaded), layout, loaded.config.data.seq_len)


SIZES = {
    **{1: (4, 8, 32), 2: (4, 4, 32), 4: (4, 2, 32), 8: (4, 1, 32), 16: (2, 1, 32), 32: (1, 1, 32)},
    **{3: (4, 3, 36), 5: (3, 2, 30), 7: (4, 1, 28), 12: (3, 1, 36), 24: (1, 1, 24), 64: (1, 1, 64)},
}


@pytest.mark.parametrize("dp", SIZES)
def test_the_quickstart_on_any_number_of_processes(dp):
    batch = derived(quickstart(), Layout(dp_shard=dp))
    assert (batch.device_batch_size, batch.accumulation_steps, batch.global_batch_size) == SIZES[dp]


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"]
)
def test_a_batch_is_found_for_every_layout_of_1_to_64_ranks(schedule):
    loaded = quickstart(f"parallel.pp_schedule={schedule}")
    for world_size in range(1, 65):
        for model in (size for size in range(1, world_size + 1) if world_size % size == 0):
            for pp in (pp for pp in (1, 2, 4) if model % pp == 0):
                layout = Layout(dp_shard=world_size // model, tp=model // pp, pp=pp)
                batch = derived(loaded, layout)
                made = {"pp_microbatches": batch.pp_microbatches or 4}
                parallel = loaded.config.parallel.model_copy(update=made)
                size, steps = batch.device_batch_size, batch.accumulation_steps
                assert not list(microbatch_problems(layout, parallel, size, steps)), layout
                assert size * steps * layout.dp == batch.global_batch_size
                assert size <= 4
                if 32 % layout.dp == 0 and pp == 1:
                    assert batch.global_batch_size == 32


def test_what_differs_from_the_config_is_said():
    loaded = quickstart()
    for layout in (Layout(dp_shard=64), Layout(dp_shard=16, pp=2)):
        said(batch_reason(derived(loaded, layout), BatchRequest.of(loaded), layout.dp))


def test_what_the_user_set_is_kept_or_refused_with_sizes_that_work():
    with pytest.raises(ConfigError) as error:
        derived(quickstart("train.global_batch_size=32"), Layout(dp_shard=12))
    said(error.value.message)
    batch = derived(quickstart("train.device_batch_size=3"), Layout(dp_shard=4))
    assert (batch.device_batch_size, batch.global_batch_size) == (3, 36)
    batch = derived(quickstart("train.global_batch_size=48"), Layout(dp_shard=16))
    assert (batch.device_batch_size, batch.global_batch_size) == (3, 48)
    batch = derived(quickstart("parallel.pp_microbatches=2"), Layout(dp_shard=16, pp=2))
    assert (batch.device_batch_size, batch.pp_microbatches) == (2, 2)


RECIPES = {
    **{"gpt_3d": 4, "dual_gpu_gpt": 2, "temporal_encoder": 2, "multimodal_qa": 2, "phase1_multimodal": 2},
    "phase2_multimodal": 2,
}
"""Maps a recipe to its number of processes. Other configs run on any number."""
RUNS = [(name, size) for name in shipped_config_names() if "recipes/" not in name for size in (1, 2, 4)]


@pytest.mark.parametrize(
    ("name", "world_size"), [*RUNS, *((f"recipes/{name}", size) for name, size in RECIPES.items())]
)
def test_shipped_sizes_are_kept_where_they_work(name, world_size):
    loaded = load_config(name, environ={}, cwd=Path("/nowhere"))
    train = loaded.config.train
    layout, _ = make_layout(loaded.config.parallel, world_size)
    batch = derived(loaded, layout)
    assert batch.device_batch_size == train.device_batch_size
    assert batch.global_batch_size == train.global_batch_size


@pytest.mark.parametrize("origin", ["run/config.yaml", "other.yaml"])
def test_a_resume_may_adapt_the_sizes_of_its_own_run(origin, tmp_path):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "config.yaml"
    file.write_text("name: x\ntrain: {device_batch_size: 4, global_batch_size: 32}\n")
    loaded = load_config(file, environ={}, cwd=tmp_path)
    adjusted = loaded.adjusting("train.device_batch_size", origin=origin)
    assert adjusted.set_by_user("train.device_batch_size") == (origin == "other.yaml")
    assert adjusted.set_by_user("train.global_batch_size")


@pytest.mark.parametrize(
    ("scale", "dp", "base", "lr", "reason"),
    [
        ("none", 8, 1, 3e-4, ", unscaled (optimizer.lr_scale: none)"),
        ("linear", 4, 1, 1.2e-3, " x 4 = 0.0012: linear in data-parallel size 4 over 1"),
        ("linear", 4, 8, 1.5e-4, " x 0.5 = 0.00015: linear in data-parallel size 4 over 8"),
        ("sqrt", 4, 1, 6e-4, " x 2 = 0.0006: square root of data-parallel size 4 over 1"),
        ("sqrt", 4, 16, 1.5e-4, " x 0.5 = 0.00015: square root of data-parallel size 4 over 16"),
        ("sqrt", 1, 1, 3e-4, " x 1 = 0.0003: square root of data-parallel size 1 over 1"),
    ],
)
def test_scaled_lr(scale, dp, base, lr, reason):
    scaled, why = scaled_lr(3e-4, scale, dp, base)
    assert scaled == pytest.approx(lr, rel=1e-15)
    assert why == f"optimizer.lr 0.0003{reason}"


WARMUP = "train.batch_warmup=[{steps: 3, global_batch_size: 8}, {steps: 2, global_batch_size: 16}]"


@pytest.mark.parametrize(("dp", "device"), [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_a_warmup_has_the_same_sizes_on_every_layout(dp, device):
    batch = derived(quickstart(WARMUP), Layout(dp_shard=dp))
    assert batch.device_batch_size == device
    sizes = [8, 8, 8, 16, 16, 32, 32]
    for step, size in enumerate(sizes):
        now = batch.after(step)
        assert now.global_batch_size == now.accumulation_steps * device * dp == size
        assert (now.tokens_per_step, now.warmup) == (batch.tokens_per_step // 32 * size, ())
        for num_steps in range(len(sizes) - step):
            total = sum(sizes[step : step + num_steps])
            assert batch.num_samples(step, num_steps) == total
            assert batch.num_steps(step, total) == num_steps
            assert batch.num_steps(step, total + 1) == num_steps + 1
    assert LaunchPlan.from_dict(plan_of(batch).to_dict()).batch == batch


def plan_of(batch: Batch) -> LaunchPlan:
    return LaunchPlan("local", 1, 1, "cpu", Layout(), batch, 1e-3, 1, 20.0, {})


def test_the_plan_shows_a_warmup():
    loaded, layout = quickstart(WARMUP), Layout(dp_shard=2)
    reason = batch_reason(derived(loaded, layout), BatchRequest.of(loaded), 2)
    assert reason.endswith(" x 4 accumulation, after a warm-up (8 in steps 1 to 3, 16 in steps 4 to 5)")


@pytest.mark.parametrize(
    ("overrides", "layout", "message", "hint"),
    [
        (
            [],
            Layout(dp_shard=16),
            "contains global_batch_size 8, which is not a multiple of 16 data-parallel processes",
            "global_batch_size = 16 works",
        ),
        (
            ["train.device_batch_size=4", "train.global_batch_size=48"],
            Layout(dp_shard=3),
            "contains global_batch_size 8, which is not a multiple of 12 (3 data-parallel processes x "
            "train.device_batch_size 4)",
            "global_batch_size = 12 works",
        ),
        (
            [],
            Layout(dp_shard=2, pp=2),
            "is set, but parallel.pp is 2: a pipeline needs equal batches in all steps",
            "remove train.batch_warmup, or use parallel.dp_shard or parallel.tp",
        ),
        (
            ["train.global_batch_size=null"],
            Layout(),
            "is set, but train.global_batch_size is null, so steps have no accumulation",
            "set train.global_batch_size, which applies after the warm-up",
        ),
    ],
)
def test_an_impossible_warmup(overrides, layout, message, hint):
    with pytest.raises(ConfigError) as caught:
        derived(quickstart(WARMUP, *overrides), layout)
    [problem] = caught.value.problems
    assert (problem.key, problem.message, problem.hint) == ("train.batch_warmup", message, hint)
