"""Measures what watching a run costs a step: health sampler, progress and watchdog, and times of slow ranks.

    python -m benchmarks.observation_cost --blocks 200

Two ranks train on this machine in blocks of steps, alternately with everything on and off, in an order that
cancels drift. On: the calls that record the progress of a step, the watchdog's check once per second, the
times of every rank in the step's all-reduce and their comparison, and a sampler of the node's health in a
process of its own, every `--sample-s` seconds, which is more often than in a run (`logging.health_every_s`).
Off: none of them. Prints the median ratio of neighbouring blocks with a bootstrap interval of 95 %, in wall
time and in processor time of the ranks; then each part alone, and the share of a step that the parts make up
at the pace of a real run. On a machine that is not quiet, blocks differ by more than that share.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.runs import environs, make_attempt
from trainkit.config import read_effective
from trainkit.job.node.health import HealthSampler
from trainkit.plan.launch import LaunchPlan, RequeuePolicy
from trainkit.rundir import RunDir, append_jsonl, read_json, write_json

NUM_RANKS = 2
CASES = {
    "small": ("model.num_layers=2", "data.seq_len=64"),
    "50 ms": ("model.num_layers=6", "model.dim=192", "data.seq_len=128"),
}
"""Overrides of each model; the second one's steps take 50 ms or more on a core."""
HEALTH_EVERY_S = 10.0
WATCHDOG_EVERY_S = 1.0
ROUNDS = 2000


class NoProgress:
    """A Progress whose calls do nothing."""

    last_step_s = 0.0

    def enter(self, phase: str) -> None:
        """Do nothing."""

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""


class NoClock:
    """A StepClock without times."""

    def begin_step(self, data_wait_s: float) -> None:
        """Do nothing."""

    def end_forward(self) -> None:
        """Do nothing."""

    def begin_update(self) -> None:
        """Do nothing."""

    def end_update(self) -> None:
        """Do nothing."""

    def report(self) -> Any:
        """No terms for the all-reduce."""
        import torch

        return torch.zeros(0, dtype=torch.float64)


class Switch:
    """Turns all that watches a trainer on and off."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.watched = (trainer.progress, trainer.clock, trainer.slow_ranks)
        self.is_on = True

    def set(self, is_on: bool) -> None:
        """Turn everything on or off; all ranks must do so before the same step."""
        from trainkit.trainer import loop
        from trainkit.trainer.slow_ranks import NUM_TIMES

        trainer, self.is_on = self.trainer, is_on
        trainer.progress, trainer.clock, trainer.slow_ranks = (
            self.watched if is_on else (NoProgress(), NoClock(), None)
        )
        trainer.forward_backward._progress = trainer.progress
        loop.NUM_TIMES = NUM_TIMES if is_on else 0

    def watch(self) -> None:
        """Check for hangs once per second, as the watchdog's thread does."""
        from trainkit.trainer.watchdog import HangDetector

        detector = HangDetector(self.watched[0], RequeuePolicy(), lambda: False)
        while True:
            time.sleep(WATCHDOG_EVERY_S)
            if self.is_on:
                detector.check(time.monotonic())


def run_rank(path: str, environ: dict[str, str], blocks: int, num_steps: int, samples: Event) -> None:
    """Train in blocks as one rank; rank 0 writes its times, as ``[is_on, wall_s, processor_s]`` a block."""
    os.environ.update(environ)
    import torch

    from trainkit.job.signals import StopRequest
    from trainkit.trainer.progress import Progress
    from trainkit.trainer.worker import join_and_build

    torch.set_num_threads(1)
    run = RunDir(path)
    attempt, rank = run.attempt(1), int(environ["RANK"])
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    joined = join_and_build(attempt, read_effective(attempt.config_file), plan, StopRequest(), Progress())
    assert joined is not None
    trainer = joined[0]
    switch = Switch(trainer)
    threading.Thread(target=switch.watch, daemon=True).start()
    gc.disable()
    trainer.metrics.start()
    times = []
    for number in range(blocks + 2):
        is_on = number % 4 in (0, 3)  # on off off on
        switch.set(is_on)
        if rank == 0:
            (samples.set if is_on else samples.clear)()
        began_s, began_processor_s = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            trainer.step()
        wall_s = (time.perf_counter() - began_s) / num_steps
        times.append([is_on, wall_s, (time.process_time() - began_processor_s) / num_steps])
    samples.clear()
    if rank == 0:
        switch.set(True)
        write_json(run.path / "times.json", {"blocks": times[2:], "parts": parts(switch)})
    trainer.close()


def sample(path: str, interval_s: float, samples: Event) -> None:
    """Sample the health of this machine while the blocks are on, as the agent of a node does."""
    sampler = make_sampler(path)
    while True:
        samples.wait()
        time.sleep(interval_s)
        append_jsonl(sampler.file, sampler.sample())


