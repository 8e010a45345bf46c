"""What is learned. A task owns the model, the data and the loss; the loop owns everything else."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.data.shards import TokenShards
from trainkit.rundir import RunDir
from trainkit.trainer.models.model import Model, Part


class Task(Protocol):
    """The parts of a training that differ between one problem and another."""

    train_data: TokenShards
    val_data: TokenShards | None
    num_layers: int
    num_params: int
    flops_per_token: float

    def build_model(self, part: Part | None = None) -> Model:
        """The model, or a part of it, without values (on the meta device)."""
        ...

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The negative log-likelihood summed over the labels that count, float32 []."""
        ...


def build_task(config: RunConfig, run: RunDir | None = None) -> Task:
    """The task that the config names, with the code that the run was submitted with."""
    from trainkit.trainer.tasks.causal_lm import CausalLM

    return CausalLM(config, run)
