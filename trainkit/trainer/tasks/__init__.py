"""What is learned. A task owns the model, the data and the loss; the loop owns everything else."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.data.shards import TokenShards
from trainkit.trainer.data.batches import Microbatch


class Task(Protocol):
    """The parts of a training that differ between one problem and another."""

    train_data: TokenShards
    val_data: TokenShards | None
    num_params: int
    flops_per_token: float

    def build_model(self) -> nn.Module:
        """The model without values (on the meta device)."""
        ...

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated layers, in order: the unit of compiling, recomputing and sharding."""
        ...

    def init_model(self, model: nn.Module, seed: int) -> None:
        """Give every parameter and buffer its first value, the same on any layout."""
        ...

    def nll_sum(self, model: nn.Module, micro: Microbatch) -> Tensor:
        """The negative log-likelihood summed over the labels that count, float32 []."""
        ...


def build_task(config: RunConfig) -> Task:
    """The task that the config names."""
    from trainkit.trainer.tasks.causal_lm import CausalLM

    return CausalLM(config)
