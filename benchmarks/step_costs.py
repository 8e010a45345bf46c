"""Compute the cost of a step without a GPU: bytes and kernels of operations, collectives of layouts.

    python -m benchmarks.step_costs [--only block | masks | parts | collectives]

The measured block is a transformer block of Llama 3 8B with 4,096 tokens, forward and backward, with tensors
that have shapes but no values. Every operation that is not a view is counted as one kernel, which reads its
inputs and writes its outputs once, as in a block that is not compiled. RMSNorm is counted as the several
kernels that implement it on CPUs. In the output, ``autocast`` stands for float32 weights under
`torch.autocast`, and ``cast weights`` for trainkit. The weight update and the loss are counted in the same
way. A compiled update reads and writes each of its tensors once, and its kernels are those that the compiler
generates for a CPU.

The collectives are counted for one rank in a step of two microbatches, with torch's fake process group. For
blocks in emulated float8, the benchmark also counts the gathered bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.capabilities.simulation.simulated_job import simulate, simulated_plan
from trainkit.capabilities.simulation.worker import simulated_world, training_step, zeros_microbatch
from trainkit.config import load_config
from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import Recomputation
from trainkit.config.training import ModelConfig, OptimizerConfig
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import loss_chunks
from trainkit.trainer import build
from trainkit.trainer.causal_lm import nll_sum
from trainkit.trainer.forward_backward import _ChunkedLoss
from trainkit.trainer.models.decoder import (
    MASK_BLOCK,
    Block,
    block_mask,
    dense_mask,
    document_index,
    rope_table,
)
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.progress import Progress
from trainkit.trainer.torch_private import collective_kind

TOKENS = 4096
GB = 1e9
LAYERS = 4
MODES = get_args(Recomputation)
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
"""Operations that move no bytes although they are not marked as views."""


class CountKernels(TorchDispatchMode):
    """Counts the kernels of all operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        changed = [arg for arg, item in zip(args, func._schema.arguments) if _is_written(item)]  # noqa: B905
        changed += [(kwargs or {}).get(item.name) for item in func._schema.arguments if _is_written(item)]
        written = [item for item in tree_leaves(changed if out is None else out) if isinstance(item, Tensor)]
        touches_nothing = func.is_view or func.name().startswith(NO_KERNEL)
        if written and not touches_nothing:
            self.kernels += 1
            self.bytes += sum(item.numel() * item.element_size() for item in (*read, *written))
        return out


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def count_block(*, casts: bool) -> CountKernels:
    """Count a forward and backward pass of a block whose weights are bf16, or float32 under autocast."""
    shape = resolve_model_shape(ModelConfig(preset="8b"), 1)
    stream = torch.bfloat16 if casts else torch.float32
    with torch.device("meta"):
        block = Block(shape, 0)
    with FakeTensorMode():
        for module in block.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(param.shape, dtype=stream)))
        positions, keys = torch.arange(TOKENS), torch.empty(2, dtype=torch.int32)
        rope = rope_table(positions, shape.head_dim, shape.rope_theta)
        x = torch.empty(1, TOKENS, shape.dim, dtype=stream, requires_grad=True)
        with CountKernels() as count:
            with nullcontext() if casts else torch.autocast("cpu", torch.bfloat16):
                y, _ = block(x, rope, positions, keys[:1], keys)
            y.backward(torch.empty_like(y))
    return count


def show_block() -> None:
    """Print bytes and kernels of a block, in both precisions."""
    print("| block of 8b, 4,096 tokens | GB moved | kernels |\n|---|---|---|")
    for name, casts in (("autocast", False), ("cast weights", True)):
        count = count_block(casts=casts)
        print(f"| {name} | {count.bytes / GB:.2f} | {count.kernels} |", flush=True)


PARAM = (4096, 4096)
"""Size of the weight matrix whose update is counted."""


def weight_of() -> Weight:
    """Return the weight matrix with its gradient and a copy that is cast to bf16."""
    param = nn.Parameter(torch.zeros(PARAM))
    param.grad = torch.zeros(PARAM)
    return Weight("matrix", param, cast=nn.Parameter(param.detach().bfloat16()))


