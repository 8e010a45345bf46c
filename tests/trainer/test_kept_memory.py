"""Tests what a compiled block keeps for its backward pass, and that a model's weights can be freed."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from planning import step_work
from torch import Tensor, nn

from tests.support.models import nano_shape
from trainkit.plan.launch import Layout
from trainkit.plan.memory import kept_bytes
from trainkit.trainer.build import recompute_and_compile
from trainkit.trainer.models.decoder import Block, rope_table
from trainkit.trainer.precision import DTYPES, apply_float8, cast_weights

TOKENS = 64


@pytest.mark.slow(seconds=12)
@pytest.mark.parametrize(
    ("mode", "dtype", "float8"),
    [
        *(("none", "bf16", "tensorwise"), ("none", "bf16", "rowwise"), ("none", "fp32", None)),
        *(("pointwise", "bf16", None), ("pointwise", "bf16", "tensorwise"), ("selective", "bf16", None)),
    ],
)
def test_a_compiled_block_keeps_what_the_plan_says(mode, dtype, float8, monkeypatch):
    """The partitioner of torch.compile chooses the kept tensors, also without generated code."""
    shape = nano_shape(dim=128, num_heads=4, num_kv_heads=4, ffn_dim=320)
    block = Block(shape, 0).to(DTYPES[dtype]).train()
    if float8:
        pytest.importorskip("torchao")
        apply_float8([block], rowwise=float8 == "rowwise", emulate=True)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    recompute_and_compile([block], mode, compiled=True)
    positions, keys = torch.arange(TOKENS), torch.zeros(2, dtype=torch.int32)
    rope = rope_table(positions, shape.head_dim, shape.rope_theta)
    given = {item.untyped_storage().data_ptr() for item in (*block.parameters(), rope, positions, keys)}
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given and tensor.dim() > 0:  # a scale of one tensor has no dimension
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(1, TOKENS, shape.dim, dtype=DTYPES[dtype], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, _ = block.forward(x, rope, positions, keys[:1], keys)
    work = step_work(shape, layout=Layout(), seq_len=TOKENS, dtype=dtype, activation_checkpointing=mode)
    assert sum(sizes.values()) == kept_bytes(replace(work, float8=bool(float8)))
    assert out.requires_grad


def test_cast_weights_are_freed_with_their_model():
    model = nn.Linear(4, 4)
    casts = cast_weights(model, torch.bfloat16)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(master.grad is not None for master in casts.values())
    weights = [weakref.ref(param) for param in (*casts, *casts.values())]
    del model, casts
    gc.collect()
    assert [weight() for weight in weights] == [None] * 4
