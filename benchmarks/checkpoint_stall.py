"""Measure how long a save blocks training, compared with `torch.save` plus fsync of the same state.

    python benchmarks/checkpoint_stall.py

The state is 500 MB of float32 in one process. For each save, the script measures how long the training thread
is blocked: the duration of the call plus the wait before the optimizer may change the state. Between the call
and the wait, matrix products represent the forward and backward pass of the next step. The script also times
the matrix products without a save, to show the cost of the background copy.

After the wait, the script changes every tensor in place. The published checkpoint must contain the values
that the tensors had at the time of the call. The two kinds of save alternate. The first round is a warm-up
and is reported separately.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from trainkit.plan.keep import KeepRule
from trainkit.run.manifest import Checkpoint, find_damage
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.loader import load_tensors
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.distributed import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"), mesh=None, checkpoint_group=None)


def make_state(num_megabytes: int) -> dict[str, torch.Tensor]:
    """Return tensors of 4 MB each with the requested total size."""
    return {f"model.layer{index}": torch.randn(1000, 1000) for index in range(num_megabytes // 4)}


def compute(weights: torch.Tensor, seconds: float) -> float:
    """Run matrix products for `seconds`; return the number of products per second."""
    started = time.perf_counter()
    count = 0
    while time.perf_counter() - started < seconds:
        weights @ weights
        count += 1
    return count / (time.perf_counter() - started)


def save_with_torch(state: dict[str, torch.Tensor], path: Path) -> float:
    """Return the seconds for which `torch.save` plus fsync blocks the caller."""
    started = time.perf_counter()
    with path.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return time.perf_counter() - started


def save_with_trainkit(saver: CheckpointSaver, step: int, weights: torch.Tensor) -> tuple[float, float]:
    """Return how many seconds an asynchronous save blocks, and the products per second during the save."""
    started = time.perf_counter()
    saver.save(SaveRequest(step, {}, is_best=False, reason="bench"), blocking=False)
    stall_s = time.perf_counter() - started
    speed = compute(weights, 0.5)
    started = time.perf_counter()
    saver.wait_until_staged()
    return stall_s + time.perf_counter() - started, speed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    state = make_state(args.megabytes)
    weights = torch.randn(512, 512)
    stalls: dict[str, list[float]] = {"torch.save": [], "trainkit": []}
    speeds: dict[str, list[float]] = {"alone": [], "during": []}
    unchanged = 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = RunDir(folder)
        saver = CheckpointSaver(run.attempt(1), WORLD, state, KeepRule(last=1))
        saver.allocate_buffers()  # the training loop calls this after its first step
        time.sleep(5.0)
        for step in range(1, args.rounds + 1):
            stalls["torch.save"].append(save_with_torch(state, Path(folder) / "plain.pt"))
            speeds["alone"].append(compute(weights, 0.5))
            expected = {name: tensor.clone() for name, tensor in state.items()}
            stall_s, speed = save_with_trainkit(saver, step, weights)
            for tensor in state.values():
                tensor.add_(1.0)
            stalls["trainkit"].append(stall_s)
            speeds["during"].append(speed)
            saver.finish()
            unchanged += is_intact(Checkpoint(run.checkpoint_dir(step), step), expected)
        saver.close()
    plain, ours = (statistics.median(stalls[name][1:]) for name in stalls)
    alone, during = (statistics.median(speeds[name][1:]) for name in speeds)
    print(
        "| state MB | torch.save + fsync s | trainkit stall s | ratio | first save s | compute speed during |"
    )
    print("|---|---|---|---|---|---|")
    print(
        f"| {args.megabytes} | {plain:.3f} | {ours:.4f} | {ours / plain:.3f} | {stalls['trainkit'][0]:.3f} "
        f"| {during / alone:.2f} |"
    )
    print(f"{unchanged} of {args.rounds} checkpoints contain the values at the time of the call")
    return 0 if unchanged == args.rounds else 1


def is_intact(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> bool:
    """Return whether a checkpoint is intact and contains exactly the expected values."""
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    load_tensors(checkpoint, found, WORLD)
    return not find_damage(checkpoint) and all(torch.equal(found[name], expected[name]) for name in expected)


if __name__ == "__main__":
    sys.exit(main())
