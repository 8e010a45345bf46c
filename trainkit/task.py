"""The base class for training tasks of your own: a subclass of `Task` provides a model, datasets and a loss.

::

    from trainkit.task import Loss, Task

    class Digits(Task):
        def build_model(self): ...
        def train_dataset(self): ...
        def loss(self, model, batch): ...

To select the task, set ``task: digits.py:Digits`` in a config. Everything else, such as data parallelism,
accumulation, precision, validation, checkpoints and resuming, works as with the built-in task.
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

from trainkit.adapters import add_adapters as add_adapters  # tasks import the function from this module
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
    """A dataset with a length and indexed items, such as a list or a map-style `torch.utils.data.Dataset`.

    An item must be the same whenever it is read, apart from random augmentation. trainkit seeds `random`,
    `numpy.random` and `torch` before it reads each item, so that items do not depend on the number of
    processes.

    When a run resumes, trainkit compares a fingerprint of the data with the checkpoint's. By default,
    the fingerprint is computed from the length and a few items. To provide a fingerprint of your own, define
    an attribute ``fingerprint``, a string that changes whenever the data changes.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream(Protocol):
    """A dataset without a length, such as a `torch.utils.data.IterableDataset` or a Hugging Face stream.

    Each iteration must yield the samples of an epoch, always the same samples in the same order; trainkit
    does not shuffle them. Every rank reads all samples but collates only its own samples.

    Optional attributes:

    - ``set_epoch(epoch)`` is called before each epoch, from epoch 0 on, for example to change the order.
    - ``state_dict()`` returns the position after the last sample that was read. The position consists
      of dictionaries with string keys, lists, strings and numbers.
    - ``load_state_dict(state)`` sets the position at which the next iteration continues. Without
      ``state_dict`` and ``load_state_dict``, a resume rereads and skips the earlier samples of the epoch.
    - ``fingerprint``, a string that changes with the data, replaces the fingerprint of the first samples.

    trainkit seeds `random`, `numpy.random` and `torch` before it reads each sample.
    """

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, given as a sum and the count to divide it by.

    trainkit adds up the sums and the counts of all microbatches and ranks of a step before it divides them.
    The result therefore does not depend on how the samples are distributed, even if some batches have more
    valid tokens than others.
    """

    total: Tensor
    """The sum of the loss over the batch, as a tensor with one element and a gradient."""
    count: Number
    """The number to divide the sum by: the number of samples, tokens or answers in the batch."""
    metrics: Mapping[str, Number | tuple[Number, Number]] = field(default_factory=dict)
    """Additional metrics by name. A number is a sum over the batch, which is divided by `count`; a pair is a
    sum and the count to divide it by. Metrics are logged under their names; in validation, with the prefix
    ``val_``.
    """


@dataclass(frozen=True)
class ParameterOptions:
    """Options for one parameter that the config's AdamW optimizer trains."""

    lr_scale: float = 1.0
    """Factor for the learning rate of the parameter."""
    weight_decay: float | None = None
    """Weight decay; None stands for ``optimizer.weight_decay``, or 0 if the parameter has fewer than two
    dimensions."""