def make_sampler(path: str) -> HealthSampler:
    """The sampler of this machine, which appends to a file as in a run."""
    sampler = HealthSampler(RunDir(path).attempt(1), "this", HEALTH_EVERY_S)
    sampler.file.parent.mkdir(exist_ok=True)
    return sampler


def typical_s(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return median(times)


def parts(switch: Switch) -> dict[str, float]:
    """Seconds of each part of the watching alone."""
    from trainkit.trainer.slow_ranks import WINDOW, SlowRanks, StepClock
    from trainkit.trainer.watchdog import HangDetector

    progress, _, _ = switch.watched
    layout = switch.trainer.plan.layout
    clock = StepClock(switch.trainer.world, layout)

    def record_progress() -> None:
        progress.begin_step(1)
        progress.enter("forward")
        progress.enter("backward")
        progress.enter("update")
        progress.end_step()

    def take_times() -> None:
        clock.begin_step(0.0)
        clock.end_forward()
        clock.begin_update()
        clock.end_update()
        clock.report()

    ranks = SlowRanks(layout, on_gpu=False)

    def compare() -> None:
        for step in range(WINDOW):
            ranks.add(step, [0.001, 0.01] * NUM_RANKS, 0.05)

    detector = HangDetector(progress, RequeuePolicy(), lambda: False)
    return {
        "progress, per step": typical_s(record_progress),
        "times of slow ranks, per step": typical_s(take_times) + typical_s(compare) / WINDOW,
        "watchdog, per check": typical_s(lambda: detector.check(time.monotonic())),
    }


def sampler_s(path: str, rounds: int = 50) -> float:
    """Median processor seconds of one sample of the node's health."""
    sampler, times = make_sampler(path), []
    for _ in range(rounds):
        began_s = time.process_time()
        append_jsonl(sampler.file, sampler.sample())
        times.append(time.process_time() - began_s)
    return median(times)


def interval(ratios: Sequence[float], seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """The interval of 95 % of the median, by bootstrap."""
    chance = random.Random(seed)
    found = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return found[round(0.025 * rounds)], found[round(0.975 * rounds) - 1]


def measure(overrides: Sequence[str], blocks: int, num_steps: int, sample_s: float) -> dict[str, Any]:
    """The times of the blocks of a model, and of the parts."""
    total = 10 * blocks * num_steps
    options = [*overrides, f"train.steps={total}", "parallel.dp_replicate=2", "train.log_every=1000000"]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        attempt = make_attempt(Path(folder) / "run", options, NUM_RANKS)
        path, samples = str(attempt.run.path), spawn.Event()
        sampler = spawn.Process(target=sample, args=(path, sample_s, samples), daemon=True)
        sampler.start()
        ranks = [
            spawn.Process(target=run_rank, args=(path, environ, blocks, num_steps, samples), daemon=True)
            for environ in environs(attempt, NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        sampler.kill()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("a rank failed")
        found: dict[str, Any] = read_json(attempt.run.path / "times.json")
        found["parts"]["health, per sample"] = sampler_s(path)
        return found


def show(name: str, found: dict[str, Any], sample_s: float) -> None:
    """Print the shares of a step."""
    blocks = found["blocks"]
    pairs = [(blocks[i], blocks[i + 1]) for i in range(0, len(blocks) - 1, 2)]
    step_s = median(wall_s for is_on, wall_s, _ in blocks if not is_on)
    print(f"{name}: {1e3 * step_s:.1f} ms a step without, {len(pairs)} pairs of blocks", flush=True)
    for index, kind in ((1, "wall time"), (2, "processor time of rank 0")):
        ratios = []
        for first, second in pairs:
            on, off = (first, second) if first[0] else (second, first)
            ratios.append(on[index] / off[index])
        low, high = interval(ratios)
        difference, bounds = 100 * (median(ratios) - 1), (100 * (low - 1), 100 * (high - 1))
        print(f"  all on, {kind}: {difference:+.2f} % ({bounds[0]:+.2f} to {bounds[1]:+.2f})")
    share = 0.0
    for part, seconds in found["parts"].items():
        every_s = {"watchdog, per check": WATCHDOG_EVERY_S, "health, per sample": HEALTH_EVERY_S}.get(part)
        own = seconds / (every_s or step_s)
        share += own
        print(f"  {part}: {1e6 * seconds:.1f} us, {100 * own:.4f} % of a step")
    print(f"  the parts together: {100 * share:.3f} % of a step (samples every {sample_s:g} s above)")


def main() -> int:
    """Measure every model; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=200, help="blocks of steps, a multiple of 4")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--sample-s", type=float, default=1.0, help="seconds between samples of the health")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="a file for the times, as JSON")
    args = parser.parse_args()
    results = {}
    for name in args.case or CASES:
        results[name] = measure(CASES[name], args.blocks // 4 * 4, args.steps, args.sample_s)
        show(name, results[name], args.sample_s)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
