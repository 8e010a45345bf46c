"""The tensors that a checkpoint holds, by names that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.frozen import dataclass
from trainkit.trainer.dtensor import local
from trainkit.trainer.optimizer import ShardedAdamW
from trainkit.trainer.weights import Weight


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
