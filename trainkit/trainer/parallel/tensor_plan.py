"""Tensor parallelism of a user's task: splits the modules of its model that `Task.tensor_plan` names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trainkit.config.schema import RunConfig
from trainkit.errors import Problem
from trainkit.plan.layout_rules import divisors
from trainkit.task import Task
from trainkit.trainer.models.model import local_tensor, shard_index
from trainkit.trainer.parallel.tensor import SumsGradients, VocabularyParallel, matches
from trainkit.trainer.task_errors import TaskError, errors_of_user, refusal

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "replicated_with_grad_allreduce": SumsGradients(),
}
"""The styles of a plan by name; the names are those of transformers."""
COMPARED_ELEMENTS = 256
"""Elements of every gradient that tensor-parallel ranks compare."""
MAX_DIFFERENCE = 0.1
"""Relative; far above the rounding of bf16, far below a gradient of which a rank has only its part."""


def find_styles(task: Task, config: RunConfig, model: nn.Module, tp: int) -> dict[nn.Module, ParallelStyle]:
    """The style of every module that the plan of the task names, for `tp` ranks.

    Raises TaskError for a pattern that matches no module, a style that does not fit its module, and a width
    that `tp` does not divide.
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
            close = get_close_matches(str(pattern), modules, n=1)
            hint = "`*` matches one part of a name: layers.*.mlp.up" + (
                f"; it has {close[0]}" if close else ""
            )
            raise refusal(
                config, f"tensor_plan() names {pattern}, which no module of its model matches", hint
            )
    styles: dict[nn.Module, ParallelStyle] = {}
    for path, module in modules.items():
        value = next((value for pattern, value in plan.items() if matches(pattern, path)), None)
        if value is not None and module not in styles:
            styles[module] = _style(config, path, module, value, tp)
    return styles


def _style(config: RunConfig, path: str, module: nn.Module, value: object, tp: int) -> ParallelStyle:
    """The style of one module; raises TaskError if it does not fit."""
    style = STYLES.get(value) if isinstance(value, str) else value
    if not isinstance(style, ParallelStyle):
        hint = f"it can be {', '.join(STYLES)}, or a ParallelStyle of torch.distributed.tensor.parallel"
        raise refusal(config, f"tensor_plan() has {value!r} for {path}", hint)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return style
    own = [key for key, _ in [*module.named_parameters(), *module.named_buffers()]]
    if not isinstance(module, nn.Linear | nn.Embedding) or not set(own) <= {"weight", "bias"}:
        message = f"{path} is a {type(module).__name__}, which {_shown(value)} in tensor_plan() cannot split"
        raise refusal(config, message, "it splits nn.Linear and nn.Embedding; others need a ParallelStyle")
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
        hint = f"it can be {divisors(size, most=tp)}; modules that tensor_plan() does not name stay whole"
        raise TaskError(Problem("parallel.tp", message, hint=hint))
    if isinstance(module, nn.Embedding) and isinstance(style, RowwiseParallel) and style.use_local_output:
        if module.padding_idx is not None or module.max_norm is not None:
            message = f"{path} has padding_idx or max_norm, which {_shown(value)} in tensor_plan() cannot do"
            raise refusal(config, message, "use colwise_gather_output")
        # That of torch cannot be compiled: its gradient would be wrong.
        return VocabularyParallel(style.output_layouts[0])
    return style


def _shown(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


def split_model(
    config: RunConfig, model: nn.Module, styles: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh
) -> dict[str, Tensor]:
    """Split a model over the ranks of `mesh`, and leave its parameters on the meta device.

    Returns the whole values of those that were not there, by name, of which `fill_shards` takes a part: no
    device gets more than its shard. Raises TaskError for parameters that are shared but split differently.
    """
    values = {path: param.detach() for path, param in model.named_parameters() if not param.is_meta}
    paths: dict[nn.Parameter, list[str]] = defaultdict(list)
    for path, param in model.named_parameters(remove_duplicate=False):
        paths[param].append(path)
    for param, same in paths.items():
        on_meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        _set(model, same, on_meta)
    for module, style in styles.items():
        parallelize_module(module, mesh, style)
    for param, same in paths.items():
        # A style replaces the parameters of its module, which are then neither shared nor frozen.
        first, *others = (model.get_parameter(path) for path in same)
        for path, other in zip(same[1:], others, strict=True):
            if _placements(other) != _placements(first):
                message = f"{same[0]} and {path} are one parameter, which tensor_plan() splits in two ways"
                hint = "a head that shares its weight with an embedding: rowwise and colwise_gather_output"
                raise refusal(config, message, hint)
        first.requires_grad_(param.requires_grad)
        _set(model, same, first)
    return values


def _set(model: nn.Module, paths: list[str], param: nn.Parameter) -> None:
    for path in paths:
        owner, _, key = path.rpartition(".")
        setattr(model.get_submodule(owner), key, param)


def _placements(param: nn.Parameter) -> object:
    return param.placements if isinstance(param, DTensor) else None


@torch.no_grad()
def fill_shards(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give this rank's shard of each parameter its part of the whole values."""
    for name, param in model.named_parameters():
        if name in values:
            local_tensor(param).copy_(values[name][tuple(shard_index(param))])


@torch.no_grad()
def check_replicated_gradients(config: RunConfig, model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise TaskError if a parameter that the plan leaves whole has another gradient on another rank.

    So it is where a module gets inputs that are split, and each rank computes only a part of the gradient.
    """
    samples: dict[str, Tensor] = {}
    for path, param in model.named_parameters():
        is_planned = isinstance(param, DTensor) and "tp" in (param.device_mesh.mesh_dim_names or ())
        if not is_planned and param.grad is not None:
            gradient = local_tensor(param.grad).flatten()
            step = max(1, gradient.numel() // COMPARED_ELEMENTS)
            samples[path] = gradient[::step].to(mesh.device_type, torch.float32)
    if not samples:
        return
    own = torch.cat(list(samples.values()))
    gathered = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(gathered, own, group=mesh.get_group())
    parts = torch.split(torch.stack(gathered), [sample.numel() for sample in samples.values()], dim=1)
    different = torch.stack([(part - part[:1]).norm(dim=1).max() for part in parts])
    size = torch.stack([part.norm(dim=1).max() for part in parts])
    wrong = [
        path
        for path, is_wrong in zip(samples, (different > MAX_DIFFERENCE * size).tolist(), strict=True)
        if is_wrong
    ]
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        message = f"the tensor-parallel ranks have different gradients of {shown}, outside tensor_plan()"
        hint = "give its module replicated_with_grad_allreduce if its input is split; seed nothing by rank"
        raise refusal(config, message, hint)
