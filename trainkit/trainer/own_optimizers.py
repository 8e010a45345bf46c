"""Run torch optimizers that a user's task or file defines, and save their state in checkpoints."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import chain
from logging import getLogger
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.config.schema import RunConfig
from trainkit.errors import FatalError
from trainkit.plan.launch import Layout
from trainkit.run.files import read_record
from trainkit.run.manifest import Manifest
from trainkit.task import Task
from trainkit.trainer.causal_lm import CausalLM
from trainkit.trainer.checkpoint.state import decode, encode, tensor_paths
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.distributed import World, gather_from_all
from trainkit.trainer.metrics import RECORD_KEYS
from trainkit.trainer.models.model import Weight, as_shard_of, local_tensor
from trainkit.trainer.optimizers.interface import ShardedOptimizer
from trainkit.trainer.step_sync import LOSS_OF
from trainkit.trainer.task_batches import digest_of
from trainkit.trainer.torch_private import copy_each
from trainkit.trainer.user_code import TaskError, errors_of_user, listed, refusal
from trainkit.trainer.user_task import UserTask

log = getLogger(__name__)
ADAMS = {optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam}
BY_ELEMENT = ADAMS | {optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop}
"""PyTorch optimizers that update each element independently, and can therefore update a shard."""
OPTIMIZERS, TASK, ON_HOST = "optimizers", "task", "on_host"
"""Keys of ``state`` in a manifest; `ON_HOST` lists the paths of tensors that are kept on the CPU."""
NAME = re.compile(r"[A-Za-z]\w*")
SavedTensors = Mapping[str, TensorStorageMetadata]


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer's state as stored in a manifest; `encode` has converted all fields except `kind`."""

    kind: str
    """Name of the optimizer class."""
    parameters: dict[str, object]
    """Maps parameter names to optimizer states; contains only parameters that the optimizer has updated."""
    rest: object
    """The optimizer state that belongs to no particular parameter."""
    values: object
    """The settings of the parameter groups, and the state of the learning-rate scheduler."""
    initial: object
    """The initial `values`, created by the task before the first step."""
    num_groups: int = 1

    @property
    def encoded(self) -> Iterator[object]:
        """Yield every field that may refer to tensors, that is, all fields except `kind`."""
        yield from (*self.parameters.values(), self.rest, self.values, self.initial)


