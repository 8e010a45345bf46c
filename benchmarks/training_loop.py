"""Compare the speed of the trainer with a hand-written loop that has the same model and batch.

    python benchmarks/training_loop.py

Both loops run in the same processes, with alternating steps, so that changes in machine speed affect both
loops equally. The hand-written loop keeps its batch in memory and has no logging, schedule or signal
handling. With several processes, the hand-written loop uses DistributedDataParallel, and the trainer uses
`replicate`. The benchmark prints the median step times and their ratio for three cases:

- the model `tiny` with 32 samples per step;
- a step with 4 samples per process, where communication matters more;
- a tiny model; the relevant number is the `fixed cost`, which is the difference of the medians.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

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


def hand_written_step(trainer, task, num_procs: int, dtype_name: str):
    """Run one step of an optimized hand-written loop: forward, backward, clipping, optimizer step."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from trainkit.trainer.models.decoder import Decoder

    model = Decoder(task.shape, trainer.config.data.seq_len)
    module = DistributedDataParallel(model) if num_procs > 1 else model
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    micros = next(trainer.batches).microbatches
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]

    def step() -> None:
        for number, micro in enumerate(micros, 1):
            last = number == len(micros)
            with nullcontext() if last or num_procs == 1 else module.no_sync():
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    logits = module(micro.tokens, micro.sample_keys)
                loss = F.cross_entropy(logits.float().flatten(0, 1), micro.labels.flatten())
                (loss / len(micros)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(folder: str, num_procs: int, dtype_name: str, num_steps: int) -> None:
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
    loops = {
        "trainkit": trainer.step,
        "hand-written": hand_written_step(trainer, task, num_procs, dtype_name),
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


def measure(case: str, num_procs: int, dtype: str, num_steps: int) -> tuple[float, float]:
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
            argv = [sys.executable, __file__, "--worker", folder, str(num_procs), dtype, str(num_steps)]
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
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, num_procs, dtype, num_steps = args.worker
        worker(folder, int(num_procs), dtype, int(num_steps))
        return
    print("| model | processes | type | hand-written ms | trainkit ms | speed ratio | fixed cost ms |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        for num_procs in (1, 2):
            for dtype in ("fp32", "bf16"):
                num_steps = args.steps * (8 if case == SMALL else 2 if "," in case else 1)
                ours, theirs = measure(case, num_procs, dtype, num_steps)
                print(
                    f"| {case} | {num_procs} | {dtype} | {theirs * 1e3:.2f} | {ours * 1e3:.2f} "
                    f"| {theirs / ours:.3f} | {(ours - theirs) * 1e3:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
