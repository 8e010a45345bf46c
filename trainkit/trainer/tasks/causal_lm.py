"""Predict the next token."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.data.open import has_validation, open_dataset
from trainkit.plan.model_shape import flops_per_token, num_params, resolve_model_shape
from trainkit.trainer.data.batches import IGNORE_LABEL, Microbatch
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.init import init_parameters


class CausalLM:
    """A decoder on token shards."""

    def __init__(self, config: RunConfig) -> None:
        seq_len = config.data.seq_len
        self.train_data = open_dataset(config.data, seq_len, "train")
        evaluates = config.train.eval_every is not None and has_validation(config.data)
        self.val_data = open_dataset(config.data, seq_len, "val") if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_params = num_params(self.shape)
        self.flops_per_token = flops_per_token(self.shape, seq_len)
        self._seq_len = seq_len

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return Decoder(self.shape, self._seq_len)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(cast(Decoder, model).blocks)

    def init_model(self, model: nn.Module, seed: int) -> None:
        decoder = cast(Decoder, model)
        decoder.restore()
        init_parameters(decoder, decoder.init_std, seed)

    def nll_sum(self, model: nn.Module, micro: Microbatch) -> Tensor:
        logits = model(micro.tokens, micro.sample_keys)
        return F.cross_entropy(
            logits.float().flatten(0, 1), micro.labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )
