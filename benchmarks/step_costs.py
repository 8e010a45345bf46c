"""Counts what a step costs, without a GPU: bytes and kernels of a block, collectives of each layout.

    python -m benchmarks.step_costs [--only block | collectives]

The block is one of Llama 3 8B with 4,096 tokens, forward and backward, on tensors that have shapes but no
values. Every operation that is not a view counts as one kernel, which reads its inputs and writes its outputs
once, as in a block that is not compiled; RMSNorm counts with the several kernels that a CPU has for it.
``autocast`` computes in bf16 from float32 weights, as `torch.autocast` does; ``cast weights`` is trainkit.

Collectives are those of one rank in a step of two passes, by torch's fake process group.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.config import load_config
from trainkit.config.training import ModelConfig
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.submit.trainer_process import simulate, simulated_plan
from trainkit.trainer.models.decoder import Block, rope_table

TOKENS = 4096
GB = 1e9
LAYERS = 4
MODES = ("none", "selective", "full")
LAYOUTS: dict[str, dict[str, int]] = {
    "replicate 2": {"dp_replicate": 2, "dp_shard": 1},
    "shard 8": {"dp_shard": 8},
    "shard 8, zero 2": {"dp_shard": 8, "zero": 2},
    "replicate 2 x shard 4": {"dp_replicate": 2, "dp_shard": 4},
    "shard 4, cp 2": {"dp_shard": 4, "cp": 2},
    "shard 4, tp 2": {"dp_shard": 4, "tp": 2},
    "shard 2, tp 4": {"dp_shard": 2, "tp": 4},
}


NO_KERNEL = ("aten::_unsafe_view", "aten::detach", "aten::empty")
"""Operations that are no views by name, and still move no bytes."""


class CountKernels(TorchDispatchMode):
    """Adds up the kernels of all operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        written = [item for item in tree_leaves(out) if isinstance(item, Tensor)]
        touches_nothing = func.is_view or func.name().startswith(NO_KERNEL)
        if written and not touches_nothing:
            self.kernels += 1
            self.bytes += sum(item.numel() * item.element_size() for item in (*read, *written))
        return out


def count_block(*, casts: bool) -> CountKernels:
    """One forward and backward pass of a block whose weights are bf16, or float32 under autocast."""
    shape = resolve_model_shape(ModelConfig(preset="8b"), 1)
    stream = torch.bfloat16 if casts else torch.float32
    with torch.device("meta"):
        block = Block(shape)
    with FakeTensorMode():
        for module in block.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(param.shape, dtype=stream)))
        positions, keys = torch.arange(TOKENS), torch.empty(2, dtype=torch.int32)
        rope = rope_table(positions, shape.head_dim, shape.rope_theta)
        x = torch.empty(1, TOKENS, shape.dim, dtype=stream, requires_grad=True)
        with CountKernels() as count:
            with nullcontext() if casts else torch.autocast("cpu", torch.bfloat16):
                y = block(x, rope, positions, keys[:1], keys)
            y.backward(torch.empty_like(y))
    return count


def show_block() -> None:
    """Print bytes and kernels of a block, in both precisions."""
    print("| block of 8b, 4,096 tokens | GB moved | kernels |\n|---|---|---|")
    for name, casts in (("autocast", False), ("cast weights", True)):
        count = count_block(casts=casts)
        print(f"| {name} | {count.bytes / GB:.2f} | {count.kernels} |", flush=True)


def collectives() -> Iterator[tuple[str, str, dict[str, int]]]:
    """(layout, recomputation, collectives of a step) of every layout."""
    for name, degrees in LAYOUTS.items():
        for mode in MODES if degrees.get("tp", 1) * degrees.get("cp", 1) > 1 else MODES[:1]:
            values = {
                "model.preset": "8b",
                "model.vocab_size": 128_256,
                "model.num_layers": LAYERS,
                "data.seq_len": TOKENS,
                "train.device_batch_size": 1,
                "train.global_batch_size": 2 * degrees.get("dp_replicate", 1) * degrees["dp_shard"],
                "precision.dtype": "bf16",
                "parallel.activation_checkpointing": mode,
                **{f"parallel.{key}": degree for key, degree in degrees.items()},
            }
            overrides = [f"{key}={value}" for key, value in values.items()]
            loaded = load_config(None, overrides=overrides, environ={}, cwd=Path.cwd())
            world_size = 1
            for degree in degrees.values():
                world_size *= degree
            found = simulate(loaded, simulated_plan(loaded, world_size), 0)
            yield name, mode, found["collectives"]


def show_collectives() -> None:
    """Print the collectives of every layout."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    print(f"| layout, {LAYERS} blocks of 8b, 2 passes | recompute | {' | '.join(kinds)} |")
    print("|" + "---|" * (2 + len(kinds)))
    for name, mode, found in collectives():
        print(f"| {name} | {mode} | {' | '.join(str(found.get(kind, 0)) for kind in kinds)} |", flush=True)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["block", "collectives"], help="print one of the tables")
    only = parser.parse_args().only
    if only != "collectives":
        show_block()
    if only != "block":
        show_collectives()
    return 0


if __name__ == "__main__":
    sys.exit(main())
