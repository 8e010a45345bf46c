"""The training task, which defines the model, the data and the loss; the loop does everything else."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.config.schema import RunConfig
from trainkit.data.cache import has_validation
from trainkit.data.shards import TokenShards, open_dataset
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.rundir import RunDir
from trainkit.trainer.batches import IGNORE_LABEL
from trainkit.trainer.models import load_architecture
from trainkit.trainer.models.model import Model, StageSpec
from trainkit.trainer.models.supported_layouts import refuse_unsupported_layout


class Task(Protocol):
    """The model, the data and the loss of a training run."""

    train_data: TokenShards
    val_data: TokenShards | None
    num_layers: int
    num_params: int
    flops_per_token: float

    def build_model(self, stage: StageSpec | None = None) -> Model:
        """The model, or one pipeline stage of it, on the meta device."""
        ...

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The negative log-likelihood, summed over all valid labels, float32 []."""
        ...


class CausalLM:
    """Next-token prediction on token shards."""

    def __init__(self, config: RunConfig, run: RunDir | None, checks_data: bool) -> None:
        seq_len = config.data.seq_len
        # Before the data is prepared, which may take long.
        self._model_class = load_architecture(config.model.architecture, run)
        refuse_unsupported_layout(config, self._model_class)
        self.train_data = open_dataset(config.data, seq_len, "train", checks_data)
        evaluates = config.train.eval_every is not None and has_validation(config.data, checks_data)
        self.val_data = open_dataset(config.data, seq_len, "val", checks_data) if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_layers = self.shape.num_layers
        self.num_params = self._model_class.num_params(self.shape)
        self.flops_per_token = self._model_class.flops_per_token(self.shape, seq_len)
        self._seq_len = seq_len

    def build_model(self, stage: StageSpec | None = None) -> Model:
        with torch.device("meta"):
            return self._model_class(self.shape, self._seq_len, stage)

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        nll_sum = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )
        # A DTensor with loss parallelism, which splits logits over the vocabulary.
        return nll_sum.full_tensor() if isinstance(nll_sum, DTensor) else nll_sum


def build_task(config: RunConfig, run: RunDir | None = None, checks_data: bool = True) -> Task:
    """The task of a config; a run loads its architecture from its code snapshot.

    With `checks_data` this rank looks at the size of every shard, which one of a job does.
    """
    return CausalLM(config, run, checks_data)
