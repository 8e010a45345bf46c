"""Provides a small user-written transformer that declares how tensor parallelism splits it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from trainkit.config.schema import RunConfig
from trainkit.task import Loss, Samples, Task, parameters_on_meta

WIDTH, HEAD, VOCAB, LENGTH = 32, 8, 24, 12


class Sentences:
    """Random tokens that repeat, so that the model can learn something."""

    def __init__(self, count: int, seed: int) -> None:
        start = torch.randint(0, VOCAB, (count, 4), generator=torch.Generator().manual_seed(seed))
        self.tokens = start.repeat(1, 4)[:, : LENGTH + 1]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.q_norm = nn.RMSNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Speaker(nn.Module):
    def __init__(self, hidden: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = Positions()
        self.layers = nn.ModuleList(Layer(hidden, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.num_passes += 1
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


NAMES: dict[str, str | ParallelStyle] = {
    **dict.fromkeys(("layers.*.attention.[qkv]", "layers.*.up"), "colwise"),
    **dict.fromkeys(("layers.*.attention.out", "layers.*.down", "embed"), "rowwise"),
    "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
    "head": "colwise_gather_output",
}


def sequence_plan() -> dict[str, str | ParallelStyle]:
    """Return a plan with torch's styles that shards the residual stream along the sequence."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "positions": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        **dict.fromkeys(("layers.*.norm[12]", "norm"), SequenceParallel(use_local_output=True)),
        "layers.*.attention.[qkv]": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class Speak(Task):
    """Repeats tokens. `without` removes modules from the plan, and `extra` adds some."""

    def __init__(
        self,
        config: RunConfig,
        *,
        hidden: int = 48,
        dropout: float = 0.0,
        tied: bool = False,
        frozen: bool = False,
        on_meta: bool = False,
        without: tuple[str, ...] = (),
        extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(config)
        self.shape = hidden, dropout, tied
        self.frozen, self.on_meta = frozen, on_meta
        self.without, self.extra = without, extra or {}

    def build_model(self) -> nn.Module:
        model = Speaker(*self.shape)
        if self.frozen:
            model.embed.requires_grad_(False)
            model.layers[0].requires_grad_(False)
        if self.on_meta:
            self.values = {name: param.detach() for name, param in model.named_parameters()}
            with parameters_on_meta():
                model = Speaker(*self.shape)
        return model

    def read_weight(self, name: str, rows: slice) -> Tensor:
        return self.values[name][rows]

    def train_dataset(self) -> Samples:
        return Sentences(100, 0)

    def val_dataset(self) -> Samples:
        return Sentences(21, 1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits, labels = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        right = (logits.argmax(-1) == labels).sum()
        return Loss(total, labels.numel(), {"accuracy": right, "right": (right, len(batch))})

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str | ParallelStyle]:
        plan = {**NAMES, **self.extra}
        return {name: style for name, style in plan.items() if name not in self.without}


class SpeakInSequence(Speak):
    """Repeats tokens, with a model that is also sharded along the sequence."""

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str | ParallelStyle]:
        return sequence_plan()


class NoPlan(Speak):
    """Repeats tokens, with a model that does not declare how it is split."""

    tensor_plan = Task.tensor_plan
