"""Tensor parallelism: split a model's matrices across ranks, according to a plan.

The plan is `Model.TENSOR_PLAN` or `Task.tensor_plan`. In Megatron's scheme (arXiv 1909.08053, 2205.05198), a
column-wise matrix followed by a row-wise matrix needs only one reduction. With sequence parallelism, each
rank has only a slice of the residual stream outside the split matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
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

from trainkit.config.running import ParallelConfig
from trainkit.config.schema import RunConfig
from trainkit.errors import FatalError
from trainkit.plan.layout_rules import divisors
from trainkit.task import Task
from trainkit.trainer.models.experts import Experts
from trainkit.trainer.models.model import (
    Model,
    Role,
    local_tensor,
    matches,
    set_tensor,
    shard_index,
    shared_names,
)
from trainkit.trainer.torch_private import ModuleStyle, with_params
from trainkit.trainer.user_code import TaskError, errors_of_user, refusal

SEQUENCE_DIM = 1
HEADS_DIM = 2


class VocabularyParallel(ModuleStyle):
    """Splits an embedding by rows (the vocabulary), so that a tied head can use the same shards.

    Each rank looks up the tokens in its own rows, and the results are summed across the ranks.
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


def apply_tensor_parallel(model: Model, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
    """Split the modules that the model's plan contains; ``*`` matches one component of a name.

    With `loss_parallel`, the logits are a DTensor sharded over the vocabulary. Experts stay unchanged if
    expert parallelism divides them over the tensor-parallel ranks.
    """
    sequence_parallel = parallel.sequence_parallel
    stream: Placement = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    logits = ColwiseParallel(
        input_layouts=stream,
        output_layouts=Shard(-1) if parallel.loss_parallel else Replicate(),
        use_local_output=not parallel.loss_parallel,
    )
    styles: dict[Role, ParallelStyle | None] = {
        "embedding": VocabularyParallel(stream),
        "norm": SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
        if sequence_parallel
        else None,
        "stream": SumsGradients() if sequence_parallel else None,
        "experts": SumsGradients() if sequence_parallel else None,
        "whole_input": _WholeInput(stream),
        "column": ColwiseParallel(),
        "heads": SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True),
        "row": RowwiseParallel(output_layouts=stream),
        "head": logits,
    }
    _check_plan_is_complete(model)
    found = {
        name: styles[role]
        for name, module in model.named_modules()
        if (role := model.role(name)) and not (parallel.ep > 1 and isinstance(module, Experts))
    }
    parallelize_module(model, mesh, {name: style for name, style in found.items() if style is not None})


def _check_plan_is_complete(model: Model) -> None:
    """Raise FatalError if a module with parameters is missing from the plan.

    Without a role, a module's gradients would silently cover only one rank's slice of the sequence.
    """
    for name, module in model.named_modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and model.role(name) in (None, "whole_input"):
            raise FatalError(
                f"TENSOR_PLAN of {type(model).__name__} does not name `{name}`",
                hint="give every module with its own parameters a role, or set parallel.tp to 1",
            )


