"""Create the optimizer that a user defines in a file, for a task that does not define its own optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.config.optimizers import is_own
from trainkit.config.schema import RunConfig
from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.run.rundir import RunDir
from trainkit.trainer.causal_lm import CausalLM
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.interface import groups_of
from trainkit.trainer.own_optimizers import OwnOptimizers, TorchOptimizers, updates_by_element
from trainkit.trainer.user_code import TaskError, describe, line_of, named_in_file
from trainkit.trainer.user_task import UserTask

NAME, OPTIONS = "optimizer.name", "optimizer.options"
BY_ELEMENT_HINT = (
    "if the optimizer updates each element independently, set by_element = True in the class; otherwise, "
    "set parallel.dp_shard to 1, and parallel.dp_replicate to -1"
)


def make_own_optimizers(
    task: CausalLM | UserTask, weights: Sequence[Weight], layout: Layout, run: RunDir | None = None
) -> TorchOptimizers | None:
    """Create the optimizers that a user defines; return None if the optimizer is one of trainkit's.

    If `run` is given, a file is loaded from the run's code snapshot. Raises TaskError for an optimizer that
    trainkit does not support.
    """
    if isinstance(task, UserTask) and task.has_own_optimizers:
        return OwnOptimizers(task, weights, layout)
    if not is_own(task.config.optimizer.name):
        return None
    return FileOptimizer(task.config, load_optimizer_class(task.config.optimizer, run), weights, layout)


def load_optimizer_class(optimizer: OptimizerConfig, run: RunDir | None = None) -> type[Optimizer]:
    """Return the class that `optimizer.name` specifies as FILE.py:CLASS.

    Raises TaskError if the class cannot be imported, or does not accept `optimizer.options`.
    """
    name = optimizer.name
    class_name = name.rpartition(":")[2]
    hint = (
        "FILE.py:CLASS names a subclass of torch.optim.Optimizer; FILE.py is relative to the current folder"
    )
    path, found = named_in_file(NAME, name, hint, run)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise TaskError(NAME, f"is {name}, but {path} does not define {class_name} as an Optimizer", hint)
    signature = inspect.signature(found)
    decays = [optimizer.weight_decay, *(group.weight_decay for group in optimizer.groups)]
    if any(decays) and not _takes(signature, "weight_decay"):
        place = line_of(found.__init__)
        message = f"is {next(filter(None, decays))}, but {class_name}{place} does not take weight_decay"
        hint = "set optimizer.weight_decay to 0, and remove weight_decay from optimizer.groups"
        raise TaskError("optimizer.weight_decay", message, hint)
    if reserved := sorted({"params", "lr", "weight_decay"} & optimizer.options.keys()):
        message = f"has {reserved[0]}, which trainkit sets"
        raise TaskError(OPTIONS, message, "use optimizer.lr, optimizer.weight_decay and optimizer.groups")
    try:
        signature.bind([], **arguments(signature, optimizer))
    except TypeError as error:
        known = [key for key in signature.parameters if key not in ("params", "lr", "weight_decay")]
        takes = f"{class_name}{line_of(found.__init__)} takes {', '.join(known) or 'no options'}"
        raise TaskError(OPTIONS, f"do not fit: {error}", takes) from None
    return found


def _takes(signature: inspect.Signature, name: str) -> bool:
    parameters = signature.parameters
    return name in parameters or any(at.kind is at.VAR_KEYWORD for at in parameters.values())


def arguments(signature: inspect.Signature, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the keyword arguments with which the optimizer is created."""
    decay = {"weight_decay": optimizer.weight_decay} if _takes(signature, "weight_decay") else {}
    return {"lr": optimizer.lr, **decay, **optimizer.options}


def refuse_optimizer(config: RunConfig) -> None:
    """Raise TaskError if the optimizer in a file cannot be used, as far as known without the model."""
    optimizer, parallel = config.optimizer, config.parallel
    if not is_own(optimizer.name):
        return
    found = load_optimizer_class(optimizer)
    _create(found, optimizer, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    sharded = next((key for key in ("dp_shard", "tp", "cp") if getattr(parallel, key) > 1), None)
    if sharded is not None and not updates_by_element(found):
        message = f"is {optimizer.name}, but parallel.{sharded} shards the parameters"
        raise TaskError(NAME, message, BY_ELEMENT_HINT)


def _create(found: type[Optimizer], optimizer: OptimizerConfig, groups: list[dict[str, Any]]) -> Optimizer:
    make: Any = found
    try:
        created: Optimizer = make(groups, **arguments(inspect.signature(found), optimizer))
    except Exception as error:
        message = f"is {optimizer.name}, but {found.__name__}() failed: {describe(error)}"
        raise TaskError(NAME, message, "correct optimizer.options or the class") from error
    return created


class FileOptimizer(TorchOptimizers):
    """An optimizer of the class that `optimizer.name` specifies, with the learning rate of the schedule."""

    origin: ClassVar[str] = "of the config"

    def __init__(
        self, config: RunConfig, kind: type[Optimizer], weights: Sequence[Weight], layout: Layout
    ) -> None:
        self._kind = kind
        super().__init__(config, weights, layout)

    def _make(self) -> object:
        optimizer = self._config.optimizer
        takes_decay = _takes(inspect.signature(self._kind), "weight_decay")
        groups: list[dict[str, Any]] = []
        for group in groups_of(self._weights, self._locals, optimizer):
            decay = {"weight_decay": group.weight_decay} if takes_decay else {}
            groups.append({"params": group.shards, "lr": optimizer.lr * group.lr_scale, **decay})
        return _create(self._kind, optimizer, groups)

    def _error(self, message: str, hint: str) -> TaskError:
        return TaskError(NAME, f"is {self._config.optimizer.name}, but the optimizer {message}", hint)

    def _error_of(self, kind: str, message: str, hint: str) -> TaskError:
        return TaskError(NAME, f"is {self._config.optimizer.name}, {message}", hint)
