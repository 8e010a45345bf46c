"""Your own training task: a subclass of `Task` with a model, datasets and a loss.

::

    from trainkit.task import Loss, Task

    class Digits(Task):
        def build_model(self): ...
        def train_dataset(self): ...
        def loss(self, model, batch): ...

A config selects it with ``task: digits.py:Digits``. Everything else, such as data parallelism, accumulation,
precision, validation, checkpoints and resuming, works as for the built-in task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from trainkit.adapters import add_adapters as add_adapters  # what a task calls
from trainkit.capability import Recorder
from trainkit.config.schema import RunConfig
from trainkit.config.training import DataConfig
from trainkit.data.shards import open_dataset
from trainkit.errors import UsageError
from trainkit.safetensors import write_safetensors

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Number = Tensor | float
"""A number, or a tensor with one element."""


class Samples(Protocol):
    """A dataset: a list, a `torch.utils.data.Dataset`, or anything else with a length and items.

    An item must be the same whenever it is read, apart from random augmentation: `random`, `numpy.random` and
    `torch` are seeded for every item, so that it does not depend on the number of processes. An attribute
    ``fingerprint``, a string that changes with the data, replaces the one that is made from the length and a
    few items.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream(Protocol):
    """A dataset without a length: a `torch.utils.data.IterableDataset`, one of Hugging Face, or your own.

    Iterating over it yields the samples of an epoch, the same ones in the same order whenever it is iterated
    over; trainkit does not shuffle them. Every rank reads all of them and collates its own. Optional:

    - ``set_epoch(epoch)`` is called before an epoch, from 0, for example to shuffle in another order.
    - ``state_dict()`` returns the position after the last sample that was read, as dictionaries with string
      keys, lists, strings and numbers; after ``load_state_dict(state)``, the next iteration continues there.
      Without both, a resume reads over the earlier samples of the epoch.
    - ``fingerprint``, a string that changes with the data, replaces the one of the first samples.

    `random`, `numpy.random` and `torch` are seeded for every sample.
    """

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Loss:
    """The loss of one batch: a sum and what it is divided by.

    Both are summed over the microbatches and ranks of a step and only then divided, so the result does not
    depend on how the samples were distributed, even if one batch has more valid tokens than another.
    """

    total: Tensor
    """The sum over the batch, a tensor with one element and a gradient."""
    count: Number
    """What the sum is divided by: the number of samples, tokens or answers in the batch."""
    metrics: Mapping[str, Number | tuple[Number, Number]] = field(default_factory=dict)
    """Further values by name, each a sum over the batch that is divided by `count`, or a pair of a sum and
    what it is divided by. They are logged under these names, those of the validation as ``val_NAME``.
    """


@dataclass(frozen=True)
class ParameterOptions:
    """How the optimizer treats a parameter."""

    lr_scale: float = 1.0
    """Factor of the learning rate."""
    weight_decay: float | None = None
    """None: ``optimizer.weight_decay``, and 0 for parameters with fewer than two dimensions."""


