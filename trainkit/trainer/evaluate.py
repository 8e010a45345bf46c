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
from trainkit.trainer.step_sync import all_reduce_sum
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
        totals = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        for model in model_parts:
            model.eval()
        batches = PrefetchedBatches(self._source, 0, self._num_workers)
        try:
            for _ in range(self._num_batches):
                progress.enter("evaluate")
                batch = next(batches)
                nll_sum = forward_backward.nll_sum(batch.microbatches[0])
                counts = torch.stack(
                    (
                        nll_sum.double(),
                        nll_sum.new_tensor(batch.num_tokens * self._world.counts_samples).double(),
                        nll_sum.new_tensor(bool(stop)).double(),
                    )
                )
                totals += all_reduce_sum(counts, self._world)
                if totals[2].item() > 0:
                    return None
        finally:
            batches.close()
            for model in model_parts:
                model.train()
        return float((totals[0] / totals[1]).item())
