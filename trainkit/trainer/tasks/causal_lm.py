"""Predict the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.config.schema import RunConfig
from trainkit.data.open import has_validation, open_dataset
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.rundir import RunDir
from trainkit.trainer.batches import IGNORE_LABEL
from trainkit.trainer.models import architecture
from trainkit.trainer.models.model import Model, Part


class CausalLM:
    """A decoder on token shards."""

    def __init__(self, config: RunConfig, run: RunDir | None) -> None:
        seq_len = config.data.seq_len
        self.train_data = open_dataset(config.data, seq_len, "train")
        evaluates = config.train.eval_every is not None and has_validation(config.data)
        self.val_data = open_dataset(config.data, seq_len, "val") if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_layers = self.shape.num_layers
        self._model_class = architecture(config.model.architecture, run)
        self.num_params = self._model_class.num_params(self.shape)
        self.flops_per_token = self._model_class.flops_per_token(self.shape, seq_len)
        self._seq_len = seq_len

    def build_model(self, part: Part | None = None) -> Model:
        with torch.device("meta"):
            return self._model_class(self.shape, self._seq_len, part)

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        nll_sum = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )
        # Split over the vocabulary it is a DTensor.
        return nll_sum.full_tensor() if isinstance(nll_sum, DTensor) else nll_sum
