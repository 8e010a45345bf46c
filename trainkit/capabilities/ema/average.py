"""Average this rank's shards of the weights during training, and let the model compute with the average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from logging import getLogger

import torch
from torch import Tensor

from trainkit.capabilities.ema.ema_plan import SUFFIX, EmaPlan
from trainkit.capability import NewEvent, TrainedModel, TrainerHook
from trainkit.trainer.models.model import as_shard_of, local_tensor
from trainkit.trainer.optimizers.by_element import PIECE_ELEMENTS
from trainkit.trainer.split_master import SplitMaster, master_of, row_pieces
from trainkit.trainer.torch_private import lerp_each

log = getLogger(__name__)


class WeightAverage(TrainerHook):
    """An exponential moving average, in float32, of the weights that training changes."""

    def __init__(self, part: EmaPlan, model: TrainedModel) -> None:
        self._part, self._model = part, model
        self._weights = [
            weight
            for weight in model.weights
            if (weight.param.requires_grad or weight.is_changed) and weight.param.is_floating_point()
        ]
        masters = [master_of(weight) for weight in self._weights]
        self._masters = [item if isinstance(item, SplitMaster) else local_tensor(item) for item in masters]
        self._averages = [
            torch.zeros_like(local_tensor(weight.param.detach()), dtype=torch.float32)
            for weight in self._weights
        ]

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        for weight, average in zip(self._weights, self._averages, strict=True):
            yield weight.name, as_shard_of(average, weight.param)

    def begin(self, step: int, *, is_loaded: bool) -> None:
        if is_loaded:
            return
        self._update(1.0)
        if step and self._model.world.is_main:
            log.info(f"the average of the weights starts with the weights of step {step} (ema.decay)")

    def after_step(self, step: int, *, has_updated: bool, loss: float) -> Iterable[NewEvent]:
        if has_updated and step % self._part.every == 0:
            self._update(1.0 - self._part.decay)
        return ()

    @torch.no_grad()
    def _update(self, factor: float) -> None:
        """Add `factor` times the difference between the weights and the average to the average."""
        whole: list[tuple[Tensor, Tensor]] = []
        for master, average in zip(self._masters, self._averages, strict=True):
            if isinstance(master, SplitMaster):
                # Join a piece at a time, because the joined weights would take 4 more bytes per parameter.
                for piece, part in row_pieces(PIECE_ELEMENTS[average.device.type], master, average):
                    part.lerp_(piece.join(), factor)
            else:
                whole.append((average, master.float()))
        if whole:
            lerp_each([average for average, _ in whole], [master for _, master in whole], factor)

    def other_weights(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        return {SUFFIX: self._in_use}

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Replace the weights that compute by the average, and restore the weights at the end.

        A validation runs without gradients, so the copies of the weights do not raise the peak memory.
        """
        computing = [weight.param if weight.cast is None else weight.cast for weight in self._weights]
        used = [local_tensor(param.detach()) for param in computing]
        kept = [tensor.clone() for tensor in used]
        self._set(used, self._averages)
        try:
            yield
        finally:
            self._set(used, kept)

    @torch.no_grad()
    def _set(self, used: list[Tensor], values: list[Tensor]) -> None:
        for tensor, value in zip(used, values, strict=True):
            tensor.copy_(value)
        self._model.weights_changed()
