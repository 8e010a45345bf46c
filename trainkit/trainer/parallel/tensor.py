"""Tensor parallelism: splits the matrices of a model over ranks by the plan that the model declares.

Megatron's scheme (arXiv 1909.08053, 2205.05198): a column-wise followed by a row-wise matrix needs only one
reduction; with sequence parallelism each rank has a slice of the residual stream between such pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.trainer.models.model import Role
from trainkit.trainer.torch_private import ModuleStyle, with_params

SEQUENCE_DIM = 1


class VocabularyParallel(ModuleStyle):
    """Splits an embedding by rows, over the vocabulary, so that a tied head can share it.

    Each rank looks up its own rows, and the sum over the ranks is the embedding.
    """

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.get_parameter("weight").data, mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = partial(_lookup, module, mesh, self.output)
        return module


def _lookup(module: nn.Module, mesh: DeviceMesh, output: Placement, tokens: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, DTensor)
    rows = weight.to_local()
    index = tokens - mesh.get_local_rank() * rows.shape[0]
    is_local = (index >= 0) & (index < rows.shape[0])
    found = F.embedding(index.where(is_local, 0), rows) * is_local[..., None]
    return (
        DTensor.from_local(found, mesh, [Partial()], run_check=False)
        .redistribute(placements=[output])
        .to_local()
    )


def apply_tensor_parallel(
    model: nn.Module,
    plan: Mapping[str, Role],
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Split the modules of a model that the plan names; ``*`` matches one component of a name.

    With `loss_parallel` the logits are a DTensor that is split over the vocabulary.
    """
    stream: Placement = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    logits = ColwiseParallel(
        input_layouts=stream,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    styles: dict[Role, ParallelStyle | None] = {
        "embedding": VocabularyParallel(stream),
        "norm": SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
        if sequence_parallel
        else None,
        "stream": SumsGradients() if sequence_parallel else None,
        "whole_input": _WholeInput(stream),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=stream),
        "head": logits,
    }
    _check_plan_is_complete(model, plan)
    found = {name: styles[role] for name, _ in model.named_modules() if (role := _role(name, plan))}
    parallelize_module(model, mesh, {name: style for name, style in found.items() if style is not None})


def _check_plan_is_complete(model: nn.Module, plan: Mapping[str, Role]) -> None:
    """Raise TrainkitError (exit code 78) for modules with parameters that the plan does not name.

    Their gradients would silently cover only the slice of one rank.
    """
    for name, module in model.named_modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and _role(name, plan) in (None, "whole_input"):
            raise TrainkitError(
                f"TENSOR_PLAN of {type(model).__name__} does not name `{name}`",
                hint="give every module with its own parameters a role, or set parallel.tp to 1",
                exit_code=EXIT_NO_RESTART,
            )


def _role(name: str, plan: Mapping[str, Role]) -> Role | None:
    """The role of a module in the plan; None if the plan does not name it."""
    return next((role for pattern, role in plan.items() if matches(pattern, name)), None)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a module; ``*`` matches one component of it."""
    components, patterns = name.split("."), pattern.split(".")
    return len(patterns) == len(components) and all(map(fnmatchcase, components, patterns))


class SumsGradients(ModuleStyle):
    """Sums the gradients of a module's parameters over the tensor-parallel ranks."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.data, mesh, [Replicate()])))
        module.forward = partial(_on_local, module, module.forward)
        return module


def _on_local(module: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    local = {
        name: cast(DTensor, param).to_local(grad_placements=[Partial()])
        for name, param in module.named_parameters(recurse=False)
    }
    with with_params(module, local):
        return forward(*args, **kwargs)


class _WholeInput(ModuleStyle):
    """Gathers a module's first argument on every rank; its other arguments are not split.

    The argument stays a DTensor, so that the gradients from several matrices are summed before a single
    reduction over the ranks.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            first = DTensor.from_local(args[0], mesh, [self.stream], run_check=False)
            return (first.redistribute(placements=[Replicate()]), *args[1:])

        module.register_forward_pre_hook(gather)
        return module
