"""Run an attempt's training loop, including validation, logging and checkpointing."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.capability import GoBack, Recorder
from trainkit.data.dataset_file import TRAIN, VAL
from trainkit.errors import EXIT_OK, EXIT_STOPPED, DivergedError, FatalError
from trainkit.job.signals import StopRequest
from trainkit.plan.batch import learning_rate
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import Batch, LaunchPlan
from trainkit.plan.step_work import compiles
from trainkit.run.process import own_host
from trainkit.run.rollbacks import EVENT, Rollback
from trainkit.run.rundir import AttemptDir
from trainkit.shipped import of_media
from trainkit.task import record_with
from trainkit.trainer.build import AnyTask, BuiltModel, CompileCache, build
from trainkit.trainer.checkpoint.loader import choose_checkpoint
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.checkpoint.state import StateTensors, TrainingState
from trainkit.trainer.distributed import World, broadcast_from_main, gather_from_all, record_event
from trainkit.trainer.file_optimizer import make_own_optimizers
from trainkit.trainer.file_schedule import load_schedule
from trainkit.trainer.hooks import TrainerHooks, trained_model
from trainkit.trainer.metrics import LocalGradient, Metrics, RankRecords, TensorBoardLog, logs_written
from trainkit.trainer.optimizers import make_optimizer
from trainkit.trainer.optimizers.interface import ShardedOptimizer, refuse_unused_groups
from trainkit.trainer.own_optimizers import OwnState, make_own_state
from trainkit.trainer.precision import LossScale
from trainkit.trainer.profiler import ProfileWindow
from trainkit.trainer.progress import Progress
from trainkit.trainer.rollback import plan_rollback
from trainkit.trainer.starting_state import (
    announce,
    last_step,
    manifest_record,
    refuse_other_run,
    resume,
)
from trainkit.trainer.step_clock import NUM_TIMES, RankObservers, StepClock, is_reported
from trainkit.trainer.step_sync import (
    ReportReadback,
    StepReport,
    all_reduce_sum,
    any_rank,
    join_turns,
    pack_report,
    with_metrics,
)
from trainkit.trainer.user_task import UserTask

log = getLogger(__name__)
GC_EVERY_STEPS = 100
OF_VAL = "val_"
"""Prefix of the names of validation metrics."""


class Evaluator:
    """Computes the mean loss over the validation samples, which are divided among the ranks."""

    def __init__(self, task: AnyTask, plan: LaunchPlan, world: World) -> None:
        self._world, config = world, task.config
        assert task.val_data is not None
        layout = plan.layout
        size = plan.batch.device_batch_size * layout.dp
        num_samples = task.val_data.num_samples
        if config.train.eval_batches is not None:
            # Prefer the batch size in the config: the planned batch size depends on the layout, but a run
            # that is resumed with another layout must validate on the same samples.
            batch_size = config.train.global_batch_size or plan.batch.global_batch_size
            num_samples = min(num_samples, config.train.eval_batches * batch_size)
        self._num_batches = -(-num_samples // size)
        batch = Batch(plan.batch.device_batch_size, 1, size, size * config.data.seq_len)
        self._batches = task.batches(VAL, batch, world, TrainingState(), num_samples)

    @torch.no_grad()
    def run(self, built: BuiltModel, stop: StopRequest, progress: Progress) -> StepReport | None:
        """Return the validation loss and metrics across all ranks, or None if any rank got a stop signal."""
        totals: Tensor | None = None
        no_norm = torch.zeros((), device=self._world.device)
        readback: ReportReadback | None = None
        for model in built.model_parts:
            model.eval()
        try:
            batches: Iterator[Any] = iter(self._batches)
            for _ in range(self._num_batches):
                progress.enter("evaluate")
                batch = next(batches)
                sums = built.forward_backward.loss_sums(batch.microbatches[0])
                report = pack_report(
                    self._world, sums, batch.num_tokens, stop=bool(stop), save=False, data_wait_s=0.0
                )
                all_reduce_sum(report, self._world)
                totals = report if totals is None else totals + report
                # Read back the previous batch's report, so that the device is already computing the current
                # batch while the host waits.
                if readback is not None and readback.finish().stop:
                    return None
                readback = ReportReadback(self._world, totals, no_norm, built.forward_backward.metric_names)
            assert readback is not None
            total = readback.finish()
        finally:
            for model in built.model_parts:
                model.train()
        return None if total.stop else total

    def close(self) -> None:
        """Stop the threads or processes that read the validation data."""
        self._batches.close()


class Trainer:
    """The training loop of one attempt; `train` runs until the run is complete or the attempt has to stop."""

    _steps_done = 0
    """Number of steps trained by this attempt."""
    _was_not_finite = False
    """True if the last step had a non-finite loss or gradient that was counted in
    `TrainingState.nonfinite_in_a_row`."""
    _is_best = False
    """True if the current state has the best value of `checkpoint.best_metric` so far."""
    _best_in_flight: int | None = None
    """Step of the most recent best checkpoint while its save may still be in progress; None otherwise."""
    _published_best: tuple[float | None, int | None] = (None, None)
    """Metric value and step of the newest best checkpoint that is known to be saved; None if there is
    none."""
    _metric: tuple[int, float] = (0, math.nan)
    """The newest step with a finite value of `checkpoint.best_metric`, and that value."""
    _last_save_s = 0.0
    _own: OwnState | None = None
    """The state that user code adds to checkpoints, in addition to the model; None without such code."""
    _recorder = Recorder()
    """Records values logged by a user's task that are not plain numbers, such as images."""

    def __init__(
        self,
        attempt: AttemptDir,
        plan: LaunchPlan,
        world: World,
        task: AnyTask,
        stop: StopRequest,
        progress: Progress,
    ) -> None:
        """Build the model, load the newest checkpoint and set up the training loop."""
        self.attempt, self.plan, self.world, self.task = attempt, plan, world, task
        self.config, self.stop, self.progress = task.config, stop, progress
        config, layout = task.config, plan.layout
        # Check the checkpoint before building the model, which may take a long time.
        with progress.within("load"):
            chosen = choose_checkpoint(attempt, world)
            if chosen is not None:
                refuse_other_run(*chosen, task)
        local_gradient = LocalGradient()
        self.built = build(task, plan, world, progress, local_gradient)
        # A user's task is compiled only if the config explicitly requests compilation.
        by_default = config.has_decoder and compiles(config.parallel, layout, plan.device)
        compiled = config.parallel.compile is True or by_default
        self.compile_cache = CompileCache(attempt.run) if compiled else None
        if self.compile_cache is not None and world.rank % plan.workers_per_node == 0:
            self.compile_cache.load()  # the other ranks wait in the first collective
        if config.optimizer.groups:
            names = [weight.name for weight in self.built.weights if weight.param.requires_grad]
            refuse_unused_groups({*chain(*gather_from_all(names, world))}, config.optimizer)
        self._own_schedule = load_schedule(config.schedule, attempt.run)
        own = make_own_optimizers(task, self.built.weights, layout, attempt.run)
        self.optimizer: ShardedOptimizer = own or make_optimizer(
            self.built.weights, config.optimizer, world, compiled=compiled
        )
        self._hooks = TrainerHooks(plan, trained_model(self.built, world))
        added = self._hooks.state_tensors()
        tensors = StateTensors(self.built.weights, self.optimizer, self.built.saved_buffers, added)
        self._whole_state, self._own = tensors.tensors, make_own_state(task, own, world)
        self._keep = KeepRule.of(config.checkpoint)
        self.saver = CheckpointSaver(attempt, world, tensors.tensors, self._keep)
        self.loss_scale = LossScale(config.precision, world.device)
        progress.enter("load")
        self.state = resume(chosen, attempt, world, task, self.built, tensors, self._own, self._hooks)
        self.built.forward_backward.begin_step(self.state.step)
        self.built.update_scales()
        self.loss_scale.load(self.state.loss_scale)
        self.saver.last_step = None if chosen is None else self.state.step
        self.total_steps, self.end = last_step(plan, task, self.state)
        tensorboard = None
        if world.is_main:
            announce(attempt, plan, world, task, self.built, self.state, self.total_steps)
            if own is not None:
                log.info(own.describe())
            if config.logging.tensorboard:
                tensorboard = TensorBoardLog(attempt.run, self.state.step + 1)
        self.batches = task.batches(TRAIN, plan.batch, world, self.state, self.end)
        self.evaluator = None if task.val_data is None else Evaluator(task, plan, world)
        dtype, flops = config.precision.dtype, task.flops_per_sample
        self.metrics = Metrics(attempt, world, dtype, self.total_steps, tensorboard, flops)
        if isinstance(task, UserTask) and world.is_main:
            self._recorder = of_media().recorder()(attempt, progress, tensorboard)
            record_with(task.task, self._recorder)
        self.profiler = ProfileWindow(config.profiler, attempt.profile_dir, world)
        self.manifest_record = manifest_record(plan, task)
        """Fields in each checkpoint manifest of this attempt, excluding the training state."""
        # The loss of a user's task returns its own divisor, so the nominal count is the number of samples.
        self.nominal_count = (
            plan.batch.global_batch_size if config.has_user_task else plan.batch.tokens_per_step
        )
        """Divisor of a step's loss if all tokens of the step (for a user's task, all samples) are valid."""
        self.clock = StepClock(world, layout)
        self.observers = RankObservers(attempt, plan, world)
        self.rank_records = RankRecords(attempt, world.rank, own_host(), local_gradient)

    def train(self) -> int:
        """Train until the run is complete or the attempt has to stop; return the worker's exit code.

        Raises DivergedError after `train.max_nonfinite_steps` consecutive steps with a non-finite loss or
        gradient, or if no step had a finite loss and gradient. Raises CheckpointError if the final state
        cannot be saved.
        """
        self.progress.enter("begin")
        if self.evaluator is None and self.config.checkpoint.best_metric != "val_loss":
            self._require_best_metric((), of_validation=True)
        if any_rank(bool(self.stop), self.world):
            return self._end("asked to stop during start-up")
        if self._eval_due() and not self._evaluate()[0]:
            return self._end("asked to stop during validation")
        if self._is_best:
            # The checkpoint that this attempt resumed from already contains the current state, so only mark
            # it as best.
            self.saver.mark_best()
            self._is_best = False
        self._published_best = self.state.best_value, self.state.best_step
        gc.collect()
        gc.freeze()
        gc.disable()
        self._last_save_s = time.monotonic()
        self.metrics.start()
        while self.state.step < self.total_steps:
            exit_code = self.step()
            if exit_code is not None:
                return exit_code
        return self._end()

    def step(self) -> int | None:
        """Train one step; validate, log and save if due. Return an exit code, or None to continue."""
        report, lr = self._optimizer_step()
        if (request := self._hooks.go_back()) is not None:
            self._log_step(report, lr, None)
            return self._go_back(request)
        if self.state.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            self._log_step(report, lr, None)
            self._refuse_divergence()
        completed, validation = self._evaluate() if self._eval_due() else (True, None)
        self._log_step(report, lr, validation)
        is_last = self.state.step == self.total_steps
        if not completed or (report.stop and not is_last):
            return self._end(f"asked to stop ({self.stop.signal_name or 'by another rank'})")
        if self.state.step == self.config.train.stop_at_step and not is_last:
            return self._end("train.stop_at_step reached")
        self._save_if_due(report)
        return None

    def _optimizer_step(self) -> tuple[StepReport, float]:
        """Compute and apply one optimizer step; wait for the device only after the update is enqueued."""
        step = self.state.step + 1
        lr = learning_rate(step, self.total_steps, self.plan.lr, self.config.schedule, self._own_schedule)
        shown_lr = self.optimizer.begin_step(lr)
        self.built.forward_backward.begin_step(step)
        self.progress.begin_step(step)
        self.profiler.before(step)
        started = time.monotonic()
        batch = next(self.batches)
        data_wait_s = time.monotonic() - started
        if self.built.buffers is not None and self.built.buffers.tensors:
            # A forward pass may change the model's buffers, so wait until the save in progress has copied the
            # buffers.
            self._await_staging()
        turns, reports = self.optimizer.turns(), list[tuple[str, StepReport]]()
        for number, turn in enumerate(turns):
            self.clock.begin_step(data_wait_s if number == 0 else 0.0)
            totals, square_sum = self._compute_gradient(batch.of_turn(number, turn), turn, data_wait_s)
            is_last = number == len(turns) - 1
            report = self._apply_gradient(totals, square_sum, lr, number, turn, is_last=is_last)
            reports.append((turn, report))
        self.optimizer.end_step()
        report = join_turns(reports)
        self._update_state(batch, report)
        self._call_hooks(report)
        self.progress.end_step()
        self.observers.add(step, report.rank_times, self.progress.last_step_s)
        self.profiler.after(step)
        if step % GC_EVERY_STEPS == 0:
            # Collect garbage on all ranks at the same step: if ranks collected at different steps, each rank
            # would delay all other ranks in turn.
            gc.collect(1)
        return report, shown_lr

    def _compute_gradient(self, batch: Any, turn: str, data_wait_s: float) -> tuple[Tensor, Tensor]:
        """Compute the gradient of one optimizer turn (see `Task.turns`), divided by the loss's nominal count.

        Returns the values of `pack_report` summed across all ranks, float64 [5 + 2 x metrics (+ 2 x ranks)],
        and the gradient's sum of squares, a 0-dim float64 tensor. At the end of a step window, the summed
        values also contain the times of each rank. For a model with experts, the values of
        `LoadBalance.take` follow.
        """
        # FSDP and DDP average gradients over the dp x cp ranks, so multiply by the number of these ranks to
        # get a sum. `_apply_gradient` later corrects for the actual token or sample count, which is known
        # only after the all-reduce.
        layout = self.plan.layout
        scale = self.loss_scale.value * (layout.dp * layout.cp / self.nominal_count)
        local_report: Tensor | None = None
        in_flight: dist.Work | None = None
        self.rank_records.begin_step(is_due=self._is_logged(self.state.step + 1))

        def on_loss(sums: Tensor) -> None:
            nonlocal local_report, in_flight
            self.clock.end_forward()
            self.rank_records.keep_loss(sums)
            # Rank 0 decides by its own clock when to save. The other ranks learn of the decision from the
            # step report.
            minutes, waited_s = self.config.checkpoint.every_minutes, time.monotonic() - self._last_save_s
            due = self.world.is_main and minutes is not None and waited_s > minutes * 60
            local_report = pack_report(self.world, sums, batch.num_tokens, bool(self.stop), due, data_wait_s)
            if is_reported(self.state.step + 1, self.world):
                local_report = torch.cat((local_report, self.clock.report()))
            if self.built.load_balance is not None:
                local_report = torch.cat((local_report, self.built.load_balance.take()))
            if self.optimizer.has_whole_gradient and self.world.distributed:
                # The all-reduce of the step report overlaps with the last backward pass.
                in_flight = dist.all_reduce(local_report, async_op=True)

        if self.built.load_balance is not None:
            self.built.load_balance.loss_scale = scale
        self.built.forward_backward.accumulate_gradient(batch.microbatches, scale, on_loss)
        self.built.sum_tied_gradients()
        self.optimizer.collect_gradients(turn)
        square_sum = self.optimizer.square_sum()
        self.rank_records.keep_gradient(square_sum, self.world.device)
        assert local_report is not None
        if self.optimizer.has_whole_gradient:
            if in_flight is not None:
                in_flight.wait()
            return local_report, square_sum
        local = torch.cat((local_report, square_sum.to(local_report.device).view(1)))
        sums = all_reduce_sum(local, self.world)
        return sums[:-1], sums[-1]

    def _apply_gradient(
        self, totals: Tensor, square_sum: Tensor, lr: float, number: int, turn: str, *, is_last: bool
    ) -> StepReport:
        """Clip and apply an optimizer turn's gradient; if it is not finite, skip the update on all ranks."""
        self.progress.enter("update")
        balance, names = self.built.load_balance, self.built.forward_backward.metric_names
        if balance is not None:
            totals, routed = totals[: -balance.size], totals[-balance.size :]
        divisor = (totals[1] / self.nominal_count).float() * self.loss_scale.value
        grad_norm = square_sum.sqrt().float() / divisor
        num_times = NUM_TIMES * self.world.size if is_reported(self.state.step + 1, self.world) else 0
        if balance is not None:
            # The report contains the metrics before the times.
            end = len(totals) - num_times
            totals = torch.cat((totals[:end], balance.metrics(routed), totals[end:]))
            names = (*names, *balance.METRIC_NAMES)
        own = self.rank_records.values
        readback = ReportReadback(self.world, totals, grad_norm, names, num_times, own)
        skip = (~torch.isfinite(grad_norm + totals[0])).float()
        if self.config.train.grad_clip is not None:
            divisor = divisor * (grad_norm / self.config.train.grad_clip).clamp(min=1.0)
        self._await_staging()
        self.clock.begin_update()
        self.optimizer.step(lr, divisor, skip)
        self.optimizer.zero_grad()
        self.clock.end_update()
        self.built.update_scales()
        self.loss_scale.update(skip)
        if balance is not None:
            balance.update(routed, skip)
        if is_last:
            self.built.after_step()
        if self.built.buffers is not None:
            self.built.buffers.settle(self.world)
        report = readback.finish()
        counted = number + 1 if turn else 0  # without turns, a step has a single record, numbered 0
        self.rank_records.add(self.state.step + 1, report.grad_norm, readback.own, counted, turn)
        return report

    def _call_hooks(self, report: StepReport) -> None:
        """Let capabilities process the step; if one ends the run, finish the save in progress first."""
        try:
            found = self._hooks.after_step(self.state.step, has_updated=report.finite, loss=report.loss)
            for event, values in found:
                if self.world.is_main:
                    record_event(self.attempt, event, **values)
        except FatalError:
            self.progress.enter("end")
            self._await_save()
            raise

    def _go_back(self, request: GoBack) -> int:
        """Record that the next attempt goes back to an earlier checkpoint; return the exit code.

        Raises DivergedError if the run must not go back.
        """
        self.progress.enter("end")
        self._await_save()
        self.metrics.flush()
        found = plan_rollback(self.attempt, self.state, request) if self.world.is_main else None
        problem = found if isinstance(found, str) else ""
        if problem := broadcast_from_main(problem, self.world):
            raise DivergedError(
                f"{request.why}; {problem}",
                hint="lower optimizer.lr, save more checkpoints, or use `trainkit resume --from-step N "
                "--skip-samples FIRST-LAST`",
            )
        if isinstance(found, Rollback):
            record_event(self.attempt, EVENT, **found.fields())
            log.warning(f"{request.why}: the run {found.describe()}; the next attempt continues from there")
        return EXIT_STOPPED

    def _is_logged(self, step: int) -> bool:
        return step % self.config.train.log_every == 0 or step in (1, self.total_steps)

    def _await_staging(self) -> None:
        """Wait until the save in progress, if any, has copied the training state."""
        if self.saver.is_staging:
            with self.progress.within("save"):
                self.saver.wait_until_staged()

    def _update_state(self, batch: Any, report: StepReport) -> None:
        state = self.state
        state.step += 1
        state.samples_seen += batch.num_samples
        state.tokens_seen += report.num_tokens
        state.stream = batch.stream
        self.metrics.count(report, batch.num_samples)
        if report.finite:
            state.has_updated_weights = True
            state.nonfinite_in_a_row = 0
            return
        state.nonfinite_in_a_row += 1
        if self.loss_scale.enabled and self.loss_scale.value.item() > 1.0:
            # With fp16, gradients overflow until the loss scale is low enough, so count such a step only if
            # the scale cannot be halved further.
            state.nonfinite_in_a_row = 0
        if self.world.is_main:
            since = state.step + 1 - state.nonfinite_in_a_row
            diverged = f", diverged since step {since}" if since < state.step else ""
            log.warning(f"step={state.step} skipped: loss or gradient is not finite{diverged}")

    def _refuse_divergence(self) -> None:
        self.progress.enter("end")
        self._await_save()
        raise DivergedError(
            f"loss or gradient was not finite in {self.state.nonfinite_in_a_row} consecutive steps, "
            f"up to step {self.state.step}",
            hint="lower optimizer.lr, raise schedule.warmup_steps, or check the data of these steps",
        )

    def _require_updated_weights(self) -> None:
        """Raise DivergedError if every update of the run was skipped, so that the weights never changed."""
        if self.state.has_updated_weights or self.state.step == 0:
            return
        hint = "lower optimizer.lr, raise schedule.warmup_steps, or check the data"
        if self.loss_scale.enabled:
            start, now = self.config.precision.init_loss_scale, self.loss_scale.value.item()
            hint = (
                f"train more steps or lower precision.init_loss_scale, which is {start:g} and has fallen to "
                f"{now:g}; `precision.dtype: bf16` needs no loss scale"
            )
        raise DivergedError(
            f"all {self.state.step} steps were skipped, because the loss or the gradient was never finite: "
            "the weights are unchanged",
            hint,
        )

    def _log_step(self, report: StepReport, lr: float, validation: StepReport | None) -> None:
        step = self.state.step
        self._steps_done += 1
        if self._steps_done == 1:
            if self._saves_in_background:
                self.saver.allocate_buffers()
            if self._own is None or self._own.has_all_turns(report.metrics):
                self._require_best_metric(("loss", *report.metrics), of_validation=False)
            if self.world.is_main:
                compiled = {}
                if self.compile_cache is not None:
                    compiled = {"compiled": self.compile_cache.source()}
                    self.compile_cache.save()
                step_s = round(self.progress.last_step_s, 3)
                record_event(self.attempt, "first_step", step=step, step_s=step_s, **compiled)
        is_not_finite, was_not_finite = self.state.nonfinite_in_a_row > 0, self._was_not_finite
        self._was_not_finite = is_not_finite
        # Also record the steps at which the loss diverges or recovers, so that the metrics show these steps.
        if self._is_logged(step) or validation is not None or is_not_finite or was_not_finite:
            self.metrics.write(self.state, report, lr, validation, self.observers.values)

    def _eval_due(self) -> bool:
        """Return whether validation is due at the current step and has not been done yet."""
        train, step = self.config.train, self.state.step
        if self.evaluator is None or self.state.last_eval_step == step:
            return False
        if step == 0:
            return train.eval_at_start
        return step % (train.eval_every or 1) == 0 or step == self.total_steps

    def _evaluate(self) -> tuple[bool, StepReport | None]:
        """Validate; return whether validation completed, and its result (None if the loss is not finite)."""
        assert self.evaluator is not None
        started = time.monotonic()
        found = self.evaluator.run(self.built, self.stop, self.progress)
        for suffix, use in self._hooks.other_weights().items():
            if found is None:
                break
            with use():
                other = self.evaluator.run(self.built, self.stop, self.progress)
            found = None if other is None else with_metrics(found, other, suffix)
        self.metrics.exclude(time.monotonic() - started)
        if found is None:
            return False, None
        state, val_loss = self.state, found.loss
        state.last_eval_step = state.step
        values = {"val_loss": val_loss, **{f"{OF_VAL}{name}": value for name, value in found.metrics.items()}}
        self._require_best_metric(values, of_validation=True)
        finite = math.isfinite(val_loss)
        if self.world.is_main:
            shown = [f"{name}={value:.4f}" for name, value in values.items()]
            shown[0] = shown[0] if finite else "val_loss=not-finite"
            log.info(f"step={state.step}/{self.total_steps} {' '.join(shown)}")
            shown_loss = val_loss if finite else None
            record_event(self.attempt, "evaluated", step=state.step, val_loss=shown_loss)
        if not finite:
            return True, None
        self._update_best(values)
        return True, found

    def _require_best_metric(self, names: Collection[str], *, of_validation: bool) -> None:
        """Raise FatalError if `names` should contain `checkpoint.best_metric` but does not."""
        metric = self.config.checkpoint.best_metric
        if metric is not None and metric.startswith(OF_VAL) == of_validation and metric not in names:
            found = f"the metrics are {', '.join(names)}" if names else "the run has no validation"
            raise FatalError(
                f"checkpoint.best_metric is {metric}, but {found}",
                hint="set the key to a metric that the task logs (val_NAME for validation), or to null",
            )

    def _update_best(self, values: Mapping[str, float]) -> None:
        """Record the value of `checkpoint.best_metric` if it is the best value so far."""
        state, checkpoint = self.state, self.config.checkpoint
        value = values.get(checkpoint.best_metric or "", math.nan)
        if state.step == 0 or not math.isfinite(value):
            return
        self._metric = state.step, value
        self._confirm_best()
        sign = -1.0 if checkpoint.best_mode == "max" else 1.0
        self._is_best = state.best_value is None or sign * value < sign * state.best_value
        if self._is_best:
            state.best_value, state.best_step = value, state.step

    def _confirm_best(self) -> None:
        """Wait for the save of a best checkpoint; if the save failed, keep the previous best checkpoint."""
        if self._best_in_flight is None:
            return
        self._await_save()
        state = self.state
        if self.saver.last_step == self._best_in_flight:
            self._published_best = state.best_value, state.best_step
        else:
            state.best_value, state.best_step = self._published_best
        self._best_in_flight = None

    def _await_save(self) -> None:
        """Wait for the save in progress, if any, in the phase `save`, whose hang timeout is longer."""
        with self.progress.within("save"):
            self.saver.finish()

    @property
    def _saves_in_background(self) -> bool:
        """Return whether this attempt may save asynchronously; its last save is always synchronous."""
        checkpoint, step = self.config.checkpoint, self.state.step
        every = checkpoint.every_steps
        by_step = every is not None and -(-step // every) * every < self.total_steps
        by_time_or_rule = checkpoint.every_minutes is not None or self._keep.requires_saves
        by_metric = (checkpoint.best_metric or "").startswith(OF_VAL) and self.evaluator is not None
        return checkpoint.async_save and (by_step or by_metric or by_time_or_rule)

    def _save_if_due(self, report: StepReport) -> None:
        every = self.config.checkpoint.every_steps
        reason = ""
        if every is not None and self.state.step % every == 0:
            reason = "every_steps"
        elif self._keep.saves_at(self.state.step):
            reason = "keep"
        if reason:
            self._update_best({"loss": report.loss, **report.metrics})
        elif self._is_best:
            reason = "best"
        elif report.save:
            reason = "every_minutes"
        if reason and self.state.step < self.total_steps:
            self._save(reason, blocking=not self.config.checkpoint.async_save)
        else:
            self.saver.poll()

    def _save(self, reason: str, blocking: bool) -> None:
        started = time.monotonic()
        self.progress.enter("save")
        self._confirm_best()
        self.state.loss_scale = self.loss_scale.state() if self.loss_scale.enabled else {}
        self.state.hooks = self._hooks.saved()
        record = {**self.manifest_record, "progress": asdict(self.state)}
        metric_step, value = self._metric
        if metric_step == self.state.step:
            checkpoint = self.config.checkpoint
            record["metric"] = {"name": checkpoint.best_metric, "mode": checkpoint.best_mode, "value": value}
        if self._own is not None:
            self.saver.finish()  # the previous save must finish before its tensors may change
            record["state"], tensors = self._own.collect()
            self.saver.tensors = {**self._whole_state, **tensors}
        wait_for_logs = logs_written(self._recorder, self.metrics.tensorboard)
        # The last save of an attempt is always tried, because there is no later save to try again.
        needs_space = reason not in ("stop", "final")
        step, is_best = self.state.step, self._is_best
        self.saver.save(SaveRequest(step, record, is_best, reason, wait_for_logs, needs_space), blocking)
        if self._is_best:
            self._best_in_flight = self.state.step
        self._is_best = False
        self._last_save_s = time.monotonic()
        if blocking:
            self.metrics.exclude(self._last_save_s - started)

    def close(self) -> None:
        """Write pending metrics, and stop the threads and processes started by this rank."""
        self.rank_records.flush()
        self.batches.close()
        if self.evaluator is not None:
            self.evaluator.close()
        self.saver.close()
        self.profiler.close()
        self._recorder.close()
        self.metrics.close()

    def _end(self, reason: str = "") -> int:
        """Save the current state if necessary; return 0, or 75 if training stops early for a `reason`.

        Raises DivergedError if training is complete but no step has changed the weights. Raises
        CheckpointError if the save fails, because exit codes 0 and 75 both guarantee a saved state.
        """
        self.progress.enter("end")
        self._await_save()
        state, saver, best = self.state, self.saver, ""
        if not reason:
            self._require_updated_weights()
        if state.step != saver.last_step and (state.step > 0 or not reason):
            self._save("stop" if reason else "final", blocking=True)
            saver.require_saved(state.step)
        self.metrics.flush()
        if self.world.is_main and reason:
            saved = "no step was trained"
            if saver.last_step is not None:
                saved = f"the newest checkpoint is step {saver.last_step}"
            log.info(f"stopped after step {state.step}: {reason}; {saved}")
        elif self.world.is_main:
            if state.best_value is not None:
                metric = self.config.checkpoint.best_metric
                best = f"; best {metric}={state.best_value:.4f} at step {state.best_step}"
            log.info(f"finished after step {state.step} of {self.total_steps}{best}")
        return EXIT_STOPPED if reason else EXIT_OK
