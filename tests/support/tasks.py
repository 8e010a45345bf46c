"""Provides tasks as a user would write them."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit.config.schema import RunConfig
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.task import Loss, ParameterOptions, Samples, Stream, Task, TokenSamples
from trainkit.trainer.build import init_parameters
from trainkit.trainer.models.decoder import Decoder


class Points(Dataset[Any]):
    """Labelled points of different importance, with random augmentation from all three generators."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = (self.x[:, :8].sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        noise = torch.randn(16) + random.random() + np.random.rand()
        return {"x": self.x[index] + 0.1 * noise, "y": self.y[index], "weight": index % 3}


class Block(nn.Module):
    average: Tensor | None

    def __init__(self, width: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.register_buffer("average", torch.zeros(width, 2).T if batch_norm else None)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.average is not None:
            # The average is replaced instead of changed in place, and is not contiguous.
            self.average = 0.9 * self.average + 0.1 * x.detach().float().mean(0)
        return x + scale * self.dropout(self.mlp(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self, width: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout, batch_norm) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Classify(Task):
    """Classifies points. The loss uses submodules and weighs samples, so batches count differently."""

    def __init__(
        self,
        config: RunConfig,
        *,
        width: int = 32,
        samples: int = 100,
        dropout: float = 0.0,
        batch_norm: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__(config)
        self.width, self.samples, self.dropout = width, samples, dropout
        self.batch_norm, self.frozen = batch_norm, frozen

    def build_model(self) -> nn.Module:
        model = Classifier(self.width, self.dropout, self.batch_norm)
        model.embed.requires_grad_(not self.frozen)
        return model

    def train_dataset(self) -> Samples | Stream:
        return Points(self.samples, 0)

    def val_dataset(self) -> Samples:
        return Points(21, 1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        assert isinstance(model, Classifier)
        logits = model.head(model.features(batch["x"]))
        weight = batch["weight"]
        total = (F.cross_entropy(logits, batch["y"], reduction="none") * weight).sum()
        right = logits.argmax(1) == batch["y"]
        return Loss(
            total, weight.sum(), {"accuracy": (right.sum(), len(right)), "right": (right * weight).sum()}
        )

    def parameter_options(self, name: str, parameter: nn.Parameter) -> ParameterOptions:
        return (
            ParameterOptions(lr_scale=0.5, weight_decay=0.0)
            if name.startswith("head")
            else ParameterOptions()
        )


class PointStream:
    """The samples of `Points` in their order, as a stream."""

    def __init__(self, count: int, fails_at: int | None, blocks_at: int | None) -> None:
        self.points, self.fails_at, self.blocks_at = Points(count, 0), fails_at, blocks_at
        self.start = self.at = self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < len(self.points):
            if self.num_read == self.fails_at:
                raise KeyError("column")
            if self.num_read == self.blocks_at:
                rank = os.getppid()
                while os.getppid() == rank:  # killing a rank does not end a loader process that blocks
                    time.sleep(0.1)
            item = self.points[self.at]
            self.at += 1
            self.num_read += 1
            yield item


class StatefulPointStream(PointStream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class ClassifyStream(Classify):
    """The task `Classify` with a stream."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int = 100,
        dropout: float = 0.0,
        stateful: bool = True,
        fails_at: int | None = None,
        blocks_at: int | None = None,
    ) -> None:
        super().__init__(config, samples=samples, dropout=dropout)
        self.kind = StatefulPointStream if stateful else PointStream
        self.faults = fails_at, blocks_at

    def train_dataset(self) -> Stream:
        return self.kind(self.samples, *self.faults)


class Tokens(Task):
    """The built-in task, written as a user would write it."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.data = TokenSamples(config.data)

    def build_model(self) -> nn.Module:
        model = Decoder(
            resolve_model_shape(self.config.model, self.data.vocab_size), self.config.data.seq_len
        )
        init_parameters(model, self.config.seed)
        return model

    def train_dataset(self) -> Samples:
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch[:, :-1], batch[:, 1:]
        logits = model(inputs, sample_keys=torch.zeros(len(batch), dtype=torch.int32))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(total, labels.numel())


def write_tutorial(folder: Path) -> Path:
    """Write the example of docs/own-task.md into a folder, and return its config."""
    text = (Path(__file__).parents[2] / "docs" / "own-task.md").read_text().partition("## An example")[2]
    for kind, name in (("python", "curves.py"), ("yaml", "curves.yaml")):
        block = text.partition(f"```{kind}\n")[2].partition("```")[0]
        (folder / name).write_text(block)
    return folder / "curves.yaml"
