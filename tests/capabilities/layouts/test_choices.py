"""Tests the offered layouts, their order, and their descriptions."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import llama, step_work

from tests.support.said import said
from trainkit.capabilities.layouts.advice import advise, headline, reason, set_flags
from trainkit.capabilities.layouts.advice import settings as settings_of
from trainkit.capabilities.layouts.choices import (
    Choice,
    Hardware,
    best_on_layout,
    choose,
    configured_layout,
    layouts,
)
from trainkit.config import load_config
from trainkit.config.training import MoeConfig
from trainkit.plan.gpus import find_gpu
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import layout_problems


def hardware(num_gpus: int, gpu_type: str = "h100", node_size: int = 8) -> Hardware:
    gpu = find_gpu(gpu_type)
    return Hardware(gpu, num_gpus, min(num_gpus, node_size))


def test_layouts_that_the_model_or_the_data_rules_out():
    base = step_work("8b", seq_len=65_536)
    found = set(layouts(base, hardware(16)))
    masked = set(layouts(replace(base, document_mask=True), hardware(16)))
    assert masked == {layout for layout in found if layout.pp == layout.cp == 1}
    assert masked < found
    for changes in ({"has_own_optimizer": True}, {"warmup_batch_sizes": (8,)}):
        assert {layout.pp for layout in layouts(replace(base, **changes), hardware(16))} == {1}
    found = list(layouts(step_work("70b"), hardware(512)))
    assert {layout.tp for layout in found} == {1, 2, 4, 8}
    assert max(layout.pp for layout in found) == 64
    assert {layout.cp for layout in found} == {1}
    assert {layout.cp for layout in layouts(step_work("70b", seq_len=32_768), hardware(8))} == {1, 2, 4, 8}


def test_experts_are_divided_over_ranks_where_that_is_faster():
    moe = MoeConfig(num_experts=64, top_k=4, expert_ffn_dim=1024)
    base = step_work(llama("7b", moe=moe))
    assert {layout.ep for layout in layouts(base, hardware(16))} == {1, 2, 4, 8, 16}
    assert {layout.ep for layout in layouts(base, hardware(16)) if layout.tp == 8} == {1, 2, 4, 8, 16}
    best = choose(base, hardware(16), 64)[0]
    assert best.work.layout.ep > 1
    assert {layout.ep for layout in layouts(step_work("7b"), hardware(16))} == {1}


@settings(max_examples=15)
@given(st.sampled_from(["125m", "7b", "70b"]), st.sampled_from([1, 2, 3, 6, 8, 12, 16, 64, 512]))
def test_every_choice_is_a_layout_of_all_gpus(preset, num_gpus):
    size = 8 if num_gpus % 8 == 0 else min(num_gpus, 3)
    where = hardware(num_gpus, node_size=size)
    base = step_work(llama(preset), device_batch_size=4)  # type: ignore[arg-type]
    found = choose(base, where, 3 * 512)
    assert found
    assert len({choice.work.layout for choice in found}) == len(found)
    for choice in found:
        work = choice.work
        assert work.layout.world_size == num_gpus
        assert work.layout.tp <= size
        assert list(layout_problems(work)) == []
        assert work.tokens_per_step == 3 * 512 * work.seq_len
        assert work.samples_per_pass <= 4
    ranks = [choice.rank for choice in found]
    assert ranks == sorted(ranks)


def test_a_model_is_split_only_where_it_does_not_fit_and_within_nodes_first():
    best, *_ = choose(step_work("125m"), hardware(8), 64)
    assert best.work.layout == Layout(dp_replicate=8)
    assert "replicas are simplest" in headline(best)
    said(reason(best))
    best, *_ = choose(step_work("7b"), hardware(16), 256)
    assert best.fit == "fits"
    assert best.work.layout.dp_shard * best.work.layout.tp > 1
    assert best.cost.crossing(8) in ((), ("dp",))
    said(headline(best))
    # A GPU processes 32 samples one after another, and keeps only its shards of the gradients.
    best, *_ = choose(step_work("70b"), hardware(64), 1024)
    assert (best.fit, best.work.layout) == ("fits", Layout(dp_shard=32, tp=2))
    assert best.work.accumulation_steps == 32


def test_fewer_samples_than_gpus_need_more_than_shards():
    best, *others = choose(step_work("70b"), hardware(512), 256)
    assert best.fit == "fits"
    assert best.work.layout.tp > 1
    assert all(choice.work.layout.tp * choice.work.layout.pp > 1 for choice in others)


def test_recomputation_is_as_light_as_memory_allows():
    modes = {
        gpu: best_on_layout(step_work("7b", seq_len=16_384), Layout(dp_shard=8), hardware(8, gpu), 8)
        for gpu in ("b200", "h100", "l40s", "a100-40gb")
    }
    found = {gpu: choice and choice.work.parallel.activation_checkpointing for gpu, choice in modes.items()}
    assert found == {"b200": "none", "h100": "pointwise", "l40s": "selective", "a100-40gb": "full"}


def test_the_share_of_a_process():
    choice = best_on_layout(step_work("7b"), Layout(dp_shard=2, pp=4), hardware(8), 48)
    work = choice.work
    assert (work.samples_per_pass, work.passes_per_step) == (1, 24)
    assert work.parallel.pp_microbatches >= 4
    # There are fewer microbatches than stages.
    assert best_on_layout(step_work("7b"), Layout(dp_shard=2, pp=4), hardware(8), 4) is None
    base = step_work("7b", pp_schedule="zbv", activation_checkpointing="selective", seq_len=16_384)
    choice = best_on_layout(base, Layout(dp_shard=2, pp=4), hardware(8, "a100-40gb"), 64)
    assert choice.work.parallel.activation_checkpointing == "full"
    assert best_on_layout(step_work("125m"), Layout(dp_replicate=8), hardware(8), 12) is None


@pytest.mark.parametrize("preset", ["125m", "7b", "70b"])
def test_the_settings_of_a_choice_give_that_choice(preset, tmp_path):
    typed = [f"model.preset={preset}", "model.vocab_size=32000", "data.seq_len=4096"]
    typed += ["train.device_batch_size=2", "train.global_batch_size=256"]
    loaded = load_config(None, overrides=typed, environ={}, cwd=tmp_path)
    where = hardware(64)
    own, problems = configured_layout(loaded, llama(preset), where)  # type: ignore[arg-type]
    assert problems == []
    for choice in choose(own.work, where, 256)[:5]:
        changes = [flag.removeprefix("--set ") for flag in set_flags(settings_of(choice, loaded.config))]
        again = load_config(None, overrides=[*typed, *changes], environ={}, cwd=tmp_path)
        same, _ = configured_layout(again, choice.work.shape, where)
        assert same.work.layout == choice.work.layout
        assert same.memory.peak == choice.memory.peak
        assert settings_of(choice, again.config) == {}


def test_an_own_layout_that_cannot_be_says_why(tmp_path):
    overrides = ["parallel.tp=3", "train.device_batch_size=5"]
    loaded = load_config(None, overrides=overrides, environ={}, cwd=tmp_path)
    own, problems = configured_layout(loaded, llama("7b"), hardware(8))
    assert own is None
    assert [problem.origin for problem in problems] == ["--set parallel.tp=3"]


def test_advice_where_there_are_too_few_gpus():
    work = step_work("70b", accumulation_steps=16)
    assert choose(work, hardware(8), 128)[0].fit == "no"
    more, offload = advise(work, hardware(8), 128)
    assert (more[0], offload[0]) == ("16 GPUs", "parallel.offload")
    assert more[1].hardware == hardware(16)
    assert {choice.fit for _, choice in (more, offload)} == {"fits"}


def test_reasons_name_what_costs_time():
    work = step_work("7b", layout=Layout(tp=8, pp=2), device_batch_size=2, pp_microbatches=2)
    text = reason(Choice(work.with_parallel(activation_checkpointing="full"), hardware(16)))
    said(text)
    far = step_work("7b", layout=Layout(dp_replicate=2, dp_shard=8, cp=2), seq_len=32_768)
    said(reason(Choice(far, hardware(32))))