def count_update(optimizer: OptimizerConfig) -> tuple[CountKernels, int, float]:
    """Return the uncompiled and the compiled kernels, and the bytes per parameter, of an update."""
    numbers = torch.ones(()), torch.zeros(())
    with FakeTensorMode():
        sharded = ShardedAdamW([weight_of()], optimizer)
        sharded.collect_gradients()
        with CountKernels() as count:
            sharded.step(1e-3, torch.ones(()), torch.zeros(()))
    with patch("trainkit.trainer.optimizers.by_element.COMPILED_DEVICES", ("cpu",)):
        sharded = ShardedAdamW([weight_of()], optimizer, compiled=True)
    sharded.collect_gradients()
    _, [code] = run_and_get_code(lambda: sharded.step(1e-3, *numbers))
    state = [item for name, item in sharded.state_tensors() if not name.endswith("step")]
    tensors = [torch.empty(PARAM), *state]
    read_and_written = 2 * sum(item.numel() * item.element_size() for item in tensors)
    moved = read_and_written / tensors[0].numel() + 4 + 2  # the update reads the gradient and writes the cast
    return count, code.count("async_compile.cpp_pybinding("), moved


@torch.library.custom_op("benchmarks::add_product", mutates_args=("total",))
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Stand in for a GPU's matrix product that accumulates into `total`; only the shapes matter."""


@add_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None: ...


def count_loss() -> CountKernels:
    """Count the loss of 16,384 tokens of 1b, computed in chunks, and its gradients."""
    shape, tokens = resolve_model_shape(ModelConfig(preset="1b"), 1), 4 * TOKENS
    with FakeTensorMode():
        x, head = (torch.empty(size, shape.dim, dtype=torch.bfloat16) for size in (tokens, shape.vocab_size))
        labels = torch.empty(tokens, dtype=torch.int64)
        chunks = loss_chunks(Layout(), shape, tokens)
        inputs = x.requires_grad_(), head.requires_grad_(), labels, nll_sum, chunks
        with patch("trainkit.trainer.forward_backward._add_product", add_product), CountKernels() as count:
            _ChunkedLoss.apply(*inputs).backward()
    return count