class SumsGradients(ModuleStyle):
    """Sums the gradients of a module's parameters across tensor-parallel ranks."""

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
    """Gathers a module's first argument on every rank and passes other arguments unchanged.

    The argument stays a DTensor, so that the gradients from several matrices are first added locally and then
    reduced across the ranks only once.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        inner, stream = module.forward, self.stream

        # A hook would gather outside the module, whose whole input would then be stored for recomputation.
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            first = DTensor.from_local(x, mesh, [stream], run_check=False)
            return inner(first.redistribute(placements=[Replicate()]), *args, **kwargs)

        module.forward = forward
        return module


STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "replicated_with_grad_allreduce": SumsGradients(),
}
"""Styles allowed in `Task.tensor_plan`; the names are the same as in transformers."""


def find_styles(task: Task, config: RunConfig, model: nn.Module, tp: int) -> dict[nn.Module, ParallelStyle]:
    """Return the parallel style of each module in the task's plan for `tp` ranks.

    Raises TaskError if a pattern matches no module, if a style does not fit its module, or if a module's
    width is not divisible by `tp`.
    """
    with errors_of_user(config, "tensor_plan() failed"):
        plan = task.tensor_plan(model)
    if not isinstance(plan, Mapping) or not plan:
        found = "an empty plan" if isinstance(plan, Mapping) else f"a {type(plan).__name__}"
        raise refusal(
            config, f"tensor_plan() returned {found}", 'return a dict such as {"layers.*.up": "colwise"}'
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern in plan:
        if not any(matches(pattern, module) for module in modules):
            hint = "`*` matches one component of a name, as in layers.*.mlp.up"
            message = f"tensor_plan() names {pattern}, which no module of its model matches"
            raise refusal(config, message, hint)
    styles: dict[nn.Module, ParallelStyle] = {}
    for path, module in modules.items():
        value = next((value for pattern, value in plan.items() if matches(pattern, path)), None)
        if value is not None and module not in styles:
            styles[module] = _style(config, path, module, value, tp)
    return styles


def _style(config: RunConfig, path: str, module: nn.Module, value: object, tp: int) -> ParallelStyle:
    """Return the parallel style of one module; raise TaskError if the style does not fit the module."""
    style = STYLES.get(value) if isinstance(value, str) else value
    if not isinstance(style, ParallelStyle):
        hint = f"use one of {', '.join(STYLES)}, or a ParallelStyle from torch.distributed.tensor.parallel"
        raise refusal(config, f"tensor_plan() has {value!r} for {path}", hint)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return style
    own = [key for key, _ in [*module.named_parameters(), *module.named_buffers()]]
    if not isinstance(module, nn.Linear | nn.Embedding) or not set(own) <= {"weight", "bias"}:
        message = f"{path} is a {type(module).__name__}, which {_shown(value)} in tensor_plan() cannot split"
        raise refusal(
            config,
            message,
            "style names apply only to nn.Linear and nn.Embedding; use a ParallelStyle for other modules",
        )
    is_embedding, is_colwise = isinstance(module, nn.Embedding), isinstance(style, ColwiseParallel)
    width = {
        (False, False): "in_features",
        (False, True): "out_features",
        (True, False): "num_embeddings",
        (True, True): "embedding_dim",
    }[is_embedding, is_colwise]
    size = getattr(module, width)
    if size % tp:
        message = f"is {tp}, which does not divide {width} {size} of {path}"
        hint = f"it can be {divisors(size, most=tp)}; modules that are not in tensor_plan() stay whole"
        raise TaskError("parallel.tp", message, hint)
    if isinstance(module, nn.Embedding) and isinstance(style, RowwiseParallel) and style.use_local_output:
        if module.padding_idx is not None or module.max_norm is not None:
            message = (
                f"{path} has padding_idx or max_norm, which {_shown(value)} in tensor_plan() does not support"
            )
            raise refusal(config, message, "use colwise_gather_output")
        # torch's own style for embeddings cannot be compiled: the compiled gradient would be wrong.
        return VocabularyParallel(style.output_layouts[0])
    return style


def _shown(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


def split_model(
    config: RunConfig, model: nn.Module, styles: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh
) -> dict[str, Tensor]:
    """Split a model across the ranks of `mesh`, leaving its parameters on the meta device.

    Returns the full (unsharded) tensors, by name, of parameters that were not on the meta device.
    `fill_shards` later copies only a slice of each tensor, so that no device receives more than its shard.
    Raises TaskError if a shared parameter would be split in two different ways.
    """
    values = {path: param.detach() for path, param in model.named_parameters() if not param.is_meta}
    paths = shared_names(model)
    for param, same in paths.items():
        on_meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        for path in same:
            set_tensor(model, path, on_meta)
    for module, style in styles.items():
        parallelize_module(module, mesh, style)
    for param, same in paths.items():
        # Applying a style replaces a module's parameters. The new parameters are neither shared nor frozen,
        # so share and freeze them again.
        first, *others = (model.get_parameter(path) for path in same)
        for path, other in zip(same[1:], others, strict=True):
            if _placements(other) != _placements(first):
                message = f"{same[0]} and {path} are one parameter, which tensor_plan() splits in two ways"
                hint = (
                    "for an embedding with a tied head, use rowwise, and for the head colwise_gather_output"
                )
                raise refusal(config, message, hint)
        first.requires_grad_(param.requires_grad)
        for path in same[1:]:
            set_tensor(model, path, first)
    return values


def _placements(param: nn.Parameter) -> object:
    return param.placements if isinstance(param, DTensor) else None


@torch.no_grad()
def fill_shards(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy this rank's slice of each full tensor to the parameter's local shard."""
    for name, param in model.named_parameters():
        if name in values:
            local_tensor(param).copy_(values[name][tuple(shard_index(param))])
