"""Validation: the mean loss of the validation samples, which are divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainkit.data.dataset_file import VAL
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import Batch, LaunchPlan
from trainkit.trainer.build import AnyTask, BuiltModel
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.distributed import World
from trainkit.trainer.progress import Progress
from trainkit.trainer.step_sync import ReportReadback, StepReport, all_reduce_sum, pack_report


class Evaluator:
    """Computes the validation loss of a model."""

    def __init__(self, task: AnyTask, plan: LaunchPlan, world: World) -> None:
        self._world, config = world, task.config
        assert task.val_data is not None
        layout = plan.layout
        size = plan.batch.device_batch_size * layout.dp
        num_samples = task.val_data.num_samples
        if config.train.eval_batches is not None:
            # Of the size in the config, if it has one: what the plan derives depends on the layout, and the
            # losses before and after a resume on another one are compared.
            batch_size = config.train.global_batch_size or plan.batch.global_batch_size
            num_samples = min(num_samples, config.train.eval_batches * batch_size)
        self._num_batches = -(-num_samples // size)
        batch = Batch(plan.batch.device_batch_size, 1, size, size * config.data.seq_len)
        self._batches = task.batches(VAL, batch, world, TrainingState(), num_samples)

    @torch.no_grad()
    def run(self, built: BuiltModel, stop: StopRequest, progress: Progress) -> StepReport | None:
        """The loss and metrics of the validation, equal on all ranks; None if a rank was asked to stop."""
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
                # That of the batch before: while the host waits for it, the device computes this one.
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
        """End the threads or processes that read the validation data."""
        self._batches.close()