class Task(ABC):
    """A training task; `config` is the config of the run, and ``task_args`` are passed as keyword arguments.

    A subclass with arguments defines, for example, ``__init__(self, config, *, width=64)`` and calls
    ``super().__init__(config)``. Every rank creates the task before the ranks are connected, so neither the
    constructor nor any method may call a collective.
    """

    step: int = 0
    """Number of the current step, starting at 1. During validation, `step` is the number of the last step, or
    0 if there was none."""
    _recorder = Recorder()
    """Writes the images, histograms and texts that the task logs; set by the trainer on rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model in float32 on the CPU.

        The model must be the same on every rank; before the call, trainkit seeds `random`, `numpy.random` and
        `torch` with ``seed``. Parameters with ``requires_grad = False`` are frozen. Checkpoints include
        persistent buffers. After each step, rank 0's buffers are copied to all ranks.

        Build a large model within `parameters_on_meta`, and define `read_weight` to provide its initial
        values. To support the config key ``model.lora``, pass a module to `add_adapters` in this method.
        """

    def read_weight(self, name: str, rows: slice) -> Tensor:
        """Return rows of the initial value of a parameter that `build_model` has left on the meta device.

        Each rank requests the rows of its own shard. Checkpoints do not contain frozen parameters. Frozen
        parameters are read again whenever the run starts, so their files must not change.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define read_weight, which {name} needs")

    @property
    def base_fingerprint(self) -> str | None:
        """Return a string that changes if the files of `read_weight` change, or None to skip this check.

        A run cannot resume if this string has changed.
        """
        return None

    @abstractmethod
    def train_dataset(self) -> Samples | Stream:
        """Return the training samples.

        trainkit divides the samples among the ranks and, unless they are a `Stream`, shuffles them.
        """

    def val_dataset(self) -> Samples | None:
        """Return the validation samples, or None to train without validation."""
        return None

    def collate(self, items: list[Any]) -> Any:
        """Combine items into a batch of tensors.

        The data workers call this method, so it must not use the GPU.
        """
        return default_collate(items)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch, whose tensors are on the model's device.

        The last batch of an epoch or of a validation may be smaller than the others. During validation,
        ``model.training`` is false and gradients are disabled. You may omit this method only in a task with
        `turns` and without validation.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define loss, which the validation needs")

    def optimizers(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer | LRScheduler | Mapping[str, Optimizer | LRScheduler]:
        """Return one optimizer, or a dictionary from names to several optimizers.

        This method is optional; by default, the optimizer is AdamW with the settings in the config section
        ``optimizer``. `parameters` maps names to all parameters that require a gradient, in float32. For a
        sharded parameter, `parameters` contains this rank's shard. Each parameter must belong to exactly one
        optimizer.

        To use a learning rate scheduler, return it instead of its optimizer; trainkit calls its ``step``
        after each training step. Without a scheduler, the learning rates of the parameter groups are
        multiplied by the factor, from 0 to 1, that the config section ``schedule`` defines.

        With ``dp_shard`` or ``tp``, an optimizer must update each element independently, as SGD and Adam do.
        For an optimizer that is not part of PyTorch, declare such updates with the attribute ``by_element =
        True``.
        """
        raise NotImplementedError

    def turns(self) -> Sequence[str]:
        """Return the names of the optimizers that take turns in the current step, in order.

        Each optimizer turn computes the gradient of `loss_for` over the samples of the step and updates only
        the parameters of that optimizer. If the result is empty, all optimizers minimise `loss` together. The
        result may depend on `step`, but must be the same on all ranks.
        """
        return ()

    def loss_for(self, optimizer: str, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss that an optimizer minimises in its turn; validation calls `loss` instead.

        This loss is logged as ``NAME_loss``. The ``loss`` logged for a step is the sum of the losses of all
        turns.
        """
        raise NotImplementedError

    def after_step(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Run after the update of each step, even if the update was skipped, with gradients disabled.

        Every rank calls this method. `parameters` maps names to all parameters of the model in float32,
        including frozen ones. For a sharded parameter, `parameters` contains this rank's shard. Change the
        tensors in `parameters` in place; the model and its checkpoints then contain the new values.
        """
        return None

    def state_dict(self) -> Mapping[str, object]:
        """Return state for checkpoints to contain in addition to the model and the optimizers.

        The state must be the same on every rank. The state consists of tensors, numbers, strings, None, and
        lists, tuples and dictionaries of them.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state returned by `state_dict`; called when a run resumes."""
        return None

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to shard, recompute and compile as units, in the order of the forward pass.

        The default returns the modules in every `nn.ModuleList` and `nn.Sequential` that repeats one class.
        """
        return repeated_layers(model)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str | ParallelStyle]:
        """Return how ``parallel.tp`` splits the model, as a mapping from module names to styles.

        ``*`` matches one component of a name, as in ``layers.*.mlp.up``. The first name that matches is used.
        For `nn.Linear` and `nn.Embedding`, use one of these styles:

        - ``colwise`` divides the outputs and leaves them divided.
        - ``rowwise`` expects divided inputs and adds up the outputs; an embedding divides its vocabulary.
        - ``colwise_gather_output`` divides the outputs and gathers them on every rank.

        Use ``replicated_with_grad_allreduce`` for other modules between a ``colwise`` and a ``rowwise``
        module; their parameters are not split. A style can also be a `ParallelStyle` of PyTorch. Modules
        without a style are kept whole on every rank, and their inputs must be whole.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define tensor_plan")

    def parameter_options(self, name: str, parameter: nn.Parameter) -> ParameterOptions:
        """Return the learning-rate scale and weight decay of a parameter for the config's AdamW optimizer."""
        return ParameterOptions()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model, with the weights of a checkpoint, to an empty folder.

        `trainkit ckpt export` calls this method. The default writes ``model.safetensors`` with the names in
        ``model.state_dict()``, and tied parameters only once.
        """
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        saved = model.state_dict()
        tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
        sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(folder / "model.safetensors", sizes, (item.detach() for item in tensors.values()))

    def log_image(self, name: str, image: object, caption: str | None = None) -> None:
        """Log an image for the current step, to be shown in the report, TensorBoard, MLflow and W&B.

        image: a tensor [height, width] or [channels, height, width], a NumPy array [height, width] or
        [height, width, channels], or a PIL image. Floats must be from 0 to 1, integers from 0 to 255.

        Any method of the task may call this method on any rank, but only the images of rank 0 are kept. If a
        name is logged several times in a step, only the first image is kept. In validation, the name gets the
        prefix ``val_``. Raises UsageError if `image` is not an image.
        """
        self._recorder.image(name, image, caption=caption)

    def log_histogram(self, name: str, values: object) -> None:
        """Log a histogram of the numbers in a tensor, an array or a list; same rules as for `log_image`."""
        self._recorder.histogram(name, values)

    def log_text(self, name: str, text: str) -> None:
        """Log a text, such as a generated sample; same rules as for `log_image`."""
        self._recorder.text(name, text)

    @property
    def flops_per_sample(self) -> float | None:
        """Return the FLOPs of a forward and backward pass on one sample; with None, no MFU is logged."""
        return None


def record_with(task: Task, recorder: Recorder) -> None:
    """Let a recorder write the images, histograms and texts that a task logs; called by the trainer."""
    task._recorder = recorder


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create the parameters of modules within the block on the meta device; buffers keep their values.

    Use `parameters_on_meta` for a model that is too large to be built in host memory once per process. This
    function is not thread-safe.
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
    """The text of the config section ``data`` as samples for a language model of your own.

    A sample is a tensor of ``data.seq_len`` + 1 token ids, int64. The last token of a sample is also the
    first token of the next sample. The text is tokenised once and cached, as for the built-in task. Raises
    UsageError if the data is unusable or a mixture, or if a split is shorter than one sample.
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
        """Return a string that changes if the text or the tokenizer changes."""
        return self._shards.fingerprint

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, which is the largest token id plus one."""
        return self._shards.vocab_size


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules in every outermost `nn.ModuleList` or `nn.Sequential` that repeats one class.

    Modules without submodules, such as `nn.Linear`, are too small to be layers.
    """
    items = list(model.children())
    repeats = len(items) > 1 and len({type(item) for item in items}) == 1
    if isinstance(model, nn.ModuleList | nn.Sequential) and repeats and list(items[0].children()):
        return items
    # A model can use the same module several times, so remove duplicates.
    return list(dict.fromkeys(layer for item in items for layer in repeated_layers(item)))
