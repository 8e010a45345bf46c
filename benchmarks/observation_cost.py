"""Measure how much observation slows a step: health sampler, progress, watchdog, and slow-rank detection.

    python -m benchmarks.observation_cost --pairs 2000

Two ranks train on this machine in pairs of steps; the order within a pair is random. One step of a pair runs
the observers of the pair's kind, and the other step runs none. The kinds are:

- heartbeats: the calls that record the progress of a step, and the watchdog's check once per second;
- a usual step: also measures the times of its rank;
- a step that reports, as every tenth step of a real run does: also adds the times of all ranks to the
  all-reduce and compares the times;
- control: no observers in either step, which shows the smallest difference that the machine can resolve.

For each kind, the benchmark prints the median ratio within a pair with a 95 % bootstrap interval, in wall
time and in CPU time of rank 0. The benchmark also prints the duration of each observer alone, and its share
of a step at the speed of a real run. A separate process samples a node's health, and no step waits for this
process.
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
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from tests.support.runs import environs, make_attempt
from trainkit.capabilities.health.sampler import HealthSampler
from trainkit.plan.launch import LaunchPlan, RequeuePolicy
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import RunDir

NUM_RANKS = 2
HEARTBEATS, USUAL, REPORT, OFF = "heartbeats alone", "a usual step", "a step that reports", "control"
KINDS = (HEARTBEATS, USUAL, REPORT, OFF)
CASES = {
    "small": ("model.num_layers=2", "data.seq_len=64"),
    "50 ms": ("model.num_layers=6", "model.dim=192", "data.seq_len=128"),
}
"""Maps a model to its config overrides; a step of the second model takes at least 50 ms on a core."""
HEALTH_EVERY_S = 10.0
WATCHDOG_EVERY_S = 1.0
ROUNDS = 2000


class NoProgress:
    """A replacement for Progress whose calls do nothing."""

    last_step_s = 0.0

    def enter(self, phase: str) -> None:
        """Do nothing."""

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""


class NoClock:
    """A replacement for StepClock that measures no times."""

    def begin_step(self, data_wait_s: float) -> None:
        """Do nothing."""

    def end_forward(self) -> None:
        """Do nothing."""

    def begin_update(self) -> None:
        """Do nothing."""

    def end_update(self) -> None:
        """Do nothing."""


class NoObservers:
    """A replacement for RankObservers without any observers."""

    values: ClassVar[dict[str, float]] = {}

    def add(self, step: int, times: Sequence[float], step_s: float) -> None:
        """Do nothing."""


class Switch:
    """Enables and disables all observers of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.watched = (trainer.progress, trainer.clock, trainer.observers)
        self.is_on = True

    def set(self, kind: str) -> None:
        """Enable the observers for a kind of step; all ranks must call this before the same step."""
        from trainkit.trainer import loop

        trainer, self.is_on = self.trainer, kind != OFF
        progress, clock, observers = self.watched
        trainer.progress = progress if self.is_on else NoProgress()
        has_times = kind in (USUAL, REPORT)
        trainer.clock, trainer.observers = (clock, observers) if has_times else (NoClock(), NoObservers())
        trainer.built.forward_backward.progress = trainer.progress
        loop.is_reported = lambda step, world: kind == REPORT

    def watch(self) -> None:
        """Check for hangs once per second, as the watchdog's thread does."""
        from trainkit.job.signals import StopRequest
        from trainkit.trainer.progress import RankInfo, Watchdog

        watchdog = Watchdog(self.trainer.attempt, RankInfo(0, 0, ""), self.watched[0], StopRequest())
        while True:
            time.sleep(WATCHDOG_EVERY_S)
            if self.is_on:
                watchdog.find_hang(time.monotonic(), RequeuePolicy())


def order(kinds: Sequence[str], num_pairs: int) -> list[tuple[str, bool]]:
    """Return the kind of each step's pair, and whether the step runs observers; equal on all ranks."""
    chance = random.Random(0)
    steps = []
    for kind in [*kinds] * num_pairs:
        pair = [(kind, True), (kind, False)]
        chance.shuffle(pair)
        steps += pair
    return steps


def run_rank(path: str, environ: dict[str, str], kinds: Sequence[str], num_pairs: int) -> None:
    """Train as one rank; rank 0 writes ``[kind, is_compared, wall_s, processor_s]`` for each step."""
    os.environ.update(environ)
    import torch
    import torch.distributed as dist

    from trainkit.job.signals import StopRequest
    from trainkit.trainer.progress import Progress
    from trainkit.trainer.step_clock import WINDOW
    from trainkit.trainer.worker import join_and_build

    torch.set_num_threads(1)
    run = RunDir(path)
    attempt, rank = run.attempt(1), int(environ["RANK"])
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    trainer = join_and_build(attempt, plan, StopRequest(), Progress())
    assert trainer is not None
    switch = Switch(trainer)
    threading.Thread(target=switch.watch, daemon=True).start()
    gc.disable()
    trainer.metrics.start()
    times = []
    for _ in range(2 * WINDOW):
        trainer.step()
    for kind, is_compared in order(kinds, num_pairs):
        switch.set(kind if is_compared else OFF)
        began_s, began_processor_s = time.perf_counter(), time.process_time()
        trainer.step()
        wall_s, processor_s = time.perf_counter() - began_s, time.process_time() - began_processor_s
        times.append([kind, is_compared, wall_s, processor_s])
    if rank == 0:
        write_json(run.path / "times.json", {"steps": times, "parts": parts(switch)})
    trainer.close()
    dist.destroy_process_group()


