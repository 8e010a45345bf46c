"""Provides small models and a world of one process for tests of single components."""

from typing import Any

import torch
from torch import Tensor

from trainkit.config.training import ModelConfig
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.trainer.build import init_parameters
from trainkit.trainer.distributed import World
from trainkit.trainer.models.decoder import Decoder

ALONE = World(0, 1, torch.device("cpu"), None, None)
SEQ_LEN = 16


def nano_shape(vocab_size: int = 257, **config: Any) -> ModelShape:
    return resolve_model_shape(ModelConfig(**{"preset": "nano", **config}), vocab_size)


def nano(seed: int = 0, **config: Any) -> Decoder:
    """Return a model of a few thousand parameters with its initial values."""
    model = Decoder(nano_shape(**config), SEQ_LEN)
    init_parameters(model, seed)
    return model


def tokens(batch: int = 2, length: int = SEQ_LEN, seed: int = 0) -> Tensor:
    return torch.randint(0, 257, (batch, length), generator=torch.Generator().manual_seed(seed))


def sample_keys(batch: int = 2) -> Tensor:
    return torch.arange(7, 7 + batch, dtype=torch.int32)
