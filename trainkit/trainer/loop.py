"""The training loop."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.errors import EXIT_OK, EXIT_STOPPED, DivergedError
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir
from trainkit.trainer.batches import PrefetchedBatches, StepBatch
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.checkpoint.state import Progress
from trainkit.trainer.distributed import World, note_event
from trainkit.trainer.evaluate import Evaluator
from trainkit.trainer.forward_backward import Passes
from trainkit.trainer.metrics import Metrics
from trainkit.trainer.optimizer import ShardedAdamW, learning_rate
from trainkit.trainer.parallel.stages import TiedEnds
from trainkit.trainer.precision import LossScale
from trainkit.trainer.profiler import ProfileWindow
from trainkit.trainer.progress import Pulse
from trainkit.trainer.step_sync import Readout, StartedSum, StepReport, any_rank, pack, sum_over_ranks

log = getLogger(__name__)
GC_EVERY_STEPS = 100


@dataclass
class Trainer:
    """One attempt at a training: everything is built, `train` runs it to one of its ends."""

    run: RunDir
    attempt: int
    config: RunConfig
    plan: LaunchPlan
    world: World
    stop: StopRequest
    pulse: Pulse
    parts: Sequence[nn.Module]
    """What of the model this rank has: all of it, or some stages of a pipeline."""
    passes: Passes
    tied_ends: TiedEnds | None
    optimizer: ShardedAdamW
    loss_scale: LossScale
    progress: Progress
    total_steps: int
    batches: PrefetchedBatches
    evaluator: Evaluator | None
    saver: CheckpointSaver
    metrics: Metrics
    profiler: ProfileWindow
    manifest_record: dict[str, Any]
    """What the manifest of every checkpoint of this attempt says besides the progress."""
    _steps_done: int = 0
    """By this attempt."""
    _is_best: bool = False
    """Whether the state as it is now has the best value so far of `checkpoint.best_metric`."""
    _best_in_flight: int | None = None
    """Step of a best checkpoint that may still be being written."""
    _published_best: tuple[float | None, int | None] = (None, None)
    """Value and step of the best checkpoint that is known to be there."""
    _last_save_s: float = 0.0

    def train(self) -> int:
        """Train until the end, a stop, or divergence; returns the worker's exit code.

        Raises DivergedError after too many steps in a row without a finite loss and gradient, and
        CheckpointError when the last state cannot be saved.
        """
        self.pulse.enter("begin")
        if any_rank(bool(self.stop), self.world):
            return self._end_stopped("asked to stop during start-up")
        if self._eval_due() and not self._evaluate()[0]:
            return self._end_stopped("asked to stop during validation")
        if self._is_best:
            # The state is that of the checkpoint which this attempt began from.
            self.saver.mark_best()
            self._is_best = False
        self._published_best = self.progress.best_value, self.progress.best_step
        gc.collect()
        gc.freeze()
        gc.disable()
        self._last_save_s = time.monotonic()
        self.metrics.start()
        while self.progress.step < self.total_steps:
            exit_code = self.advance()
            if exit_code is not None:
                return exit_code
        return self._end_finished()

    def advance(self) -> int | None:
        """One step and what follows from it; returns the exit code when the training stops here."""
        report, lr = self._step()
        completed, val_loss = self._evaluate() if self._eval_due() else (True, None)
        self._record(report, lr, val_loss)
        ended = self.progress.step == self.total_steps
        if not completed or (report.stop and not ended):
            return self._end_stopped(f"asked to stop ({self.stop.signal_name or 'by another rank'})")
        if self.progress.step == self.config.train.stop_at_step and not ended:
            return self._end_stopped("train.stop_at_step reached")
        self._save_if_due(report)
        return None

    def _step(self) -> tuple[StepReport, float]:
        """One optimizer step; nothing here waits for the device before the update is enqueued."""
        step = self.progress.step + 1
        lr = learning_rate(step, self.total_steps, self.plan.lr, self.config.schedule)
        self.pulse.begin_step(step)
        self.profiler.before(step)
        waiting = time.monotonic()
        batch = next(self.batches)
        data_wait_s = time.monotonic() - waiting
        report = self._update(*self._gradient(batch, data_wait_s), lr)
        self._count(batch, report)
        self.pulse.end_step()
        self.profiler.after(step)
        if step % GC_EVERY_STEPS == 0:
            # On all ranks at the same step: a collection at a random time makes one rank a straggler.
            gc.collect(1)
        return report, lr

    def _gradient(self, batch: StepBatch, data_wait_s: float) -> tuple[Tensor, Tensor]:
        """Have this step's gradient, scaled by the nominal number of tokens, with the optimizer.

        Returns the sums of `pack` over all ranks and the sum of the gradient's squares, float64 [].
        """
        # Gradients are averaged over the ranks with other samples or positions, hence their number; what the
        # true number of tokens differs by is settled in `_update`, where it is known.
        layout = self.plan.layout
        scale = self.loss_scale.value * (layout.dp * layout.cp / self.plan.batch.tokens_per_step)
        part = started = None

        def on_loss(nll_sum: Tensor) -> None:
            nonlocal part, started
            part = self._pack(nll_sum, batch.num_tokens, data_wait_s)
            if self.optimizer.has_whole_gradient:
                # The ranks agree while the last backward pass computes.
                started = StartedSum(part, self.world)

        self.passes.add_gradient(batch.microbatches, scale, on_loss)
        if self.tied_ends is not None:
            self.tied_ends.add_up()
        self.optimizer.collect_gradients()
        square_sum = self.optimizer.square_sum()
        if started is not None:
            return started.finish(), square_sum
        assert part is not None
        sums = sum_over_ranks(torch.cat((part, square_sum.to(part.device).view(1))), self.world)
        return sums[:-1], sums[-1]

    def _pack(self, nll_sum: Tensor, num_tokens: int, data_wait_s: float) -> Tensor:
        return pack(self.world, nll_sum, num_tokens, bool(self.stop), self._save_by_time(), data_wait_s)

    def _update(self, totals: Tensor, square_sum: Tensor, lr: float) -> StepReport:
        """Clip and apply the gradient, or skip it on all ranks when it is not finite."""
        self.pulse.enter("update")
        divisor = (totals[1] / self.plan.batch.tokens_per_step).float() * self.loss_scale.value
        grad_norm = square_sum.sqrt().float() / divisor
        readout = Readout(self.world)
        readout.start(totals, grad_norm)
        skip = (~torch.isfinite(grad_norm + totals[0])).float()
        if self.config.train.grad_clip is not None:
            divisor = divisor * (grad_norm / self.config.train.grad_clip).clamp(min=1.0)
        self.saver.wait_until_staged()
        self.optimizer.step(lr, divisor, skip)
        self.optimizer.zero_grad()
        self.loss_scale.update(skip)
        return readout.finish()

    def _count(self, batch: StepBatch, report: StepReport) -> None:
        progress = self.progress
        progress.step += 1
        progress.samples_seen += batch.num_samples
        progress.tokens_seen += report.num_tokens
        self.metrics.count(report)
        if report.finite:
            progress.nonfinite_in_a_row = 0
            return
        progress.nonfinite_in_a_row += 1
        if self.loss_scale.enabled and self.loss_scale.value.item() > 1.0:
            # Overflow is how fp16 finds its scale; it counts only when there is nothing left to halve.
            progress.nonfinite_in_a_row = 0
        if self.world.is_main:
            log.warning(f"step={progress.step} skipped: loss or gradient is not finite")
        if progress.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            self.pulse.enter("end")
            self.saver.finish()
            raise DivergedError(
                f"loss or gradient was not finite in {progress.nonfinite_in_a_row} steps in a row, "
                f"the last of them step {progress.step}",
                hint="lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of these steps",
            )

    def _record(self, report: StepReport, lr: float, val_loss: float | None) -> None:
        step = self.progress.step
        self._steps_done += 1
        if self._steps_done == 1 and self.config.checkpoint.async_save:
            self.saver.warm_up()
        if self._steps_done == 1 and self.world.is_main:
            note_event(self.run, self.attempt, "first_step", step=step)
        due = step % self.config.train.log_every == 0 or step in (1, self.total_steps)
        if due or val_loss is not None:
            self.metrics.write(self.progress, report, lr, val_loss)

    def _eval_due(self) -> bool:
        """Whether this step is to be validated and has not been, by this attempt or the one before."""
        train, step = self.config.train, self.progress.step
        if self.evaluator is None or self.progress.last_eval_step == step:
            return False
        if step == 0:
            return train.eval_at_start
        return step % (train.eval_every or 1) == 0 or step == self.total_steps

    def _evaluate(self) -> tuple[bool, float | None]:
        """Validate; returns whether it was completed, and the validation loss."""
        assert self.evaluator is not None
        started = time.monotonic()
        val_loss = self.evaluator.run(self.parts, self.passes, self.stop, self.pulse)
        self.metrics.exclude(time.monotonic() - started)
        if val_loss is None:
            return False, None
        progress = self.progress
        progress.last_eval_step = progress.step
        finite = math.isfinite(val_loss)
        if self.world.is_main:
            shown = f"{val_loss:.4f}" if finite else "not-finite"
            log.info(f"step={progress.step}/{self.total_steps} val_loss={shown}")
            note_event(
                self.run, self.attempt, "evaluated", step=progress.step, val_loss=val_loss if finite else None
            )
        if not finite:
            return True, None
        self._consider_best("val_loss", val_loss)
        return True, val_loss

    def _consider_best(self, metric: str, value: float) -> None:
        """Note whether this is the best value so far of the metric that the config names."""
        progress = self.progress
        if metric != self.config.checkpoint.best_metric or progress.step == 0 or not math.isfinite(value):
            return
        self._settle_best()
        self._is_best = progress.best_value is None or value < progress.best_value
        if self._is_best:
            progress.best_value, progress.best_step = value, progress.step

    def _settle_best(self) -> None:
        """Wait for the best checkpoint that is being written; one that failed is not the best of anything."""
        if self._best_in_flight is None:
            return
        self.saver.finish()
        progress = self.progress
        if self.saver.last_step == self._best_in_flight:
            self._published_best = progress.best_value, progress.best_step
        else:
            progress.best_value, progress.best_step = self._published_best
        self._best_in_flight = None

    def _save_by_time(self) -> bool:
        """Rank 0's clock decides; the others learn it from the step's report."""
        minutes = self.config.checkpoint.every_minutes
        return (
            self.world.is_main and minutes is not None and time.monotonic() - self._last_save_s > minutes * 60
        )

    def _save_if_due(self, report: StepReport) -> None:
        every = self.config.checkpoint.every_steps
        reason = ""
        if every is not None and self.progress.step % every == 0:
            reason = "every_steps"
            self._consider_best("loss", report.loss)
        elif self._is_best:
            reason = "best"
        elif report.save:
            reason = "every_minutes"
        if reason and self.progress.step < self.total_steps:
            self._save(reason, blocking=not self.config.checkpoint.async_save)
        else:
            self.saver.poll()

    def _save(self, reason: str, blocking: bool) -> None:
        started = time.monotonic()
        self.pulse.enter("save")
        self._settle_best()
        self.progress.loss_scale = self.loss_scale.state() if self.loss_scale.enabled else {}
        record = {**self.manifest_record, "progress": self.progress.to_dict()}
        self.saver.save(SaveRequest(self.progress.step, record, self._is_best, reason), blocking)
        if self._is_best:
            self._best_in_flight = self.progress.step
        self._is_best = False
        self._last_save_s = time.monotonic()
        if blocking:
            self.metrics.exclude(self._last_save_s - started)

    def _end_stopped(self, why: str) -> int:
        """Save what there is, if anything is new, and end with the code that asks to go on later.

        Raises CheckpointError when it cannot be saved: that code would say that it was.
        """
        self.pulse.enter("end")
        self.saver.finish()
        if self.progress.step > 0 and self.progress.step != self.saver.last_step:
            self._save("stop", blocking=True)
            self.saver.require(self.progress.step)
        self.metrics.flush()
        if self.world.is_main:
            saved = self.saver.last_step
            kept = f"checkpoint of step {saved} is the newest" if saved is not None else "no step was done"
            log.info(f"stopped after step {self.progress.step}: {why}; {kept}")
        return EXIT_STOPPED

    def _end_finished(self) -> int:
        self.pulse.enter("end")
        self.saver.finish()
        if self.progress.step != self.saver.last_step:
            self._save("final", blocking=True)
        self.saver.require(self.progress.step)
        self.metrics.flush()
        if self.world.is_main:
            best = self.progress
            words = (
                f"; best {self.config.checkpoint.best_metric}={best.best_value:.4f} at step {best.best_step}"
                if best.best_value
                else ""
            )
            log.info(f"finished after step {best.step} of {self.total_steps}{words}")
        return EXIT_OK
