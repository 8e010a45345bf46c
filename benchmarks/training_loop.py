"""Compare the speed of the trainer with a hand-written loop that has the same model and batch.

    python benchmarks/training_loop.py [--against careful|autocast|bound]

The three hand-written loops are described in `OPPONENTS`; `python -m benchmarks.gpu` measures all three on a
GPU. Both loops run in the same processes, with alternating steps, so that changes in machine speed affect
both loops equally. The hand-written loop keeps its batch in memory and has no logging, schedule or signal
handling. With several processes, `autocast` and `bound` use DistributedDataParallel, and the trainer uses
`replicate`. The benchmark prints the median step times and their ratio for three cases:

- the model `tiny` with 32 samples per step;
- a step with 4 samples per process, where communication matters more;
- a tiny model; the relevant number is the `fixed cost`, which is the difference of the medians.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.plan.model_shape import ModelShape

    Micro = tuple[Tensor, Tensor, Tensor]
    """Tokens, labels and sample keys of one microbatch."""

SMALL = "too small to matter"
CASES = {
    "tiny": [
        "model.preset=tiny",
        "data.seq_len=256",
        "train.device_batch_size=8",
        "train.global_batch_size=32",
    ],
    "tiny, 4 samples a process": [
        "model.preset=tiny",
        "data.seq_len=256",
        "train.device_batch_size=4",
        "train.global_batch_size=null",
    ],
    SMALL: [
        "model.preset=nano",
        "model.dim=16",
        "model.num_layers=2",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "model.ffn_dim=32",
        "data.seq_len=8",
        "train.device_batch_size=1",
        "train.global_batch_size=null",
    ],
}


def make_attempt(folder: Path, overrides: list[str], num_procs: int):
    """Return a run folder with one attempt, like one that `trainkit submit` would write."""
    from trainkit.cluster.machine import detect_machine
    from trainkit.config import dump_effective, load_config
    from trainkit.plan.facts import Facts
    from trainkit.plan.make_plan import make_plan
    from trainkit.run.files import write_json
    from trainkit.run.rundir import RunDir

    config_file = folder / "bench.yaml"
    config_file.write_text("name: bench\n")
    loaded = load_config(config_file, overrides=[*overrides, f"resources.gpus_per_node={num_procs}"])
    attempt = RunDir(folder).attempt(1)
    attempt.create()
    attempt.config_file.write_text(dump_effective(loaded.config))
    write_json(attempt.plan_file, make_plan(loaded, Facts(detect_machine())).to_dict())
    return attempt


class Loop(NamedTuple):
    """A training loop: a step function, and the optimizer that a step calls."""

    step: Callable[[], object]
    optimizer: Any


OPPONENTS = {
    "careful": "FSDP2 over a mesh of one, float32 masters, bf16 casts, compiled blocks, chunked loss",
    "autocast": "float32 weights, bf16 autocast, compiled blocks and loss",
    "bound": "weights, gradients and averages in bf16 only: an upper bound that loses small updates",
}
"""Maps the name of a hand-written loop to its description.

All loops use fused AdamW, SDPA and gradient clipping. `careful` has the same types as trainkit. On several
processes, `careful` replicates with FSDP2, and the other loops use DistributedDataParallel.
"""
MAX_CHUNK_LOGITS = 2**28
"""Maximum number of logits that `careful` keeps at a time."""


def hand_written_loop(
    kind: str, shape: ModelShape, micros: Sequence[Micro], dtype_name: str = "bf16", num_procs: int = 1
) -> Loop:
    """Return a loop of `OPPONENTS` that trains on the same microbatches in every step.

    `careful` needs a process group. Blocks are compiled on a GPU only.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from trainkit.trainer.models.decoder import INIT_STD, Decoder

    device, seq_len = micros[0][0].device, micros[0][0].shape[1]
    compiled, has_bf16 = device.type == "cuda", dtype_name == "bf16"
    with device:
        model = Decoder(shape, seq_len).to(device)  # the host computes a table of angles
    for param in model.parameters():
        nn.init.normal_(param, std=INIT_STD)
        if kind == "bound":
            param.data = param.data.bfloat16()
    if compiled:
        for block in model.layers:
            block.forward = torch.compile(block.forward)

    def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    loss_of = torch.compile(compute_loss) if compiled else compute_loss
    module: Any = model
    if kind == "careful":
        mesh = init_device_mesh(device.type, (num_procs, 1), mesh_dim_names=("replicate", "shard"))
        cast = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if has_bf16 else {}
        policy = MixedPrecisionPolicy(**cast, cast_forward_inputs=False)
        for block in (*model.layers, model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    elif num_procs > 1:
        module = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def backward(tokens: torch.Tensor, labels: torch.Tensor, keys: torch.Tensor) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_bf16 and kind == "autocast"):
            logits = module(tokens, keys)
        (loss_of(logits, labels) / len(micros)).backward()

    def backward_in_chunks(tokens: torch.Tensor, labels: torch.Tensor, keys: torch.Tensor) -> None:
        hidden = module(tokens, keys, lambda x, weight: x).flatten(0, 1)
        leaf = hidden.detach().requires_grad_()
        count = math.ceil(labels.numel() * shape.vocab_size / MAX_CHUNK_LOGITS)
        for chunk, part in zip(leaf.chunk(count), labels.flatten().chunk(count), strict=True):
            share = len(part) / labels.numel() / len(micros)
            (loss_of(F.linear(chunk, model.head.weight), part) * share).backward()
        hidden.backward(leaf.grad)

    def step() -> None:
        for number, micro in enumerate(micros, 1):
            is_last = number == len(micros)
            if kind == "careful":
                module.set_requires_all_reduce(is_last)
                module.set_reshard_after_backward(is_last)
                backward_in_chunks(*micro)
            else:
                with nullcontext() if is_last or num_procs == 1 else module.no_sync():
                    backward(*micro)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(step, optimizer)


