"""The tensors that a checkpoint holds, by names that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.trainer.optimizer import ShardedAdamW
from trainkit.trainer.weights import Weight, local


@dataclass(frozen=True)
class TrainingState:
    """This rank's part of the weights and of the optimizer's state."""

    tensors: dict[str, Tensor]
    twins: list[tuple[Tensor, Tensor]]
    """What this rank has twice, because it holds both ends of a pipeline: in the checkpoint it is once."""

    @classmethod
    def of(cls, weights: Sequence[Weight], optimizer: ShardedAdamW) -> TrainingState:
        state = cls({}, [])
        for weight in weights:
            state._add(f"model.{weight.name}", weight.param.detach())
        for name, tensor in optimizer.state_tensors():
            state._add(f"optimizer.{name}", tensor)
        return state

    def _add(self, name: str, tensor: Tensor) -> None:
        if name in self.tensors:
            self.twins.append((self.tensors[name], tensor))
        else:
            self.tensors[name] = tensor

    @torch.no_grad()
    def copy_twins(self) -> None:
        """Give each twin the value of the tensor that was loaded."""
        for loaded, twin in self.twins:
            local(twin).copy_(local(loaded))


@dataclass
class Progress:
    """Counts what has been done; every number is the same on all ranks."""

    step: int = 0
    samples_seen: int = 0
    """Position in the data: samples consumed so far, over all epochs."""
    tokens_seen: int = 0
    last_eval_step: int = -1
    best_value: float | None = None
    best_step: int | None = None
    nonfinite_in_a_row: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Progress:
        return cls(**value)
