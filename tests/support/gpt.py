"""Defines a user's architecture: GPT-2 in one file (learned positions, LayerNorm with biases, GELU)."""

from typing import ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.plan.model_shape import ModelShape
from trainkit.trainer.models.decoder import causal_attention
from trainkit.trainer.models.model import Model, PositionSlice, Role, StageSpec
from trainkit.trainer.stateless_random import dropout, stable_key


class SelfAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query, self.key, self.value, self.out = (nn.Linear(shape.dim, shape.dim) for _ in range(4))
        self.attend = causal_attention

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return cast(Tensor, self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(shape.dim, shape.ffn_dim), nn.Linear(shape.ffn_dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x))))


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.dropout, self.key = shape.dropout, stable_key("layer", index)
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.attention, self.mlp = SelfAttention(shape), Mlp(shape)

    def forward(self, x: Tensor, sample_keys: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y = self.mlp(self.norm_2(x))
        return x + dropout(y, self.dropout if self.training else 0.0, sample_keys, self.key, positions)


class Gpt(Model):
    """The GPT-2 model."""

    positions: Tensor
    TENSOR_PLAN: ClassVar[dict[str, Role]] = {
        "tokens": "embedding",
        "places": "stream",
        "stack.*.norm_*": "norm",
        "stack.*.attention": "whole_input",
        **{f"stack.*.attention.{name}": "column" for name in ("query", "key", "value")},
        "stack.*.attention.out": "row",
        "stack.*.mlp": "whole_input",
        "stack.*.mlp.up": "column",
        "stack.*.mlp.down": "row",
        "norm": "norm",
        "head": "head",
    }
    TIED: ClassVar[dict[str, str]] = {"head.weight": "tokens.weight"}

    def __init__(self, shape: ModelShape, seq_len: int, stage: StageSpec | None = None) -> None:
        super().__init__(shape, seq_len, stage)
        stage = stage or StageSpec.whole(shape.num_layers)
        self.position_slice = PositionSlice.all(seq_len)
        self.tokens = nn.Embedding(shape.vocab_size, shape.dim) if stage.has_embedding else None
        self.places = nn.Embedding(seq_len, shape.dim) if stage.has_embedding else None
        self.stack = nn.ModuleList()
        for index in range(shape.num_layers):
            self.stack.add_module(str(index), Layer(shape, index) if index in stage.layers else None)
        self.norm = nn.LayerNorm(shape.dim) if stage.has_head else None
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False) if stage.has_head else None
        self.register_buffer("positions", self.position_slice.stream.clone(), persistent=False)
        self.tie()

    @staticmethod
    def num_params(shape: ModelShape) -> int:
        return 0  # this number is only printed

    @staticmethod
    def flops_per_token(shape: ModelShape, seq_len: int) -> float:
        return 0.0

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for layer in self.stack if layer is not None]

    @property
    def attentions(self) -> list[nn.Module]:
        return [cast(Layer, layer).attention for layer in self.layers]

    @property
    def stream_shape(self) -> tuple[int, int]:
        return len(self.positions), self.shape.dim

    def set_positions(self, position_slice: PositionSlice) -> None:
        self.position_slice, self.positions = position_slice, position_slice.stream.clone()

    def rebuild_buffers(self) -> None:
        self.positions.copy_(self.position_slice.stream)
        self.tie()

    def init_std(self, name: str) -> float | None:
        if name.endswith("bias"):
            return 0.0
        return None if "norm" in name else 0.02

    def forward(self, x: Tensor, sample_keys: Tensor) -> Tensor:
        if self.tokens is not None and self.places is not None:
            x = self.tokens(x) + self.places(self.positions)
        for layer in self.layers:
            x = layer(x, sample_keys, self.positions)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x
