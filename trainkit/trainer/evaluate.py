"""Validation: the mean negative log-likelihood of the validation samples, divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainkit.config.schema import RunConfig
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import Batch, LaunchPlan
from trainkit.trainer.batches import BatchSource, PrefetchedBatches
from trainkit.trainer.distributed import World
from trainkit.trainer.forward_backward import ForwardBackward
from trainkit.trainer.progress import Progress
from trainkit.trainer.step_sync import ReportReadback, all_reduce_sum, pack_report
from trainkit.trainer.task import Task


class Evaluator:
    """Computes the validation loss of a model."""

    def __init__(self, task: Task, config: RunConfig, plan: LaunchPlan, world: World) -> None:
        self._world = world
        self._num_workers = config.data.num_workers
        assert task.val_data is not None
        layout = plan.layout
        size = plan.batch.device_batch_size * layout.dp
        num_samples = task.val_data.num_samples
        if config.train.eval_batches is not None:
            # A total over all ranks, of the size in the config: the loss does not depend on the layout, for
            # which the plan may reduce that size.
            num_samples = min(num_samples, config.train.eval_batches * config.train.device_batch_size)
        self._num_batches = -(-num_samples // size)
        self._source = BatchSource(
            dataset=task.val_data,
            batch=Batch(plan.batch.device_batch_size, 1, size, size * config.data.seq_len),
            dp_rank=world.dp_rank,
            dp_size=layout.dp,
            seed=config.seed,
            shuffle=False,
            end_position=num_samples,
            pin_memory=world.device.type == "cuda",
        )

    @torch.no_grad()
    def run(
        self,
        model_parts: Sequence[nn.Module],
        forward_backward: ForwardBackward,
        stop: StopRequest,
        progress: Progress,
    ) -> float | None:
        """The validation loss, equal on all ranks; None if a rank was asked to stop."""
        totals = torch.zeros(5, dtype=torch.float64, device=self._world.device)
        no_norm = torch.zeros((), device=self._world.device)
        readback: ReportReadback | None = None
        for model in model_parts:
            model.eval()
        batches = PrefetchedBatches(self._source, 0, self._num_workers)
        try:
            for _ in range(self._num_batches):
                progress.enter("evaluate")
                batch = next(batches)
                nll_sum = forward_backward.nll_sum(batch.microbatches[0])
                report = pack_report(
                    self._world, nll_sum, batch.num_tokens, stop=bool(stop), save=False, data_wait_s=0.0
                )
                totals += all_reduce_sum(report, self._world)
                # That of the batch before: while the host waits for it, the device computes this one.
                if readback is not None and readback.finish().stop:
                    return None
                readback = ReportReadback(self._world)
                readback.start(totals, no_norm)
            assert readback is not None
            total = readback.finish()
        finally:
            batches.close()
            for model in model_parts:
                model.train()
        return None if total.stop else total.loss
