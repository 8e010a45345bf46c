"""Provides batches whose samples all have different lengths."""

from __future__ import annotations

from trainkit.trainer.causal_lm import IGNORE_LABEL, Microbatch, PrefetchedBatches, StepBatch


class RaggedBatches:
    """Drops labels at the end of each sample. The number of dropped labels depends on the sample."""

    def __init__(self, batches: PrefetchedBatches) -> None:
        self._batches = batches

    def __next__(self) -> StepBatch:
        batch = next(self._batches)
        micros = [_ragged(micro) for micro in batch.microbatches]
        num_tokens = sum(int((micro.labels != IGNORE_LABEL).sum()) for micro in micros)
        return StepBatch(micros, num_tokens, batch.num_samples)

    def close(self) -> None:
        self._batches.close()


def _ragged(micro: Microbatch) -> Microbatch:
    labels = micro.labels.clone()
    length = labels.shape[1]
    for row, key in zip(labels, micro.sample_keys.tolist(), strict=True):
        row[1 + key % length :] = IGNORE_LABEL
    return Microbatch(micro.tokens, labels, micro.sample_keys)
