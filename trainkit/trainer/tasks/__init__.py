"""What is learned. A task owns the model, the data and the loss; the loop owns everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.data.shards import TokenShards
from trainkit.trainer.models.parts import Part, Role, Seen


class Task(Protocol):
    """The parts of a training that differ between one problem and another."""

    train_data: TokenShards
    val_data: TokenShards | None
    num_layers: int
    tied: frozenset[str]
    """Names of the weights that both ends of the model use."""
    num_params: int
    flops_per_token: float

    def build_model(self, part: Part | None = None) -> nn.Module:
        """The model, or a part of it, without values (on the meta device)."""
        ...

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Role]:
        """What tensor parallelism does with which modules."""
        ...

    def see(self, model: nn.Module, seen: Seen) -> None:
        """Let a model work on these positions of a sequence only."""
        ...

    def stream_shape(self, model: nn.Module) -> tuple[int, int]:
        """Positions and width of what this rank gets from the stage before, of one sample."""
        ...

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The modules with an `attend` that looks at a whole sequence."""
        ...

    def canonical(self, model: nn.Module, name: str) -> str:
        """The name of a parameter in the whole model; of tied ones, that of the first."""
        ...

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated layers, in order: the unit of compiling, recomputing and sharding."""
        ...

    def restore(self, model: nn.Module) -> None:
        """Bring back what giving a model its memory has lost, but for the values of its parameters."""
        ...

    def init_model(self, model: nn.Module, seed: int) -> None:
        """Give every parameter and buffer its first value, the same on any layout."""
        ...

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The negative log-likelihood summed over the labels that count, float32 []."""
        ...


def build_task(config: RunConfig) -> Task:
    """The task that the config names."""
    from trainkit.trainer.tasks.causal_lm import CausalLM

    return CausalLM(config)