def show_masks() -> None:
    """Print the cost of a sample's document mask, either stored in memory or computed by attention."""
    end = 0
    print("| mask of 4,096 tokens | documents of | MB in memory | blocks of scores | partly masked |")
    print("|---|---|---|---|---|")
    for length in (TOKENS, 1024, 256):
        packed = torch.where(torch.arange(1, TOKENS + 1) % length == 0, end, 1)[None]
        documents, positions = document_index(packed, end), torch.arange(TOKENS)
        dense = dense_mask(positions, TOKENS, torch.bfloat16, documents=documents)
        mask = block_mask(positions, documents=documents)
        parts = mask.kv_num_blocks, mask.full_kv_num_blocks
        sizes = [item.numel() * item.element_size() for item in mask.as_tuple() if isinstance(item, Tensor)]
        all_blocks = (TOKENS // MASK_BLOCK) ** 2
        print(f"| read | {length:,} | {dense.numel() * 2 / 1e6:.2f} | {all_blocks} | {all_blocks} |")
        partly, whole = (int(item.sum()) for item in parts)
        print(f"| computed | {length:,} | {sum(sizes) / 1e6:.2f} | {partly + whole} | {partly} |", flush=True)


def show_parts() -> None:
    """Print bytes and kernels of the update and of the loss."""
    print("| part | bytes a parameter | kernels | compiled: bytes | kernels |\n|---|---|---|---|---|")
    size = PARAM[0] * PARAM[1]
    for name, optimizer in {
        "update": OptimizerConfig(),
        "update, averages in bf16": OptimizerConfig(state_dtype="bf16", betas=[0.9, 0.95]),
        "update, averages in 8 bits": OptimizerConfig(name="adamw_8bit"),
    }.items():
        count, kernels, moved = count_update(optimizer)
        compiled = f"{moved:.1f} | {kernels + 1}" if kernels else "|"
        print(f"| {name} | {count.bytes / size:.1f} | {count.kernels} | {compiled} |", flush=True)
    count = count_loss()
    print(f"| loss of 1b, 16,384 tokens: {count.bytes / GB:.1f} GB | | {count.kernels} | | |", flush=True)


def collectives() -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield each layout with its recomputation mode and the collectives of a step."""
    for name, degrees in LAYOUTS.items():
        for mode in MODES if degrees.get("tp", 1) * degrees.get("cp", 1) > 1 else MODES[:1]:
            loaded, plan = planned(degrees, {"parallel.activation_checkpointing": mode})
            yield name, mode, simulate(loaded, plan, 0).collectives


def planned(degrees: dict[str, int], options: dict[str, object]) -> tuple[LoadedConfig, LaunchPlan]:
    """Return the config and the plan for some blocks of 8b in a layout, with two microbatches per step."""
    values = {
        "model.preset": "8b",
        "model.vocab_size": 128_256,
        "model.num_layers": LAYERS,
        "data.seq_len": TOKENS,
        "train.device_batch_size": 1,
        "train.global_batch_size": 2 * degrees.get("dp_replicate", 1) * degrees["dp_shard"],
        "precision.dtype": "bf16",
        **options,
        **{f"parallel.{key}": degree for key, degree in degrees.items()},
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    loaded = load_config(None, overrides=overrides, environ={}, cwd=Path.cwd())
    world_size = math.prod(degree for key, degree in degrees.items() if key != "zero")
    return loaded, simulated_plan(loaded, world_size)


class CountTalk(TorchDispatchMode):
    """Counts collectives by type, and the bytes that the gathers return."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind := collective_kind(func):
            self.kinds[kind] += 1
            self.gathered += args[0].nbytes if kind == "all_gather" else 0
        return func(*args, **(kwargs or {}))


def count_float8(float8: str) -> CountTalk:
    """Count the collectives of a step whose blocks compute matrix products in emulated float8."""
    loaded, plan = planned(LAYOUTS["shard 8"], {"precision.float8": float8})
    config, task = loaded.config, build.build_task(loaded.config)
    emulated = partial(build.apply_float8, emulate=True)
    with (
        patch.object(build, "require_float8"),
        patch.object(build, "apply_float8", emulated),
        simulated_world(plan, 0) as world,
    ):
        parts = build.build_model_parts(task, plan, world)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for part in parts:
                part.to_empty(device=world.device)
                part.rebuild_buffers()
            built = build.assemble(task, plan, world, Progress(), parts)
            optimizer = ShardedAdamW(built.weights, config.optimizer, plan.layout)
            step = training_step(config, plan, built, optimizer, zeros_microbatch(config, plan))
            step()
            with CountTalk() as talk:
                step()
    return talk


def show_float8() -> None:
    """Print the gathered bytes of blocks that compute matrix products in float8."""
    print(f"| shard 8, {LAYERS} blocks of 8b, 2 passes | GB gathered | all_gather | all_reduce |")
    print("|---|---|---|---|")
    for float8 in ("true", "gather"):
        talk = count_float8(float8)
        counts = " | ".join(str(talk.kinds[kind]) for kind in ("all_gather", "all_reduce"))
        print(f"| precision.float8: {float8} | {talk.gathered / GB:.2f} | {counts} |", flush=True)


def show_collectives() -> None:
    """Print the collectives of every layout."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    print(f"| layout, {LAYERS} blocks of 8b, 2 passes | recompute | {' | '.join(kinds)} |")
    print("|" + "---|" * (2 + len(kinds)))
    for name, mode, found in collectives():
        print(f"| {name} | {mode} | {' | '.join(str(found.get(kind, 0)) for kind in kinds)} |", flush=True)
    show_float8()


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=["block", "masks", "parts", "collectives"], help="print one of the tables"
    )
    only = parser.parse_args().only
    shows = {"block": show_block, "masks": show_masks, "parts": show_parts, "collectives": show_collectives}
    for show in [shows[only]] if only else shows.values():
        show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
