"""Provides small models and a world of one process for tests of single components."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.config.training import ModelConfig
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.trainer.build import init_parameters
from trainkit.trainer.causal_lm import IGNORE_LABEL
from trainkit.trainer.distributed import World
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.torch_private import join_fake_world

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


def nll_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
    )


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """Give the mesh of two tensor-parallel ranks to this process, as rank 1 without a rank 0."""
    join_fake_world(1, 2)
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
