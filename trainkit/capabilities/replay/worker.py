"""The worker of `trainkit replay`, which recomputes steps of a run and the loss of each sample in them.

The worker trains in a separate run folder, starting from the checkpoint in that folder. Rank 0 writes the
losses of the samples to `SAMPLES_FILE`.
"""

from __future__ import annotations

import math

import torch

from trainkit.capabilities.replay import SAMPLES_FILE, ReplayPart, SampleLosses
from trainkit.data.dataset_file import TRAIN
from trainkit.errors import EXIT_OK, EXIT_STOPPED, FatalError
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import append_jsonl, to_json
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.causal_lm import IGNORE_LABEL, CausalLM, Microbatch, StepBatch
from trainkit.trainer.loop import Trainer
from trainkit.trainer.progress import Progress
from trainkit.trainer.step_sync import all_reduce_sum
from trainkit.trainer.worker import join_and_build


def run_worker(attempt: AttemptDir, plan: LaunchPlan, stop: StopRequest, progress: Progress) -> int:
    """Compute the requested steps on one rank, and return the worker's exit code."""
    part = plan.part(ReplayPart)
    assert part is not None
    first, last = part.steps
    trainer = join_and_build(attempt, plan, stop, progress)
    if trainer is None:
        return EXIT_STOPPED
    task = trainer.task
    if trainer.state.step == 0 and any(attempt.run.checkpoints_dir.iterdir()):
        raise FatalError(
            "there is no longer an intact checkpoint from before the requested steps",
            hint="replay a later step: a run deletes its old checkpoints as it continues",
        )
    samples = None
    try:
        while trainer.state.step < last:
            if isinstance(task, CausalLM) and trainer.state.step + 1 >= first:
                if samples is None:
                    samples = task.batches(TRAIN, plan.batch, trainer.world, trainer.state, trainer.end)
                losses = sample_losses(trainer, next(samples))
                if trainer.world.is_main:
                    record = SampleLosses(trainer.state.step + 1, losses)
                    append_jsonl(attempt.run.path / SAMPLES_FILE, to_json(record))
            if trainer.step() is not None:
                return EXIT_STOPPED
    finally:
        trainer.close()
        if samples is not None:
            samples.close()
    return EXIT_OK


@torch.no_grad()
def sample_losses(trainer: Trainer, batch: StepBatch) -> list[float | str]:
    """Compute the mean loss of each sample of a step, in the order of the global batch.

    A non-finite loss is returned as ``inf``. All ranks must call this function. The model receives each
    microbatch once per sample, with labels only for that sample, so that tensor shapes and random numbers are
    the same as in training.
    """
    world = trainer.world
    num_micro, size = len(batch.microbatches), len(batch.microbatches[0].labels)
    sums = torch.zeros(num_micro, world.layout.dp, size, 2, dtype=torch.float64, device=world.device)
    for number, micro in enumerate(batch.microbatches):
        for row in range(size):
            labels = torch.full_like(micro.labels, IGNORE_LABEL)
            labels[row] = micro.labels[row]
            one = Microbatch(micro.tokens, labels, micro.sample_keys)
            trainer.progress.enter("evaluate")
            place = sums[number, world.dp_rank, row]
            place[0] = trainer.built.forward_backward.loss_sums(one).double().view(-1)[0]
            place[1] = (labels != IGNORE_LABEL).sum() * world.counts_samples
    all_reduce_sum(sums, world)
    pairs = sums.flatten(0, 2).tolist()
    # Skip padding samples after the end of the data, which have no labels.
    means = [total / count for total, count in pairs if count]
    return [mean if math.isfinite(mean) else "inf" for mean in means]
