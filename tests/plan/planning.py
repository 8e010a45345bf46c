"""Provides plans of configs with a few overrides, the problems of others, and the work of a step."""

from pathlib import Path
from typing import Any

import pytest

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL
from trainkit.config import load_config
from trainkit.config.running import ParallelConfig
from trainkit.config.training import ModelConfig, Preset
from trainkit.data.checks import inspect_data
from trainkit.errors import ConfigError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import Layout
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.plan.step_work import StepWork

EIGHT_GPUS = Layout(dp_shard=8)


def llama(preset: Preset, vocab_size: int = 32_000, **changes: Any) -> ModelShape:
    """Return a preset with the vocabulary of Llama 2."""
    return resolve_model_shape(ModelConfig(preset=preset, vocab_size=vocab_size, **changes), vocab_size)


def step_work(
    shape="7b",
    *,
    layout=EIGHT_GPUS,
    seq_len=4096,
    device_batch_size=1,
    accumulation_steps=1,
    dtype="bf16",
    device="cuda",
    **parallel,
):
    """Return the work of a step. The default is Llama 2 7B on 8 GPUs that share its state."""
    return StepWork(
        shape=llama(shape) if isinstance(shape, str) else shape,
        layout=layout,
        parallel=ParallelConfig(**parallel),
        seq_len=seq_len,
        device_batch_size=device_batch_size,
        accumulation_steps=accumulation_steps,
        dtype=dtype,
        device=device,
    )


NO_GPU = Machine(2, 0, (), "there is no NVIDIA driver on this machine")


def plan_of(*overrides, machine=NO_GPU, target=LOCAL, folder=None):
    """Return the plan of a config. If its `folder` is given, its data is checked too."""
    loaded = load_config(None, overrides=overrides, environ={}, cwd=folder or Path("/nowhere"))
    data = None if folder is None else inspect_data(loaded.config.data)
    return make_plan(loaded, Facts(machine, target, data))


def problems_of(*overrides, machine=NO_GPU, target=LOCAL, folder=None):
    """Return the problems that prevent a plan of a config."""
    with pytest.raises(ConfigError) as error:
        plan_of(*overrides, machine=machine, target=target, folder=folder)
    return error.value.problems