def updates_by_element(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Return whether an optimizer or its class updates each element independently, as far as known."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return kind in BY_ELEMENT or bool(getattr(optimizer, "by_element", False))


class TorchOptimizers(ShardedOptimizer):
    """Optimizers of any class, which update this rank's shards of the parameters.

    Most optimizers cannot skip an update if the gradient is not finite. Before each update, the host
    therefore waits for the gradient norm to check that it is finite.
    """

    origin: ClassVar[str] = ""
    """Where the optimizers are defined, for messages."""

    def __init__(self, config: RunConfig, weights: Sequence[Weight], layout: Layout) -> None:
        super().__init__(weights, layout)
        self._config = config
        found = self._make()
        named = found if isinstance(found, Mapping) else {"": found}
        self._schedulers: dict[str, LRScheduler] = {}
        self._optimizers: dict[str, Optimizer] = {}
        for name, item in named.items():
            if isinstance(item, LRScheduler):
                self._schedulers[name] = item
            optimizer = item.optimizer if isinstance(item, LRScheduler) else item
            self._optimizers[name] = cast(Optimizer, optimizer)
        self._refuse(found)
        self._active = list(self._optimizers)
        self._initial = {name: deepcopy(self._values(name)) for name in self._optimizers}
        """Maps optimizer names to the settings and scheduler state that the task created."""
        self._lrs = {
            name: [float(group["lr"]) for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }
        self.collect_state()  # raise an error now, before training, if the state cannot be saved

    @property
    def may_take_turns(self) -> bool:
        """Return whether the optimizers can take turns in a step, each with its own loss."""
        return False

    @property
    def kinds(self) -> dict[str, str]:
        """Return a mapping from optimizer names to class names."""
        return {name: type(optimizer).__name__ for name, optimizer in self._optimizers.items()}

    @abstractmethod
    def _make(self) -> object:
        """Return the optimizers for this rank's shards, or anything else, which is then refused."""

    @abstractmethod
    def _error(self, message: str, hint: str) -> TaskError:
        """Return an error for optimizers that cannot be used; `message` begins with a verb."""

    def _error_of(self, kind: str, message: str, hint: str) -> TaskError:
        """Return an error for an optimizer of the class `kind`; `message` is a relative clause."""
        return self._error(f"returned {kind}, {message}", hint)

    def updated_by(self, turns: Collection[str]) -> set[str]:
        """Return the names of parameters that the optimizers in `turns` update; "" means all optimizers."""
        chosen = self._optimizers.keys() if "" in turns else turns
        return {weight.name for name in chosen for weight, _ in self._owned(self._optimizers[name])}

    def describe(self) -> str:
        shown = []
        for name, kind in self.kinds.items():
            by = type(self._schedulers[name]).__name__ if name in self._schedulers else "`schedule`"
            shown.append(f"{f'{name}: ' * bool(name)}{kind} with lr {self._lrs[name][0]:g} and {by}")
        return f"the optimizer {self.origin}: {'; '.join(shown)}"

    def _refuse(self, found: object) -> None:
        """Raise TaskError if the value returned by `optimizers` cannot be used."""
        items = found.values() if isinstance(found, Mapping) else [found]
        wrong = [item for item in items if not isinstance(item, Optimizer | LRScheduler)]
        if wrong or not self._optimizers:
            message = f"returned {'no optimizer' if not wrong else f'a {type(wrong[0]).__name__}'}"
            hint = "return an Optimizer, a learning rate scheduler, or a dictionary of them"
            raise self._error(message, hint)
        for name, optimizer in self._optimizers.items():
            self._refuse_name(name)
            self._refuse_kind(optimizer, self._schedulers.get(name))
        self._refuse_parameters()

    def _refuse_name(self, name: object) -> None:
        if name == "" and len(self._optimizers) == 1:
            return
        if not isinstance(name, str) or not NAME.fullmatch(name) or LOSS_OF.format(name) in RECORD_KEYS:
            hint = 'use letters, digits and _ in the name, as in "generator"; "val" is reserved'
            raise self._error(f"named an optimizer {name!r}", hint)

    def _refuse_kind(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        kind = type(optimizer).__name__
        _, *takes = inspect.signature(type(optimizer).step).parameters.values()
        needs = [at.name for at in takes if at.default is at.empty and at.kind is at.POSITIONAL_OR_KEYWORD]
        if needs:
            hint = "use an optimizer whose step() takes no arguments, such as Adam"
            raise self._error_of(kind, f"whose step() needs {needs[0]}", hint)
        if isinstance(optimizer, optim.SparseAdam):
            raise self._error_of(kind, "which needs sparse gradients", "use Adam")
        if isinstance(scheduler, ReduceLROnPlateau):
            hint = "use a scheduler that depends only on the number of steps"
            raise self._error("returned ReduceLROnPlateau, which needs a metric in each step", hint)
        if any("lr" not in group for group in optimizer.param_groups):
            raise self._error_of(kind, "which has a group without lr", "set lr in each group")
        sharded = [weight.name for weight in self._weights if _is_sharded(weight)]
        if sharded and not updates_by_element(optimizer):
            message = f"but this rank has only a shard of {listed(sharded)}"
            hint = (
                "train with dp_replicate only, or use SGD or Adam; if the optimizer updates each element "
                "independently, set by_element = True on it"
            )
            raise self._error_of(kind, message, hint)

    def _refuse_parameters(self) -> None:
        """Raise TaskError unless each parameter belongs to exactly one optimizer."""
        owners: dict[int, list[str]] = {id(shard): [] for shard in self._locals}
        for name, optimizer in self._optimizers.items():
            for param in _params(optimizer):
                if id(param) not in owners:
                    message = f"gave {type(optimizer).__name__} a tensor that is not one of its parameters"
                    hint = "use the tensors passed to optimizers(); the model's own parameters may be sharded"
                    raise self._error(message, hint)
                owners[id(param)].append(name)
        names = dict(zip(owners, (weight.name for weight in self._weights), strict=True))
        none = [names[key] for key, found in owners.items() if not found]
        several = [names[key] for key, found in owners.items() if len(found) > 1]
        if none:
            hint = (
                "pass the parameter to an optimizer, or freeze it in build_model: "
                "parameter.requires_grad_(False)"
            )
            raise self._error(f"has no optimizer for {listed(none)}", hint)
        if several:
            raise self._error(
                f"has two optimizers for {listed(several)}", "pass each parameter to only one optimizer"
            )

    def begin_step(self, lr: float) -> float:
        factor = lr / self._config.optimizer.lr
        for name in self._optimizers.keys() - self._schedulers.keys():
            for group, initial in zip(self._optimizers[name].param_groups, self._lrs[name], strict=True):
                _set(group, "lr", initial * factor)
        return float(next(iter(self._optimizers.values())).param_groups[0]["lr"])

    @torch.no_grad()
    def collect_gradients(self, turn: str = "") -> None:
        super().collect_gradients()
        self._active = [turn] if turn else list(self._optimizers)
        for name in self._optimizers.keys() - self._active:
            # The loss of one optimizer also produces gradients for other optimizers' parameters; discard
            # these gradients.
            for shard in _params(self._optimizers[name]):
                shard.grad = None

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        if skip.item():
            return
        divisor = divisor.to(self._locals[0].device)
        for shard in self._locals:
            if shard.grad is not None:
                shard.grad /= divisor
        for name in self._active:
            self._optimizers[name].step()
        if self._casts:
            copy_each(list(self._casts.values()), [shard.detach() for shard in self._casts])

    def end_step(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.step()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()  # most of the state does not exist before the first update; see `collect_state`

    def collect_state(self) -> tuple[dict[str, SavedOptimizer], dict[str, Tensor]]:
        """Return the state of all optimizers, and the state tensors, sharded like their parameters."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, SavedOptimizer] = {}
        for name, optimizer in self._optimizers.items():
            params, rest = {}, {**optimizer.state}
            for weight, shard in self._owned(optimizer):
                if (state := rest.pop(shard, None)) is not None:
                    found: dict[str, Tensor] = {}
                    params[weight.name] = encode(f"optimizer.{weight.name}", state, found)
                    for path, item in found.items():
                        tensors[path] = self._as_saved(path, item, weight, shard)
            place = f"optimizers.{name or 'task'}"
            values[name] = SavedOptimizer(
                kind=type(optimizer).__name__,
                parameters=params,
                rest=encode(f"{place}.rest", rest, tensors),
                values=encode(f"{place}.values", self._values(name), tensors),
                initial=encode(f"{place}.initial", self._initial[name], tensors),
                num_groups=len(optimizer.param_groups),
            )
        return values, tensors

    def _values(self, name: str) -> dict[str, object]:
        """Return the settings of an optimizer's parameter groups and the state of its scheduler."""
        groups = [
            {key: _number(value) for key, value in group.items() if key != "params"}
            for group in self._optimizers[name].param_groups
        ]
        scheduler = self._schedulers.get(name)
        return {"groups": groups, "scheduler": {} if scheduler is None else scheduler.state_dict()}

    def _owned(self, optimizer: Optimizer) -> Iterator[tuple[Weight, nn.Parameter]]:
        """Yield each parameter of an optimizer together with its shard on this rank."""
        own = {id(param) for param in _params(optimizer)}
        for weight, shard in zip(self._weights, self._locals, strict=True):
            if id(shard) in own:
                yield weight, shard

    def _as_saved(self, path: str, item: Tensor, weight: Weight, shard: Tensor) -> Tensor:
        """Return a state tensor for a checkpoint, sharded like its parameter if both have the same shape."""
        if item.shape == shard.shape:
            return as_shard_of(item, weight.param)
        if _is_sharded(weight) and item.numel() != 1:
            raise self._error(
                f"has an optimizer whose {path} has shape {list(item.shape)}, but this rank's shard of "
                f"{weight.name} has shape {list(shard.shape)}",
                "the optimizer does not update each element independently; train with dp_replicate only",
            )
        return item

    def wanted(self, values: Mapping[str, SavedOptimizer], saved: SavedTensors) -> dict[str, Tensor]:
        """Allocate this rank's shards of the per-parameter state in a checkpoint.

        Raises TaskError if a different optimizer updated one of the parameters when the checkpoint was saved.
        """
        tensors: dict[str, Tensor] = {}
        for name, optimizer in self._optimizers.items():
            params = values[name].parameters
            owned = {weight.name: (weight, shard) for weight, shard in self._owned(optimizer)}
            if moved := sorted(params.keys() - owned.keys()):
                message = f"gave {listed(moved)} to a different optimizer than in the checkpoint"
                raise self._error(
                    message,
                    "pass each parameter to the same optimizer as when the checkpoint was saved, "
                    "or start a new run",
                )
            for param, state in params.items():
                weight, shard = owned[param]
                for path in tensor_paths(state):
                    size, dtype = saved[path].size, saved[path].properties.dtype
                    if size == weight.param.shape:
                        own = torch.empty(shard.shape, dtype=dtype, device=shard.device)
                        tensors[path] = as_shard_of(own, weight.param)
                    elif _is_sharded(weight) and size.numel() != 1:
                        message, hint = f"whose {path} cannot be sharded", "resume with dp_replicate only"
                        raise self._error_of(type(optimizer).__name__, message, hint)
        return tensors

    def load(self, values: Mapping[str, SavedOptimizer], tensors: Mapping[str, Tensor]) -> None:
        """Load the state of all optimizers from a checkpoint."""
        for name, optimizer in self._optimizers.items():
            value = values[name]
            if value.num_groups != len(optimizer.param_groups):
                message = f"has {value.kind} with {len(optimizer.param_groups)} groups"
                hint = (
                    f"the checkpoint has {value.num_groups} groups; return the same number, or "
                    "start a new run"
                )
                raise self._error(message, hint)
            optimizer.state.update(decode(value.rest, tensors))
            for weight, shard in self._owned(optimizer):
                if weight.name in value.parameters:
                    optimizer.state[shard] = decode(value.parameters[weight.name], tensors)
            self._load_values(name, decode(value.initial, tensors), decode(value.values, tensors))

    def _load_values(self, name: str, initial: object, values: object) -> None:
        """Load an optimizer's settings and scheduler state, except settings that the user has changed."""
        optimizer, changed = self._optimizers[name], list[str]()
        merged = cast(Any, _merged("", self._initial[name], initial, values, changed))
        for group, found in zip(optimizer.param_groups, merged["groups"], strict=True):
            for key, value in found.items():
                _set(group, key, value)
        if name in self._schedulers:
            self._schedulers[name].load_state_dict(merged["scheduler"])
        for text in changed:
            log.warning(f"{f'{name}: ' * bool(name)}{type(optimizer).__name__} {self.origin}: {text}")


class OwnOptimizers(TorchOptimizers):
    """The optimizers that a user's task returns from `Task.optimizers`."""

    origin = "of the task"

    def __init__(self, task: UserTask, weights: Sequence[Weight], layout: Layout) -> None:
        self._task = task.task
        super().__init__(task.config, weights, layout)

    @property
    def may_take_turns(self) -> bool:
        return type(self._task).turns is not Task.turns

    def _make(self) -> object:
        shards = {weight.name: shard for weight, shard in zip(self._weights, self._locals, strict=True)}
        with errors_of_user(self._config, "optimizers() failed"):
            return self._task.optimizers(shards)

    def _error(self, message: str, hint: str) -> TaskError:
        return refusal(self._config, f"optimizers() {message}", hint)

    def turns(self) -> Sequence[str]:
        with errors_of_user(self._config, "turns() failed"):
            found = tuple(self._task.turns())
        unknown = [turn for turn in found if turn not in self._optimizers or not turn]
        if unknown:
            names = ", ".join(filter(None, self._optimizers)) or "one optimizer without a name"
            message = f"turns() named {unknown[0]!r}, which optimizers() did not return"
            raise refusal(self._config, message, f"optimizers() returned {names}")
        if not found and getattr(type(self._task), "loss", None) is Task.loss:
            message = f"turns() was empty in step {self._task.step}, and loss() is not defined"
            raise refusal(
                self._config, message, "return the name of an optimizer from turns(), or define loss()"
            )
        return found or ("",)


def _is_sharded(weight: Weight) -> bool:
    """Return whether this rank has only a shard of a parameter."""
    param = weight.param
    if not isinstance(param, DTensor):
        return False
    mesh = param.device_mesh
    return any(mesh.size(dim) > 1 and not at.is_replicate() for dim, at in enumerate(param.placements))


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _merged(path: str, now: object, before: object, saved: object, changed: list[str]) -> object:
    """Return the `saved` value, updated with the user's changes to the task since the run started.

    `before` is the value that the task created when the run started, and `now` is the value that the task
    creates now. If `before` and `now` differ, `now` replaces the saved value, and a line that describes the
    change is appended to `changed`. A changed learning rate is multiplied by the scheduler's current factor.
    """
    if isinstance(now, Counter) and isinstance(before, dict) and isinstance(saved, dict):
        # MultiStepLR stores its milestones in a Counter, which a checkpoint stores as a plain dictionary.
        before, saved = Counter(before), Counter(saved)
    match now, before, saved:
        case dict(), dict(), dict() if not isinstance(now, Counter):
            both = now.keys() & before.keys() & saved.keys()
            if re.fullmatch(r"\.groups\.\d+", path) and "initial_lr" in both:
                # The scheduler's constructor has already scaled `lr`, so compare `initial_lr` instead.
                both -= {"lr"}
                if before["initial_lr"]:
                    factor = now["initial_lr"] / before["initial_lr"]
                    saved = {**saved, "lr": saved["lr"] * factor}
            items = {key: (f"{path}.{key}", now[key], before[key], saved[key]) for key in both}
            return {**now, **saved, **{key: _merged(*item, changed) for key, item in items.items()}}
        case [*_], [*_], [*_] if len(now) == len(before) == len(saved):
            rows = enumerate(zip(now, before, saved, strict=True))
            merged = [_merged(f"{path}.{index}", *row, changed) for index, row in rows]
            return tuple(merged) if isinstance(now, tuple) else merged
    if _is_same(now, before):
        return saved
    # A scheduler derives its private values from other values, except for the milestones of SequentialLR.
    if not re.search(r"\._(?!milestones)\w+(\.\d+)*$", path):
        shown = [dict(value) if isinstance(value, Counter) else value for value in (now, before)]
        changed.append(f"{path.removeprefix('.')} is {shown[0]}, was {shown[1]}")
    match now, before, saved:
        case float(), float(), float() if before and re.fullmatch(r"\.groups\.\d+\.lr", path):
            return saved * now / before
    return now


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _set(group: MutableMapping[str, object], key: str, value: object) -> None:
    """Set a value in a parameter group; if the current value is a tensor, modify the tensor in place."""
    if isinstance(tensor := group.get(key), Tensor) and isinstance(value, float | int):
        tensor.fill_(value)
    else:
        group[key] = value


class OwnState:
    """What user code adds to a checkpoint: the state of its optimizers, and `Task.state_dict`."""

    def __init__(self, task: CausalLM | UserTask, optimizers: TorchOptimizers | None, world: World) -> None:
        self._task = task.task if isinstance(task, UserTask) else None
        self._config, self._world = task.config, world
        self._has_state = self._task is not None and type(self._task).state_dict is not Task.state_dict
        self.optimizers = optimizers

    def has_all_turns(self, metrics: Collection[str]) -> bool:
        """Return whether `metrics` contains every optimizer's loss.

        The loss of an optimizer is missing if the optimizer had no turn in the step.
        """
        if self.optimizers is None or not self.optimizers.may_take_turns:
            return True
        return all(LOSS_OF.format(name) in metrics for name in self.optimizers.kinds)

    def collect(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return the state as JSON, and the state's tensors; a collective, so every rank must call it.

        Raises TaskError if `Task.state_dict` differs between ranks, and FatalError for a value that cannot be
        saved.
        """
        values, tensors = dict[str, object](), dict[str, Tensor]()
        if self.optimizers is not None:
            saved, tensors = self.optimizers.collect_state()
            values[OPTIMIZERS] = {name: asdict(item) for name, item in saved.items()}
        if self._task is not None and self._has_state:
            found: dict[str, Tensor] = {}
            with errors_of_user(self._config, "state_dict() failed"):
                state = self._task.state_dict()
            values[TASK] = encode(TASK, state, found)
            digests = gather_from_all(digest_of(state), self._world)
            other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
            if other is not None:
                message = f"state_dict() has different values on rank {other} than on rank 0"
                hint = "return only values that do not depend on the samples of one rank"
                raise refusal(self._config, message, hint)
            # The task may change the returned tensors while a checkpoint is being written, so save copies.
            tensors |= {path: item.clone() for path, item in found.items()}
        on_host = [path for path, item in tensors.items() if item.device != self._world.device]
        return ({**values, ON_HOST: on_host} if on_host else values), tensors

    def wanted(self, manifest: Manifest, reader: SafeReader) -> dict[str, Tensor]:
        """Allocate the tensors that must be read from a checkpoint before `load` is called."""
        saved = cast(SavedTensors, reader.read_metadata().state_dict_metadata)
        state, optimizers = manifest.state, _saved_optimizers(manifest)
        tensors = {} if self.optimizers is None else self.optimizers.wanted(optimizers, saved)
        encoded = [item for value in optimizers.values() for item in value.encoded]
        on_host = state.get(ON_HOST)
        for path in {*tensor_paths(state.get(TASK)), *chain(*map(tensor_paths, encoded))} - tensors.keys():
            is_on_host = isinstance(on_host, list) and path in on_host
            device = torch.device("cpu") if is_on_host else self._world.device
            tensors[path] = torch.empty(saved[path].size, dtype=saved[path].properties.dtype, device=device)
        return tensors

    def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Load the state from a checkpoint; `tensors` were returned by `wanted` and then filled."""
        tensors = {path: local_tensor(item) for path, item in tensors.items()}
        if self.optimizers is not None:
            self.optimizers.load(_saved_optimizers(manifest), tensors)
        if self._task is None or not self._has_state:
            return
        if TASK not in manifest.state:
            log.warning("the checkpoint contains no state of the task, so the task keeps its initial state")
            return
        with errors_of_user(self._config, "load_state_dict() failed"):
            self._task.load_state_dict(decode(manifest.state[TASK], tensors))


def make_own_state(
    task: CausalLM | UserTask, optimizers: TorchOptimizers | None, world: World
) -> OwnState | None:
    """Return the state that user code adds to checkpoints, or None if there is none.

    Every rank must call this function. Raises TaskError or FatalError if the state cannot be
    saved.
    """
    has_state = isinstance(task, UserTask) and type(task.task).state_dict is not Task.state_dict
    if optimizers is None and not has_state:
        return None
    found = OwnState(task, optimizers, world)
    found.collect()
    return found


def _saved_optimizers(manifest: Manifest) -> dict[str, SavedOptimizer]:
    """Return the optimizer states in a checkpoint; empty if the config defined the optimizer."""
    found = manifest.state.get(OPTIMIZERS, {})
    assert isinstance(found, dict)
    return {name: read_record(SavedOptimizer, value) for name, value in found.items()}


def refuse_other_optimizers(manifest: Manifest, own: OwnState | None, name: str) -> None:
    """Raise FatalError unless the checkpoint's optimizer classes match the task's current ones."""
    before = {key: item.kind for key, item in _saved_optimizers(manifest).items()}
    now = {} if own is None or own.optimizers is None else own.optimizers.kinds
    if before == now:
        return
    shown = [
        ", ".join(f"{f'{key}: ' * bool(key)}{kind}" for key, kind in kinds.items())
        or "the optimizer set in the config"
        for kinds in (now, before)
    ]
    raise FatalError(
        f"the optimizer of the task is {shown[0]}, was {shown[1]}: checkpoint {name} cannot be resumed",
        hint="revert the change to optimizers(), or start a new run with model.init_from",
    )
