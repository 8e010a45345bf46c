"""The base class for custom training tasks: a subclass of `Task` provides a model, datasets and a loss.

::

    from trainkit.task import Loss, Task

    class Digits(Task):
        def build_model(self): ...
        def train_dataset(self): ...
        def loss(self, model, batch): ...

To select the task, set ``task: digits.py:Digits`` in a config. Data parallelism, gradient accumulation, mixed
precision, validation, checkpoints and resuming work as with the built-in task.
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

from trainkit.adapters import add_adapters as add_adapters  # re-exported for users' tasks
from trainkit.capability import Recorder
from trainkit.config.schema import RunConfig
from trainkit.config.training import DataConfig
from trainkit.data.shards import open_dataset
from trainkit.errors import UsageError
from trainkit.safetensors import write_safetensors

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Number = Tensor | float
"""A number, given as a float or as a tensor with one element."""


class Samples(Protocol):
    """A dataset with a length and indexed items, such as a list or a map-style `torch.utils.data.Dataset`.

    An item must be the same whenever it is read, apart from random augmentation. trainkit seeds `random`,
    `numpy.random` and `torch` before it reads each item, so that items do not depend on the number of
    processes.

    When a run resumes, trainkit compares the data's fingerprint with the fingerprint in the checkpoint. By
    default, the fingerprint is computed from the dataset's length and a few items. To provide your own
    fingerprint, define an attribute ``fingerprint``, a string that changes whenever the data changes.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream(Protocol):
    """A dataset without a length, such as a `torch.utils.data.IterableDataset` or a Hugging Face stream.

    Each iteration must yield one epoch of samples, always the same samples in the same order. trainkit does
    not shuffle them. Every rank reads all samples, but collates only its own.

    Optional attributes:

    - ``set_epoch(epoch)`` is called before each epoch, starting with epoch 0, for example to change the
      order.
    - ``state_dict()`` returns the position after the last sample that was read. The returned value must be
      serializable as JSON: finite numbers, strings, lists, and dictionaries with string keys.
    - ``load_state_dict(state)`` sets the position at which the next iteration continues. Without
      ``state_dict`` and ``load_state_dict``, a resumed run rereads and skips the earlier samples of the
      epoch.
    - ``fingerprint``, a string that changes whenever the data changes, replaces the default fingerprint,
      which is computed from the first samples.

    trainkit seeds `random`, `numpy.random` and `torch` before it reads each sample.
    """

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, given as a total and the count by which to divide the total.

    trainkit adds up the totals and the counts of all microbatches and ranks in a step before dividing.
    The result therefore does not depend on how the samples are distributed, even if some batches have more
    valid tokens than others.
    """

    total: Tensor
    """The loss summed over the batch, as a tensor with one element and a gradient."""
    count: Number
    """The number by which to divide the total: the number of samples, tokens or answers in the batch."""
    metrics: Mapping[str, Number | tuple[Number, Number]] = field(default_factory=dict)
    """Additional metrics, keyed by name. A single number is a sum over the batch, to be divided by `count`; a
    pair is a sum and its own divisor. Metrics are logged under their names, with the prefix ``val_`` during
    validation.
    """


@dataclass(frozen=True)
class ParameterOptions:
    """Per-parameter options for the optimizer in the config."""

    lr_scale: float = 1.0
    """Factor by which the learning rate of the parameter is multiplied."""
    weight_decay: float | None = None
    """Weight decay; None means ``optimizer.weight_decay``, or 0 if the parameter has fewer than two
    dimensions."""


class Task(ABC):
    """A training task. `config` is the run's config, and ``task_args`` are passed as keyword arguments.

    A subclass that takes arguments defines, for example, ``__init__(self, config, *, width=64)`` and calls
    ``super().__init__(config)``. Every rank creates the task before the process groups exist, so neither the
    constructor nor any method may call a collective.
    """

    step: int = 0
    """Number of the current step, starting at 1. During validation, `step` is the number of the last training
    step, or 0 if there was none."""
    _recorder = Recorder()
    """Writes the images, histograms and texts that the task logs; set by the trainer on rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model in float32 on the CPU.

        The model must be the same on every rank. Before this method is called, trainkit seeds `random`,
        `numpy.random` and `torch` with ``seed``. Parameters with ``requires_grad = False`` are frozen.
        Persistent buffers are saved in checkpoints. After each step, rank 0's buffers are copied to all
        ranks.

        Build a large model inside a `parameters_on_meta` block, and define `read_weight` to provide its
        initial values. To support the config key ``model.lora``, pass a module of the model to `add_adapters`
        in this method.
        """

    def read_weight(self, name: str, rows: slice) -> Tensor:
        """Return rows of the initial value of a parameter that `build_model` left on the meta device.

        Each rank requests the rows of its own shard. Checkpoints do not contain frozen parameters. Frozen
        parameters are read again whenever the run starts, so the files that this method reads must not
        change.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define read_weight, which {name} needs")

    @property
    def base_fingerprint(self) -> str | None:
        """Return a string that changes if the files read by `read_weight` change, or None to skip this check.

        A run cannot resume if the string has changed.
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
        """Compute the loss of a batch whose tensors are on the model's device.

        The last batch of an epoch or of a validation may be smaller than the others. During validation,
        ``model.training`` is False and gradients are disabled. You may omit this method only if the task
        defines `turns` and has no validation data.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define loss, which the validation needs")

    def optimizers(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer | LRScheduler | Mapping[str, Optimizer | LRScheduler]:
        """Return one optimizer, or a dictionary that maps names to optimizers.

        This method is optional; by default, the config section ``optimizer`` defines the optimizer.
        `parameters` maps names to float32 parameters and contains every parameter that requires a gradient.
        For a sharded parameter, `parameters` contains only this rank's shard. Each parameter must belong to
        exactly one optimizer.

        To use a learning rate scheduler, return the scheduler instead of its optimizer. trainkit calls
        ``scheduler.step()`` after each training step. Without a scheduler, the config section ``schedule``
        defines a factor from 0 to 1, and the learning rates of all parameter groups are multiplied by this
        factor.

        With ``dp_shard`` or ``tp``, an optimizer must update each element of a parameter independently, as
        SGD and Adam do. If an optimizer that is not part of PyTorch updates each element independently,
        declare this by setting its attribute ``by_element = True``.
        """
        raise NotImplementedError

    def turns(self) -> Sequence[str]:
        """Return the names of the optimizers of the current step, in the order of their updates.

        In each optimizer turn, trainkit computes the gradient of `loss_for` over the samples of the step and
        updates only that optimizer's parameters. If no names are returned, all optimizers minimize `loss`
        together. The returned names may depend on `step`, but must be the same on all ranks.
        """
        return ()

    def loss_for(self, optimizer: str, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss for the turn of the given optimizer. Validation calls `loss`, not this method.

        The loss of each optimizer is logged as ``NAME_loss``. The ``loss`` logged for a step is the sum of
        the losses in all turns.
        """
        raise NotImplementedError

    def after_step(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Run your code after each step, even if the update was skipped; gradients are disabled.

        Every rank calls this method. On several ranks, `model` is sharded unless ``parallel.dp_shard`` is 1,
        and a sharded model cannot be called. `parameters` maps names to all parameters of the model in
        float32, including frozen parameters. For a sharded parameter, `parameters` contains only this rank's
        shard. Change the tensors in `parameters` in place; the changes apply to the model and its
        checkpoints.
        """
        return None

    def state_dict(self) -> Mapping[str, object]:
        """Return state to save in checkpoints in addition to the model and the optimizers.

        The state must be the same on every rank. The state may consist of tensors, numbers, strings, None,
        and lists, tuples and dictionaries of these types.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the state returned by `state_dict`; called when a run resumes."""
        return None

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to shard, recompute and compile as units, in the order of the forward pass.

        The default returns the modules in every `nn.ModuleList` or `nn.Sequential` if these modules all have
        the same class.
        """
        return repeated_layers(model)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str | ParallelStyle]:
        """Return how ``parallel.tp`` splits the model, as a mapping from module names to parallel styles.

        In a module name, ``*`` matches one component, as in ``layers.*.mlp.up``. If several names match a
        module, the first one is used. For `nn.Linear` and `nn.Embedding`, use one of these styles:

        - ``colwise`` divides the outputs and leaves them divided.
        - ``rowwise`` expects divided inputs and adds up the outputs; an embedding divides its vocabulary.
        - ``colwise_gather_output`` divides the outputs and gathers them on every rank.

        For other modules between a ``colwise`` and a ``rowwise`` module, use
        ``replicated_with_grad_allreduce``; the parameters of these modules are not split. A style can also be
        an instance of PyTorch's `ParallelStyle`. Modules without a style are replicated on every rank, and
        their inputs must not be split.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define tensor_plan")

    def parameter_options(self, name: str, parameter: nn.Parameter) -> ParameterOptions:
        """Return a parameter's options, such as its weight decay, for the optimizer in the config."""
        return ParameterOptions()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model, with the weights from a checkpoint, to an empty folder.

        `trainkit ckpt export` calls this method. The default writes ``model.safetensors`` with the names in
        ``model.state_dict()``, writing tied parameters only once.
        """
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        saved = model.state_dict()
        tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
        sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(folder / "model.safetensors", sizes, (item.detach() for item in tensors.values()))

    def log_image(self, name: str, image: object, caption: str | None = None) -> None:
        """Log an image for the current step, which is shown in the report, TensorBoard, MLflow and W&B.

        image: a tensor [height, width] or [channels, height, width], a NumPy array [height, width] or
        [height, width, channels], or a PIL image. Floats must be between 0 and 1, and integers between 0 and
        255.

        You may call `log_image` in any method of the task and on any rank, but only rank 0's images are kept.
        If a name is logged several times in one step, only the first image is kept. During validation, the
        name gets the prefix ``val_``. Raises UsageError if `image` is not an image.
        """
        self._recorder.image(name, image, caption=caption)

    def log_histogram(self, name: str, values: object) -> None:
        """Log a histogram of the numbers in a tensor, array or list; the rules of `log_image` apply."""
        self._recorder.histogram(name, values)

    def log_text(self, name: str, text: str) -> None:
        """Log a text, such as a generated sample; the rules of `log_image` apply."""
        self._recorder.text(name, text)

    @property
    def flops_per_sample(self) -> float | None:
        """Return the FLOPs of a forward and backward pass on one sample, or None to log no MFU."""
        return None


def record_with(task: Task, recorder: Recorder) -> None:
    """Set the recorder for images, histograms and texts that a task logs; called by the trainer."""
    task._recorder = recorder


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create module parameters within the block on the meta device. Buffers keep their values.

    Use `parameters_on_meta` for a model that is too large for every process on a host to build in memory.
    This function is not thread-safe.
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
    """Samples for your own language model, taken from the text in the config section ``data``.

    A sample is an int64 tensor of ``data.seq_len`` + 1 token ids. The last token of a sample is also the
    first token of the next sample. The text is tokenized once and cached, as for the built-in task. Raises
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
        """Return the vocabulary size, which is the largest token id plus one."""
        return self._shards.vocab_size


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules in each outermost `nn.ModuleList` or `nn.Sequential` that repeats one class.

    Modules without submodules, such as `nn.Linear`, are too small to be considered layers.
    """
    items = list(model.children())
    repeats = len(items) > 1 and len({type(item) for item in items}) == 1
    if isinstance(model, nn.ModuleList | nn.Sequential) and repeats and list(items[0].children()):
        return items
    # A model can use the same module several times, so remove duplicates.
    return list(dict.fromkeys(layer for item in items for layer in repeated_layers(item)))
