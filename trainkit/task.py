"""The base class of your own training tasks: a subclass of `Task` has a model, datasets and a loss.

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

from trainkit.adapters import add_adapters as add_adapters  # tasks import it from here
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
    """A dataset with a length and items, such as a list or a map-style `torch.utils.data.Dataset`.

    An item must be the same whenever it is read, apart from random augmentation. trainkit seeds `random`,
    `numpy.random` and `torch` for every item, so that items do not depend on the number of processes.

    A resume compares a fingerprint of the data. By default trainkit computes it from the length and a few
    items. An attribute ``fingerprint``, a string that changes with the data, replaces it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream(Protocol):
    """A dataset without a length, such as a `torch.utils.data.IterableDataset` or a stream of Hugging Face.

    Each iteration yields the samples of an epoch, always the same samples in the same order; trainkit does
    not shuffle them. Every rank reads all samples and collates its own. Optional attributes:

    - ``set_epoch(epoch)`` is called before each epoch, starting with 0, for example to change the order.
    - ``state_dict()`` returns the position after the last sample that was read. It consists of dictionaries
      with string keys, lists, strings and numbers.
    - ``load_state_dict(state)`` sets the position at which the next iteration continues. Without both
      methods, a resume reads the earlier samples of the epoch again and drops them.
    - ``fingerprint``, a string that changes with the data, replaces the fingerprint of the first samples.

    trainkit seeds `random`, `numpy.random` and `torch` for every sample.
    """

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, as a sum and the count that divides it.

    trainkit adds up the sums and the counts of all microbatches and ranks of a step before it divides them.
    The result therefore does not depend on how the samples were distributed, even if one batch has more valid
    tokens than another.
    """

    total: Tensor
    """The sum over the batch, a tensor with one element and a gradient."""
    count: Number
    """The count that divides the sum: the number of samples, tokens or answers in the batch."""
    metrics: Mapping[str, Number | tuple[Number, Number]] = field(default_factory=dict)
    """Further metrics by name. A number is a sum over the batch and is divided by `count`; a pair is a sum
    and its own count. They are logged under their names, and in the validation as ``val_NAME``.
    """


@dataclass(frozen=True)
class ParameterOptions:
    """Options of AdamW of the config for one parameter."""

    lr_scale: float = 1.0
    """The factor of the learning rate."""
    weight_decay: float | None = None
    """The weight decay; None takes ``optimizer.weight_decay``, or 0 for fewer than two dimensions."""


class Task(ABC):
    """A training task; `config` is the config of the run, and ``task_args`` are keyword arguments.

    A subclass that takes arguments defines ``__init__(self, config, *, width=64)`` and calls
    ``super().__init__(config)``. Every rank creates the task before the ranks are connected, so neither the
    constructor nor a method may call a collective.
    """

    step: int = 0
    """The number of the current step, counted from 1. During a validation it is the last step, or 0."""
    _recorder = Recorder()
    """Writes the images, histograms and texts that the task logs; the trainer sets it on rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model, in float32 on the CPU.

        The model must be the same on every rank; trainkit seeds `random`, `numpy.random` and `torch` with
        ``seed``. Parameters with ``requires_grad = False`` are frozen. Checkpoints contain persistent
        buffers. After each step, the buffers of all ranks get the values of rank 0.

        Build a large model within `parameters_on_meta`, and define `read_weight` to return its initial
        values. To support the config key ``model.lora``, pass a module to `add_adapters` here.
        """

    def read_weight(self, name: str, rows: slice) -> Tensor:
        """Return rows of the initial value of a parameter that `build_model` left on the meta device.

        Each rank requests the rows of its own shard. Checkpoints do not contain frozen parameters. They are
        read again whenever the run starts, so their files must not change.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define read_weight, which {name} needs")

    @property
    def base_fingerprint(self) -> str | None:
        """Return a string that changes with the files of `read_weight`, or None to skip the comparison.

        A run is not resumed if the string has changed.
        """
        return None

    @abstractmethod
    def train_dataset(self) -> Samples | Stream:
        """Return the training samples.

        trainkit divides the samples among the ranks, and shuffles them unless they are a `Stream`.
        """

    def val_dataset(self) -> Samples | None:
        """Return the validation samples, or None to train without validation."""
        return None

    def collate(self, items: list[Any]) -> Any:
        """Join items to a batch of tensors. The data workers call this method, so it must not use the GPU."""
        return default_collate(items)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch, whose tensors are on the model's device.

        The last batch of an epoch or of the validation may be smaller than the others. During validation,
        ``model.training`` is false and gradients are disabled. Only a task with `turns` and without
        validation need not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define loss, which the validation needs")

    def optimizers(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer | LRScheduler | Mapping[str, Optimizer | LRScheduler]:
        """Return one optimizer, or a dictionary of several with their names.

        This method is optional; the default is AdamW with the values of the config's ``optimizer`` section.
        `parameters` maps names to all parameters that require a gradient, in float32. Of a sharded
        parameter, it contains the shard of this rank. Each parameter must belong to exactly one optimizer.

        Return a learning rate scheduler in place of its optimizer; trainkit calls its ``step`` after each
        training step. Without a scheduler, the config's ``schedule`` multiplies the learning rates of the
        groups by a factor from 0 to 1.

        With ``dp_shard`` or ``tp``, an optimizer must update each element independently, as SGD and Adam do.
        An optimizer that is not part of PyTorch declares that with an attribute ``by_element = True``.
        """
        raise NotImplementedError

    def turns(self) -> Sequence[str]:
        """Return the names of the optimizers that take turns in the current step, in order.

        Each turn computes the gradient of `loss_for` over the samples of the step and updates only the
        parameters of its optimizer. If the result is empty, all optimizers minimise `loss` together. The
        result may depend on `step`, but not on the rank.
        """
        return ()

    def loss_for(self, optimizer: str, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss that an optimizer minimises in its turn; the validation calls `loss` instead.

        This loss is logged as ``NAME_loss``. The ``loss`` of a step is the sum over its optimizers.
        """
        raise NotImplementedError

    def after_step(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Run after the update of each step, also after a skipped update, with gradients disabled.

        Every rank calls this method. `parameters` maps names to all parameters of the model in float32, also
        to frozen ones. Of a sharded parameter, it contains the shard of this rank. Change the tensors in
        place; the model and its checkpoints then have the new values.
        """
        return None

    def state_dict(self) -> Mapping[str, object]:
        """Return state that checkpoints save in addition to the model and the optimizers.

        The state must be the same on every rank. It consists of tensors, numbers, strings, None, and lists,
        tuples and dictionaries of them.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state that `state_dict` returned; called when a run resumes."""
        return None

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the units of sharding, recomputation and compilation, in the order of the forward pass.

        The default returns the modules of every `nn.ModuleList` and `nn.Sequential` that repeats one class.
        """
        return repeated_layers(model)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str | ParallelStyle]:
        """Return how ``parallel.tp`` splits the model, as a style for each name of a module.

        ``*`` matches one component of a name, as in ``layers.*.mlp.up``. The first matching name counts.
        `nn.Linear` and `nn.Embedding` have these styles:

        - ``colwise`` divides the outputs, which stay divided.
        - ``rowwise`` expects divided inputs and adds up the outputs; an embedding divides its vocabulary.
        - ``colwise_gather_output`` divides the outputs and gathers them on every rank.

        ``replicated_with_grad_allreduce`` is for other modules between a ``colwise`` and a ``rowwise``
        module; their parameters stay whole. A style can also be a `ParallelStyle` of PyTorch. Modules without
        a style are whole on every rank, and their inputs must be whole.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define tensor_plan")

    def parameter_options(self, name: str, parameter: nn.Parameter) -> ParameterOptions:
        """Return how AdamW of the config treats a parameter of the model."""
        return ParameterOptions()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model with the weights of a checkpoint into an empty folder.

        `trainkit ckpt export` calls this method. The default writes ``model.safetensors`` with the names of
        ``model.state_dict()``, and writes tied parameters once.
        """
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        saved = model.state_dict()
        tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
        sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(folder / "model.safetensors", sizes, (item.detach() for item in tensors.values()))

    def log_image(self, name: str, image: object, caption: str | None = None) -> None:
        """Log an image of the current step; the report, TensorBoard, MLflow and W&B show it.

        image: a tensor [height, width] or [channels, height, width], a NumPy array [height, width] or
        [height, width, channels], or a PIL image. Floats range from 0 to 1, integers from 0 to 255.

        Any method of the task may call this on any rank, but only the images of rank 0 are kept. If a name is
        logged several times in a step, the first image is kept. In the validation the name is ``val_NAME``.
        Raises UsageError if `image` is not an image.
        """
        self._recorder.image(name, image, caption=caption)

    def log_histogram(self, name: str, values: object) -> None:
        """Log the histogram of the numbers in a tensor, an array or a list; see `log_image` for the rules."""
        self._recorder.histogram(name, values)

    def log_text(self, name: str, text: str) -> None:
        """Log a text, such as a generated sample; see `log_image` for the rules."""
        self._recorder.text(name, text)

    @property
    def flops_per_sample(self) -> float | None:
        """Return the FLOPs of a forward and backward pass on one sample; without them, no MFU is logged."""
        return None


def record_with(task: Task, recorder: Recorder) -> None:
    """Let a recorder write the images, histograms and texts that a task logs; the trainer calls this."""
    task._recorder = recorder


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create the parameters of modules within the block on the meta device; buffers keep their values.

    Use it for models that do not fit into the host memory once per process. It is not thread-safe.
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
    """The text of the config's ``data`` section as samples for your own language model.

    A sample is a tensor of ``data.seq_len`` + 1 token ids, int64. Its last token is the first token of the
    next sample. The text is tokenised once and cached, as for the built-in task. Raises UsageError for data
    that cannot be used, for a mixture, and for a split shorter than one sample.
    """

    def __init__(self, data: DataConfig, split: Literal["train", "val"] = "train") -> None:
        if isinstance(data.source, dict):
            raise UsageError(
                "data.source is a mixture, which only the task causal_lm supports",
                hint="set data.source to a path or a list, or create a TokenSamples for each source",
            )
        self._shards = open_dataset(data, data.seq_len, split)

    def __len__(self) -> int:
        return self._shards.num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._shards.read([index])[0])

    @property
    def fingerprint(self) -> str:
        """Return a string that changes with the text and the tokenizer."""
        return self._shards.fingerprint

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, which is the largest token id plus one."""
        return self._shards.vocab_size


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of every outermost `nn.ModuleList` or `nn.Sequential` that repeats one class.

    Modules without submodules, such as `nn.Linear`, are too small to be layers.
    """
    items = list(model.children())
    repeats = len(items) > 1 and len({type(item) for item in items}) == 1
    if isinstance(model, nn.ModuleList | nn.Sequential) and repeats and list(items[0].children()):
        return items
    # A model can use the same module several times, so remove duplicates.
    return list(dict.fromkeys(layer for item in items for layer in repeated_layers(item)))
