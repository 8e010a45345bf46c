"""Measures what the watchdog costs per step: the calls that record progress, and the thread that checks it.

    python benchmarks/watchdog_cost.py

One process trains in blocks of steps, alternately with the watchdog and without it, when the calls do nothing
and no thread checks. The thread checks 10 times per second here, and once per second in a real run. Prints
the medians over the blocks of each kind, the median ratio of consecutive blocks, the time of the calls and of
one check alone, and the share of a step that they make up with one check per second, for models whose steps
are much shorter than real ones. All times are processor time of the process, with one torch thread, since
other work on the machine affects it less than wall time.
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
    """A Progress whose calls do nothing."""

    def enter(self, phase):
        pass

    def begin_step(self, step):
        pass

    def end_step(self):
        pass


def build(folder: Path, overrides: list[str]):
    """A trainer in a single process."""
    from trainkit.config import read_effective
    from trainkit.job.signals import StopRequest
    from trainkit.plan.launch import LaunchPlan
    from trainkit.rundir import read_json
    from trainkit.trainer.distributed import World, select_device
    from trainkit.trainer.progress import Progress
    from trainkit.trainer.tasks import build_task
    from trainkit.trainer.worker import build_trainer

    attempt = make_attempt(folder, overrides, 1)
    config = read_effective(attempt.config_file)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    world = World(0, 1, select_device("cpu", 0), None, None)
    return build_trainer(attempt, config, plan, world, build_task(config), StopRequest(), Progress())[0]


def progress_watch(progress):
    """The hang detector, with the limits of the default config."""
    from trainkit.plan.launch import RequeuePolicy
    from trainkit.trainer.watchdog import HangDetector

    return HangDetector(progress, RequeuePolicy(), lambda: False)


def watch(progress, ended: threading.Event) -> None:
    """Check for hangs as the watchdog's thread does."""
    looks = progress_watch(progress)
    while not ended.wait(LOOK_EVERY_S):
        assert looks.look(time.monotonic()) is None


def time_steps(trainer, progress, num_steps: int) -> float:
    """Processor seconds per step, averaged over a block."""
    trainer.progress = progress
    started = time.process_time()
    for _ in range(num_steps):
        trainer.step()
    return (time.process_time() - started) / num_steps


def time_watched(trainer, progress, num_steps: int) -> float:
    """`time_steps` while a thread checks for hangs."""
    ended = threading.Event()
    thread = threading.Thread(target=watch, args=(progress, ended))
    thread.start()
    try:
        return time_steps(trainer, progress, num_steps)
    finally:
        ended.set()
        thread.join()


def time_calls(progress, num_rounds: int = 2000) -> float:
    """Seconds of the progress calls in one step with one microbatch."""
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
    """Seconds of one check."""
    looks = progress_watch(progress)
    times_s = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        looks.look(time.monotonic())
        times_s.append(time.perf_counter() - started)
    return median(times_s)


def measure(overrides: list[str], blocks: int, num_steps: int) -> tuple[float, ...]:
    """Medians: seconds of a step with and without the watchdog, their ratio, seconds of calls and check."""
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
