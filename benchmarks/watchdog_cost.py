"""What the watchdog costs a step: the calls that say where the rank is, and the thread that looks.

    python benchmarks/watchdog_cost.py

One process trains in blocks of steps, in turns with the watchdog and without it: then the calls do nothing
and no thread looks. The thread looks 100 times a second here, the real one once. Printed are the medians over
all steps of each kind, the median of the differences between blocks that follow each other, and the time of
the calls alone, for models whose steps are far shorter than any that matters; on one thread, so that other
work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from pathlib import Path

from training_loop import CASES, SMALL, make_attempt

NANO = ["model.preset=nano", "data.seq_len=64", "train.device_batch_size=4", "train.global_batch_size=16"]
LOOK_EVERY_S = 0.01


class NoPulse:
    """Takes the calls and does nothing."""

    def enter(self, phase):
        pass

    def begin_step(self, step):
        pass

    def end_step(self):
        pass


def build(folder: Path, overrides: list[str]):
    """A trainer as one process."""
    from trainkit.config import read_effective
    from trainkit.job.signals import StopRequest
    from trainkit.plan.launch import LaunchPlan
    from trainkit.rundir import read_json
    from trainkit.trainer.device import select_device
    from trainkit.trainer.distributed import World
    from trainkit.trainer.pulse import Pulse
    from trainkit.trainer.tasks import build_task
    from trainkit.trainer.worker import build_trainer

    attempt = make_attempt(folder, overrides, 1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = World(0, 1, select_device("cpu", 0), None, None)
    return build_trainer(attempt, config, plan, world, build_task(config), StopRequest(), Pulse())[0]


def watch(pulse, ended: threading.Event) -> None:
    """Look as the watchdog's thread does."""
    from trainkit.plan.launch import RequeuePolicy
    from trainkit.trainer.watchdog import ProgressWatch

    looks = ProgressWatch(pulse, RequeuePolicy(), lambda: False)
    while not ended.wait(LOOK_EVERY_S):
        assert looks.look(time.monotonic()) is None


def time_steps(trainer, pulse, num_steps: int) -> list[float]:
    """Seconds of each step."""
    trainer.pulse = pulse
    times_s = []
    for _ in range(num_steps):
        started = time.perf_counter()
        trainer.advance()
        times_s.append(time.perf_counter() - started)
    return times_s


def time_calls(pulse, num_rounds: int = 2000) -> float:
    """Seconds of the calls of one step with one microbatch."""
    times_s = []
    for step in range(num_rounds):
        started = time.perf_counter()
        pulse.begin_step(step)
        pulse.enter("forward")
        pulse.enter("backward")
        pulse.enter("update")
        pulse.end_step()
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s)


def time_watched(trainer, pulse, num_steps: int) -> list[float]:
    """Seconds of each step while a thread looks."""
    ended = threading.Event()
    thread = threading.Thread(target=watch, args=(pulse, ended))
    thread.start()
    try:
        return time_steps(trainer, pulse, num_steps)
    finally:
        ended.set()
        thread.join()


def measure(overrides: list[str], blocks: int, num_steps: int) -> tuple[float, float, float, float]:
    """Medians: seconds of a step with the watchdog, without it, and of the calls alone; and the ratio."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Path(folder), overrides)
        watched, calm = trainer.pulse, NoPulse()
        gc.disable()
        time_steps(trainer, calm, num_steps)
        median = statistics.median
        with_s, without_s, ratios = [], [], []
        for number in range(blocks):
            if number % 2:
                mine, other = time_watched(trainer, watched, num_steps), time_steps(trainer, calm, num_steps)
            else:
                other, mine = time_steps(trainer, calm, num_steps), time_watched(trainer, watched, num_steps)
            with_s += mine
            without_s += other
            ratios.append(median(mine) / median(other))
        trainer.batches.close()
        trainer.saver.close()
        return median(with_s), median(without_s), time_calls(watched), median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    args = parser.parse_args()
    print("| model | with ms | without ms | difference % | calls alone us | of a step % |")
    print("|---|---|---|---|---|---|")
    for name, overrides in ((SMALL, CASES[SMALL]), ("nano", NANO)):
        settings = [
            *overrides,
            f"train.steps={10 * args.blocks * args.steps}",
            *("train.eval_every=null", "train.log_every=1000", "checkpoint.every_steps=null"),
            *("logging.tensorboard=false", "precision.dtype=fp32", "device=cpu"),
        ]
        with_s, without_s, calls_s, ratio = measure(settings, args.blocks, args.steps)
        print(
            f"| {name} | {with_s * 1e3:.3f} | {without_s * 1e3:.3f} | {(ratio - 1) * 100:+.2f} "
            f"| {calls_s * 1e6:.2f} | {calls_s / without_s * 100:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
