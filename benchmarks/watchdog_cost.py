"""What the watchdog costs a step: the calls that say where the rank is, and the thread that looks.

    python benchmarks/watchdog_cost.py

One process trains in blocks of steps, in turns with the watchdog and without it: then the calls do nothing
and no thread looks. The thread looks 10 times a second here, the real one once. Printed are the medians over
the blocks of each kind, the median of the ratios of blocks that follow each other, the time of the calls and
of a look alone, and what share of a step that makes with one look a second, for models whose steps are far
shorter than any that matters. It is the processor time of the whole process, on one thread of torch: other
work on the machine changes that less than the time on the clock.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from training_loop import CASES, SMALL, make_attempt

NANO = ["model.preset=nano", "data.seq_len=64", "train.device_batch_size=4", "train.global_batch_size=16"]
LOOK_EVERY_S = 0.1


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
    from trainkit.trainer.distributed import World, select_device
    from trainkit.trainer.progress import Progress
    from trainkit.trainer.task import build_task
    from trainkit.trainer.worker import build_trainer

    attempt = make_attempt(folder, overrides, 1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = World(0, 1, select_device("cpu", 0), None, None)
    return build_trainer(attempt, config, plan, world, build_task(config), StopRequest(), Progress())[0]


def progress_watch(progress):
    """What looks, with the limits of the default config."""
    from trainkit.plan.launch import RequeuePolicy
    from trainkit.trainer.watchdog import HangDetector

    return HangDetector(progress, RequeuePolicy(), lambda: False)


def watch(progress, ended: threading.Event) -> None:
    """Look as the watchdog's thread does."""
    looks = progress_watch(progress)
    while not ended.wait(LOOK_EVERY_S):
        assert looks.look(time.monotonic()) is None


def time_steps(trainer, progress, num_steps: int) -> float:
    """Processor seconds of a step, the mean of a block."""
    trainer.progress = progress
    started = time.process_time()
    for _ in range(num_steps):
        trainer.step()
    return (time.process_time() - started) / num_steps


def time_watched(trainer, progress, num_steps: int) -> float:
    """The same while a thread looks."""
    ended = threading.Event()
    thread = threading.Thread(target=watch, args=(progress, ended))
    thread.start()
    try:
        return time_steps(trainer, progress, num_steps)
    finally:
        ended.set()
        thread.join()


def time_calls(progress, num_rounds: int = 2000) -> float:
    """Seconds of the calls of one step with one microbatch."""
    times_s = []
    for step in range(num_rounds):
        started = time.perf_counter()
        progress.begin_step(step)
        progress.enter("forward")
        progress.enter("backward")
        progress.enter("update")
        progress.end_step()
        times_s.append(time.perf_counter() - started)
    return median(times_s)


def time_look(progress, num_rounds: int = 2000) -> float:
    """Seconds of one look."""
    looks = progress_watch(progress)
    times_s = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        looks.look(time.monotonic())
        times_s.append(time.perf_counter() - started)
    return median(times_s)


def measure(overrides: list[str], blocks: int, num_steps: int) -> tuple[float, ...]:
    """Medians: seconds of a step with the watchdog, without, their ratio; seconds of the calls, of a look."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Path(folder), overrides)
        watched, calm = trainer.progress, NoPulse()
        gc.disable()
        time_steps(trainer, calm, num_steps)
        with_s, without_s = [], []
        for number in range(blocks):
            if number % 2:
                with_s.append(time_watched(trainer, watched, num_steps))
            without_s.append(time_steps(trainer, calm, num_steps))
            if not number % 2:
                with_s.append(time_watched(trainer, watched, num_steps))
        trainer.batches.close()
        trainer.saver.close()
        ratio = median(mine / other for mine, other in zip(with_s, without_s, strict=True))
        return median(with_s), median(without_s), ratio, time_calls(watched), time_look(watched)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    args = parser.parse_args()
    print("| model | with ms | without ms | difference % | calls of a step us | a look us | both % |")
    print("|---|---|---|---|---|---|---|")
    for name, overrides in ((SMALL, CASES[SMALL]), ("nano", NANO)):
        settings = [
            *overrides,
            f"train.steps={10 * args.blocks * args.steps}",
            *("train.eval_every=null", "train.log_every=1000", "checkpoint.every_steps=null"),
            *("logging.tensorboard=false", "precision.dtype=fp32", "device=cpu"),
        ]
        with_s, without_s, ratio, calls_s, look_s = measure(settings, args.blocks, args.steps)
        print(
            f"| {name} | {with_s * 1e3:.3f} | {without_s * 1e3:.3f} | {(ratio - 1) * 100:+.2f} "
            f"| {calls_s * 1e6:.2f} | {look_s * 1e6:.1f} | {(calls_s / without_s + look_s) * 100:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