def start_group_of_one(device: str) -> None:
    """Start a process group whose only rank is this process, as `careful` needs one."""
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def worker(folder: str, num_procs: int, dtype_name: str, num_steps: int, kind: str) -> None:
    """Time both loops in one rank; rank 0 prints the medians in seconds."""
    import gc

    import torch.distributed as dist

    from trainkit.config import read_effective
    from trainkit.job.rank_env import find_rank_env
    from trainkit.job.signals import StopRequest
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.files import read_json
    from trainkit.run.rundir import RunDir
    from trainkit.trainer.build import build_task
    from trainkit.trainer.distributed import exit_process, join_world, select_device
    from trainkit.trainer.loop import Trainer
    from trainkit.trainer.progress import Progress

    attempt = RunDir(folder).attempt(1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = join_world(find_rank_env(), select_device("cpu", 0), plan.layout, StopRequest())
    task, stop, progress = build_task(config), StopRequest(), Progress()
    trainer = Trainer(attempt, plan, world, task, stop, progress)
    micros = [(micro.tokens, micro.labels, micro.sample_keys) for micro in next(trainer.batches).microbatches]
    if num_procs == 1:
        start_group_of_one("cpu")
    loops = {
        "trainkit": trainer.step,
        kind: hand_written_loop(kind, task.shape, micros, dtype_name, num_procs).step,
    }
    times_s: dict[str, list[float]] = {name: [] for name in loops}
    gc.disable()
    for number in range(num_steps):
        order = list(loops) if number % 2 else list(reversed(loops))
        for name in order:
            if num_procs > 1:
                dist.barrier()
            started = time.perf_counter()
            loops[name]()
            times_s[name].append(time.perf_counter() - started)
    if world.is_main:
        warm = num_steps // 5
        print(*(statistics.median(times_s[name][warm:]) for name in loops), flush=True)
    exit_process(0)


def measure(case: str, num_procs: int, dtype: str, num_steps: int, kind: str) -> tuple[float, float]:
    """Return the median seconds per step of the trainer and of the hand-written loop."""
    overrides = [
        *CASES[case],
        f"train.steps={num_steps * 10}",
        "train.eval_every=null",
        "checkpoint.every_steps=null",
        "logging.tensorboard=false",
        f"precision.dtype={dtype}",
        f"parallel.dp_replicate={num_procs}",
        "device=cpu",
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_attempt(Path(folder), overrides, num_procs)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        procs = []
        for rank in range(num_procs):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_procs),
                "LOCAL_WORLD_SIZE": str(num_procs),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_procs)),
            }
            worker_argv = folder, str(num_procs), dtype, str(num_steps), kind
            argv = [sys.executable, __file__, "--worker", *worker_argv]
            procs.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
        outputs = [proc.communicate(timeout=1200)[0] for proc in procs]
    if any(proc.returncode for proc in procs):
        raise SystemExit(f"a worker failed: {[proc.returncode for proc in procs]}")
    ours, theirs = outputs[0].split()[-2:]
    return float(ours), float(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="steps of each loop; the first fifth is warm-up"
    )
    parser.add_argument("--against", choices=OPPONENTS, default="autocast", help="the hand-written loop")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="the models")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, num_procs, dtype, num_steps, kind = args.worker
        worker(folder, int(num_procs), dtype, int(num_steps), kind)
        return
    print(f"| model | processes | type | {args.against} ms | trainkit ms | speed ratio | fixed cost ms |")
    print("|---|---|---|---|---|---|---|")
    for case in args.cases:
        for num_procs in (1, 2):
            for dtype in ("bf16",) if args.against == "bound" else ("fp32", "bf16"):
                num_steps = args.steps * (8 if case == SMALL else 2 if "," in case else 1)
                ours, theirs = measure(case, num_procs, dtype, num_steps, args.against)
                print(
                    f"| {case} | {num_procs} | {dtype} | {theirs * 1e3:.2f} | {ours * 1e3:.2f} "
                    f"| {theirs / ours:.3f} | {(ours - theirs) * 1e3:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