class Task(ABC):
    """A training task; `config` is the config of the run, and ``task_args`` are keyword arguments.

    A subclass that takes arguments defines ``__init__(self, config, *, width=64)`` and calls
    ``super().__init__(config)``. The task is created on every rank, before the ranks are connected: neither
    the constructor nor a method may call a collective.
    """

    step: int = 0
    """The number of the current step, from 1 on; of the last one in a validation, 0 before the first."""
    _recorder = Recorder()
    """Keeps what `log_image`, `log_histogram` and `log_text` log; the trainer sets that of rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, in float32 on the CPU.

        It must be the same on every rank: `random`, `numpy.random` and `torch` are seeded with ``seed``.
        Parameters with ``requires_grad = False`` are frozen. Persistent buffers are saved; all ranks have the
        values of rank 0 after each step.

        A large model is built with `parameters_on_meta`; `read_weight` then has its initial values. The
        config key ``model.lora`` is for a module that is passed to `add_adapters` here.
        """

    def read_weight(self, name: str, rows: slice) -> Tensor:
        """Some rows of the initial value of a parameter that `build_model` left on the meta device.

        Each rank asks for the rows of its own shard. A frozen parameter is not in the checkpoints: it is read
        again whenever the run starts, so its file must not change.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say the value of {name}")

    @property
    def base_fingerprint(self) -> str | None:
        """A string that changes with the files of `read_weight`; None if nobody compares them.

        A run is not resumed if it has changed.
        """
        return None

    @abstractmethod
    def train_dataset(self) -> Samples | Stream:
        """The training samples.

        trainkit divides them among the ranks, and orders them unless they are a `Stream`.
        """

    def val_dataset(self) -> Samples | None:
        """The validation samples; None to train without validation."""
        return None

    def collate(self, items: list[Any]) -> Any:
        """Join items to a batch of tensors; runs in the data workers and must not use the GPU."""
        return default_collate(items)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch, whose tensors are on the model's device.

        The last batch of an epoch or of the validation may be smaller than the others. For validation,
        ``model.training`` is false and there are no gradients. Only a task with `turns` and without
        validation does without it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define loss, which validation needs")

    def optimizers(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer | LRScheduler | Mapping[str, Optimizer | LRScheduler]:
        """The optimizers of the parameters by their names, each with its scheduler if it has one.

        Optional: the default is AdamW of the config's ``optimizer`` section. The parameters are those that
        require a gradient, in float32; of a sharded one, the shard of this rank. Every one belongs to one
        optimizer. A scheduler stands for its optimizer, and takes a step after each step of the training.
        Without one, the config's ``schedule`` multiplies the learning rates of the groups, by 0 to 1.

        With ``dp_shard`` or ``tp``, the update must be by element, as in SGD and Adam. An
        optimizer that is not one of torch says so with an attribute ``by_element = True``.
        """
        raise NotImplementedError

    def turns(self) -> Sequence[str]:
        """The names of the optimizers that take turns in the current step, in their order.

        Each turn computes the gradient of `loss_for` over the samples of the step, and updates the parameters
        of that optimizer alone. Without any, all optimizers minimise `loss` together. It may depend on
        `step`, but not on the rank.
        """
        return ()

    def loss_for(self, optimizer: str, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss that an optimizer minimises in its turn; validation calls `loss`.

        It is logged as ``NAME_loss``; the ``loss`` of the step is the sum over the optimizers.
        """
        raise NotImplementedError

    def after_step(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Do something after the update of a step, also of a skipped one, without gradients; on every rank.

        `parameters` are all of the model by their names, frozen ones too, in float32; of a sharded one, the
        shard of this rank. Change them in place: the model and its checkpoints then have the new values.
        """
        return None

    def state_dict(self) -> Mapping[str, object]:
        """What a checkpoint keeps besides the model and the optimizers; the same on every rank.

        Tensors, numbers, strings, None, and lists, tuples and dictionaries of them.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take in what `state_dict` returned, when a run is resumed."""
        return None

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The units of sharding, recomputation and compilation, in the order of the forward pass.

        The default finds the modules of every `nn.ModuleList` and `nn.Sequential` that repeats one class.
        """
        return repeated_layers(model)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str | ParallelStyle]:
        """How ``parallel.tp`` splits the model: names of modules, and the style of each.

        ``*`` in a name matches one component of it, as in ``layers.*.mlp.up``; the first name that matches
        counts. Styles of `nn.Linear` and `nn.Embedding`:

        - ``colwise`` divides the outputs, which stay divided.
        - ``rowwise`` divides the inputs, which must be divided, and adds up the outputs; of an embedding it
          divides the vocabulary.
        - ``colwise_gather_output`` divides the outputs and gathers them on every rank.

        ``replicated_with_grad_allreduce`` is for other modules between a ``colwise`` and a ``rowwise`` one,
        whose parameters stay whole. A style can also be a `ParallelStyle` of torch. Modules without a style
        are whole on every rank, and so must be their inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how its model is split")

    def parameter_options(self, name: str, parameter: nn.Parameter) -> ParameterOptions:
        """How the optimizer treats a parameter of the model."""
        return ParameterOptions()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model, with the weights of a checkpoint, into an empty folder: `trainkit ckpt export`.

        The default writes ``model.safetensors`` with the names of ``model.state_dict()``; tied parameters are
        in it once.
        """
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        saved = model.state_dict()
        tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
        sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(folder / "model.safetensors", sizes, (item.detach() for item in tensors.values()))

    def log_image(self, name: str, image: object, caption: str | None = None) -> None:
        """Log an image of the current step; the report, TensorBoard, MLflow and W&B show it.

        image: a tensor [height, width] or [channels, height, width], an array of numpy [height, width] or
        [height, width, channels], or an image of PIL. Floats are from 0 to 1, whole numbers from 0 to 255.
        Callable wherever the task is, on every rank: rank 0 keeps its own. In a step, the first of a name is
        kept; in the validation it is called ``val_NAME``.
        """
        self._recorder.image(name, image, caption=caption)

    def log_histogram(self, name: str, values: object) -> None:
        """Log the histogram of the numbers in a tensor, an array or a list; otherwise as `log_image`."""
        self._recorder.histogram(name, values)

    def log_text(self, name: str, text: str) -> None:
        """Log a text, such as a generated sample; otherwise as `log_image`."""
        self._recorder.text(name, text)

    @property
    def flops_per_sample(self) -> float | None:
        """FLOPs of training on one sample, forward and backward; None if unknown: then there is no MFU."""
        return None


def record_with(task: Task, recorder: Recorder) -> None:
    """Keep what a task logs with a recorder; for the trainer."""
    task._recorder = recorder


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give the parameters of modules created within the block no memory; buffers have their values.

    For models that do not fit into the memory of a host once per process. Not for several threads at once.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class TokenSamples:
    """The text of the config's ``data`` section as samples, for a language model of your own.

    Sample i is a tensor of ``data.seq_len`` + 1 token ids, int64, whose last token is the first of the next
    sample. The text is tokenised once and kept, as for the built-in task. Raises UsageError for data that
    cannot be used, for a mixture, and for a split shorter than one sample.
    """

    def __init__(self, data: DataConfig, split: Literal["train", "val"] = "train") -> None:
        if isinstance(data.source, dict):
            raise UsageError(
                "data.source is a mixture, whose order only the task causal_lm knows",
                hint="give data.source one path or a list, or make TokenSamples of each source yourself",
            )
        self._shards = open_dataset(data, data.seq_len, split)

    def __len__(self) -> int:
        return self._shards.num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._shards.read([index])[0])

    @property
    def fingerprint(self) -> str:
        """Changes with the text and the tokenizer."""
        return self._shards.fingerprint

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the largest one plus one."""
        return self._shards.vocab_size


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of every outermost `nn.ModuleList` or `nn.Sequential` that repeats one class.

    Modules without submodules, such as `nn.Linear`, are too small to be a layer.
    """
    items = list(model.children())
    repeats = len(items) > 1 and len({type(item) for item in items}) == 1
    if isinstance(model, nn.ModuleList | nn.Sequential) and repeats and list(items[0].children()):
        return items
    # A dictionary, since a model can use the same module several times.
    return list(dict.fromkeys(layer for item in items for layer in repeated_layers(item)))