def typical_s(call: Callable[[], object]) -> float:
    """Return the median duration of a call, in seconds."""
    times = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return median(times)


def parts(switch: Switch) -> dict[str, float]:
    """Return the duration of each observer alone, in seconds."""
    from trainkit.capabilities.slow_ranks.compare import SlowRanks
    from trainkit.capability import TimedRanks
    from trainkit.job.signals import StopRequest
    from trainkit.trainer.progress import RankInfo, Watchdog
    from trainkit.trainer.step_clock import WINDOW, StepClock

    progress, _, _ = switch.watched
    layout = switch.trainer.plan.layout
    clock = StepClock(switch.trainer.world, layout)

    def record_progress() -> None:
        progress.begin_step(1)
        progress.enter("forward")
        progress.enter("backward")
        progress.enter("update")
        progress.end_step()

    ranks = SlowRanks(TimedRanks(layout, ["node"] * layout.world_size, WINDOW, on_gpu=False))

    def compare() -> None:
        for step in range(WINDOW):
            clock.begin_step(0.0)
            clock.end_forward()
            clock.begin_update()
            clock.end_update()
            times = [] if step < WINDOW - 1 else clock.report().tolist()
            ranks.compare(step, times, 0.05)

    watchdog = Watchdog(switch.trainer.attempt, RankInfo(0, 0, ""), progress, StopRequest())
    return {
        "progress, per step": typical_s(record_progress),
        "times of slow ranks, per step": typical_s(compare) / WINDOW,
        "watchdog, per check": typical_s(lambda: watchdog.find_hang(time.monotonic(), RequeuePolicy())),
    }


def sampler_s(path: str, rounds: int = 50) -> float:
    """Return the median CPU time for one sample of a node's health, in seconds."""
    sampler, times = HealthSampler(RunDir(path).attempt(1), "this", HEALTH_EVERY_S), []
    sampler.file.parent.mkdir()
    for _ in range(rounds):
        began_s = time.process_time()
        sampler.append()
        times.append(time.process_time() - began_s)
    return median(times)


def interval(ratios: Sequence[float], seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    chance = random.Random(seed)
    found = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return found[round(0.025 * rounds)], found[round(0.975 * rounds) - 1]


def measure(overrides: Sequence[str], kinds: Sequence[str], num_pairs: int) -> dict[str, Any]:
    """Return the step durations of a model, and the durations of its observers."""
    total = 100 * num_pairs
    options = [*overrides, f"train.steps={total}", "parallel.dp_replicate=2", "train.log_every=1000000"]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        attempt = make_attempt(Path(folder) / "run", options, NUM_RANKS)
        path = str(attempt.run.path)
        ranks = [
            spawn.Process(target=run_rank, args=(path, environ, kinds, num_pairs), daemon=True)
            for environ in environs(attempt, NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("a rank failed")
        found: dict[str, Any] = read_json(attempt.run.path / "times.json")
        found["parts"]["health, per sample"] = sampler_s(path)
        return found


def show(name: str, kinds: Sequence[str], found: dict[str, Any]) -> None:
    """Print the share of each observer in the step time."""
    from trainkit.trainer.step_clock import WINDOW

    steps = found["steps"]
    pairs = [sorted(steps[i : i + 2], key=lambda step: step[1]) for i in range(0, len(steps), 2)]
    step_s = median(first[2] for first, _ in pairs)
    print(
        f"{name}: {1e3 * step_s:.1f} ms a step without, {len(pairs) // len(kinds)} pairs of each kind",
        flush=True,
    )
    for index, clock in ((2, "wall time"), (3, "processor time of rank 0")):
        medians = {}
        for kind in kinds:
            ratios = [compared[index] / other[index] for other, compared in pairs if other[0] == kind]
            low, high = interval(ratios)
            medians[kind], bounds = 100 * (median(ratios) - 1), (100 * (low - 1), 100 * (high - 1))
            print(f"  {kind}, {clock}: {medians[kind]:+.2f} % ({bounds[0]:+.2f} to {bounds[1]:+.2f})")
        if {USUAL, REPORT} <= medians.keys():
            mean = (medians[REPORT] + (WINDOW - 1) * medians[USUAL]) / WINDOW
            print(f"  one in {WINDOW} reports, {clock}: {mean:+.2f} %")
    share = 0.0
    for part, seconds in found["parts"].items():
        every_s = {"watchdog, per check": WATCHDOG_EVERY_S, "health, per sample": HEALTH_EVERY_S}.get(part)
        own = seconds / (every_s or step_s)
        share += own
        print(f"  {part}: {1e6 * seconds:.1f} us, {100 * own:.4f} % of a step")
    print(f"  the parts together: {100 * share:.3f} % of a step")


def main() -> int:
    """Measure every model; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2000, help="pairs of steps of each kind")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="a file for the times, as JSON")
    args = parser.parse_args()
    kinds = args.kind or KINDS
    results = {}
    for name in args.case or CASES:
        results[name] = measure(CASES[name], kinds, args.pairs)
        show(name, kinds, results[name])
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
