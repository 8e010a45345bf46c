"""Predict the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.config.schema import RunConfig
from trainkit.data.open import has_validation, open_dataset
from trainkit.plan.model_shape import flops_per_token, num_params, resolve_model_shape
from trainkit.trainer.data.batches import IGNORE_LABEL
from trainkit.trainer.models.decoder import Block, Decoder
from trainkit.trainer.models.init import init_parameters
from trainkit.trainer.models.parts import Part, Role, Seen


class CausalLM:
    """A decoder on token shards."""

    def __init__(self, config: RunConfig) -> None:
        seq_len = config.data.seq_len
        self.train_data = open_dataset(config.data, seq_len, "train")
        evaluates = config.train.eval_every is not None and has_validation(config.data)
        self.val_data = open_dataset(config.data, seq_len, "val") if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_layers = self.shape.num_layers
        self.tied = frozenset({"embedding.weight"} if self.shape.tie_embeddings else ())
        self.num_params = num_params(self.shape)
        self.flops_per_token = flops_per_token(self.shape, seq_len)
        self._seq_len = seq_len

    def build_model(self, part: Part | None = None) -> nn.Module:
        with torch.device("meta"):
            return Decoder(self.shape, self._seq_len, part)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Role]:
        return cast(Decoder, model).TENSOR_PLAN

    def see(self, model: nn.Module, seen: Seen) -> None:
        cast(Decoder, model).see(seen)

    def stream_shape(self, model: nn.Module) -> tuple[int, int]:
        return len(cast(Decoder, model).positions), self.shape.dim

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        return [cast(Block, block).attention for block in self.blocks(model)]

    def canonical(self, model: nn.Module, name: str) -> str:
        return cast(Decoder, model).canonical(name)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [block for block in cast(Decoder, model).blocks if block is not None]

    def restore(self, model: nn.Module) -> None:
        cast(Decoder, model).restore()

    def init_model(self, model: nn.Module, seed: int) -> None:
        decoder = cast(Decoder, model)
        decoder.restore()
        init_parameters(decoder, decoder.init_std, seed, decoder.canonical)

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        nll_sum = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )
        # Split over the vocabulary it is a DTensor.
        return nll_sum.full_tensor() if isinstance(nll_sum, DTensor) else nll_sum
