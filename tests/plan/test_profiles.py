"""Tests that profiles and model configs name GPUs and suit them."""

import re

import pytest

from trainkit.capabilities.layouts.choices import Hardware, base_work, choose, configured_layout
from trainkit.config import load_config
from trainkit.folders import shipped_configs
from trainkit.formats import GIB
from trainkit.plan.gpus import find_gpu
from trainkit.plan.model_shape import resolve_model_shape

WORDS = 32_000
DEPTHS = {"conservative": 12, "balanced": 16, "aggressive": 20}


@pytest.mark.parametrize("name", DEPTHS)
def test_memory_is_what_the_profile_says(name, tmp_path):
    text = (shipped_configs() / "profiles" / f"{name}.yaml").read_text()
    said = re.search(r"a peak of about ([\d.]+) GiB each, (\d+) %", text)
    assert said is not None
    quickstart = shipped_configs() / "quickstart.yaml"
    loaded = load_config(quickstart, profile=name, environ={}, cwd=tmp_path)
    gpu = find_gpu("rtx4090")
    choice, problems = configured_layout(
        loaded, resolve_model_shape(loaded.config.model, WORDS), Hardware(gpu, 2, 2)
    )
    assert problems == []
    assert (choice.fit, choice.work.accumulation_steps) == ("fits", 1)
    assert choice.work.shape.num_layers == DEPTHS[name]
    assert choice.memory.peak / GIB == pytest.approx(float(said[1]), abs=0.06)
    assert choice.memory.peak / gpu.memory == pytest.approx(int(said[2]) / 100, abs=0.006)
    # One GPU reads the same samples a step.
    train = loaded.config.train
    assert train.global_batch_size == 2 * train.device_batch_size


def test_a_model_config_is_what_plan_recommends_for_its_gpus(tmp_path):
    tried = []
    for file in sorted((shipped_configs() / "models").glob("*.yaml")):
        said = re.search(r"trainkit plan models/(\S+) --gpus (\d+) --gpu-type (\S+)", file.read_text())
        if said is None:
            continue
        tried.append(file.stem)
        loaded, gpu, gpus = load_config(file, environ={}, cwd=tmp_path), find_gpu(said[3]), int(said[2])
        assert said[1] == file.stem
        hardware = Hardware(gpu, gpus, min(gpus, 8))
        shape = resolve_model_shape(loaded.config.model, 1)
        own, problems = configured_layout(loaded, shape, hardware)
        assert own is not None, problems
        choices = choose(base_work(loaded.config, shape, own), hardware, own.work.samples_per_step)
        assert own == choices[0], file.stem
    assert tried == ["125m", "13b", "1b", "350m", "70b", "7b", "8b-one-gpu", "8b"]
