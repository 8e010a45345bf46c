"""The work of a step, for the tests of what a layout costs."""

from typing import Any

from trainkit.config.running import ParallelConfig
from trainkit.config.training import ModelConfig, Preset
from trainkit.plan.launch import Layout
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.plan.step_work import StepWork

EIGHT_GPUS = Layout(dp_shard=8)


def llama(preset: Preset, vocab_size: int = 32_000, **changes: Any) -> ModelShape:
    """A preset with the vocabulary of Llama 2."""
    return resolve_model_shape(ModelConfig(preset=preset, vocab_size=vocab_size, **changes), vocab_size)


def step_work(
    shape: ModelShape | Preset = "7b",
    *,
    layout: Layout = EIGHT_GPUS,
    seq_len: int = 4096,
    device_batch_size: int = 1,
    accumulation_steps: int = 1,
    dtype: str = "bf16",
    device: str = "cuda",
    **parallel: Any,
) -> StepWork:
    """The work of a step; what is not said is Llama 2 7B on 8 GPUs that share its state."""
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
