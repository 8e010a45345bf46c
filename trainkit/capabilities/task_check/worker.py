"""Trains a user's task on a few samples on the CPU, or reads all samples of the task.

``python -m trainkit.capabilities.task_check.worker --smoke`` or ``--samples`` reads a config as JSON from
stdin, and prints problems in the format of `trainkit.trainer.task_check`. If ``--smoke`` finds no problems,
the output also contains a line which says what was tried.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, cast

import torch
from torch import nn

from trainkit.capabilities.task_check.two_ranks import TwoRanks
from trainkit.config.schema import RunConfig, config_class
from trainkit.errors import Problem, TrainkitError
from trainkit.formats import plural
from trainkit.run.manifest import Manifest
from trainkit.task import ParameterOptions, Stream, Task
from trainkit.trainer.build import AfterStep
from trainkit.trainer.checkpoint.state import StreamState
from trainkit.trainer.distributed import World
from trainkit.trainer.file_optimizer import make_own_optimizers
from trainkit.trainer.forward_backward import LossModule, TaskForwardBackward
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.interface import refuse_unused_groups
from trainkit.trainer.own_optimizers import TorchOptimizers, make_own_state
from trainkit.trainer.parallel.tensor import find_styles
from trainkit.trainer.progress import Progress
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.stream import Cursor, StreamData, is_stream
from trainkit.trainer.task_batches import TaskBatch, digest_of, read_in_worker, seed_generators
from trainkit.trainer.task_check import print_problems
from trainkit.trainer.user_code import errors_of_user, line_of, listed, problem_of, refusal
from trainkit.trainer.user_task import UserTask, digest_of_item

HALF = 2
"""Number of samples in each of two batches, which are also combined into one batch."""
RELATIVE_TOLERANCE = 1e-3
UNSEEDED = "use random, numpy.random or torch for random numbers, and do not seed them"


def unreadable_samples(config: RunConfig) -> Iterator[Problem]:
    """Read every sample in a task's datasets, and yield a problem for each sample that cannot be read."""
    try:
        task = UserTask(config, None, opens_data=False).task
        for name in ("train_dataset", "val_dataset"):
            with errors_of_user(config, f"{name}() failed"):
                samples: Any = getattr(task, name)()
                count = 0 if samples is None or is_stream(samples) else len(samples)
            if samples is not None and is_stream(samples):
                yield Problem(f"{name}()", "returned a stream, which was not read because it may be endless")
            digest = partial(digest_of_item, samples, config.seed)
            for index, (_, problem) in enumerate(read_in_worker(digest, range(count), config)):
                if problem:
                    yield Problem(f"{name}()", f"sample {index}: {problem}")
    except TrainkitError as error:
        yield problem_of(config, error)


class Smoke:
    """Runs forward and backward passes of a task on a few samples, and collects the problems found."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._found: list[Problem] = []
        self._num_samples: dict[str, int] = {}
        """Maps ``train_dataset`` and ``val_dataset`` to the number of samples that were read."""
        self._losses: dict[str, dict[str, float]] = {}
        """Maps ``train_dataset`` and ``val_dataset`` to their mean losses, by name."""

    def problems(self) -> list[Problem]:
        """Return the problems found in a task, up to the first one that prevents further checks."""
        try:
            self._try()
        except TrainkitError as error:
            self._found.append(problem_of(self._config, error))
        return self._found

    def tried(self) -> str:
        """Return a sentence which says what was tried, and which methods of the task were not called."""
        samples = {
            "train_dataset": ("training sample", "on one rank and on two ranks"),
            "val_dataset": ("validation sample", "on one rank"),
        }
        parts = []
        for method, count in self._num_samples.items():
            noun, where = samples[method]
            losses = [f"{name} {loss:.4g}" for name, loss in self._losses.get(method, {}).items()]
            parts.append(f"{plural(count, noun)} {where}{': ' if losses else ''}{', '.join(losses)}")
        own = type(self._user.task)
        if own.after_step is not Task.after_step:
            parts.append("after_step was called only once per rank, at step 1")
        if own.export is not Task.export:
            parts.append("export was not called")
        return "; ".join(parts)

    def _try(self) -> None:
        self._user = UserTask(self._config, None)
        data = ("train_dataset", self._user.train_data), ("val_dataset", self._user.val_data)
        halves = [self._batches(method, found) for method, found in data if found is not None]
        model = self._user.build_whole_model()
        if digest_of(model) != digest_of(self._user.build_whole_model()):
            self._add("build_model", "builds a different model when it is called a second time", UNSEEDED)
        self._check_structure(model)
        # Replace fp16 with another dtype, because few CPU operations support fp16.
        precision = self._config.precision
        if precision.dtype == "fp16":
            precision = precision.model_copy(update={"dtype": "fp32"})
        config = self._config.model_copy(update={"precision": precision})
        module = LossModule(model, self._user.task, config)
        alone = World(0, 1, torch.device("cpu"), None, None)
        weights = [Weight(*item) for item in model.named_parameters()]
        trained = [weight.name for weight in weights if weight.param.requires_grad]
        refuse_unused_groups(trained, self._config.optimizer)
        optimizers = make_own_optimizers(self._user, weights, alone.layout)
        module.task.step = 1
        turns = ("",) if optimizers is None else optimizers.turns()
        for batches in reversed(halves):
            # Training and validation may report different metrics, so use a separate object for each.
            passes = TaskForwardBackward(lambda enabled: None, Progress(), module, config, alone)
            validates = batches is not halves[0]
            for turn in ("",) if validates else turns:
                own = [replace(batch, optimizer=turn) for batch in batches]
                self._check_losses(module, passes, own, validates=validates)
        updated = {item.name for item in weights} if optimizers is None else optimizers.updated_by(turns)
        own = [replace(halves[0][2], optimizer=turn) for turn in turns]
        self._check_gradients(module, passes, own, updated)
        if not self._found:
            self._check_update(module, weights, optimizers, config, alone)

    def _batches(self, method: str, data: Any) -> list[TaskBatch]:
        """Return two batches, and a third batch that combines the samples of both."""
        if isinstance(data, StreamData):
            size, items = HALF, self._stream_items(data)
        else:
            size = min(HALF, max(1, data.num_samples // 2))
            items = self._items(method, data, min(2 * size, data.num_samples))
        self._num_samples[method] = len(items)
        batches = []
        for chunk in (items[:size], items[size:] or items[:size], items):
            with self._errors("collate", f"{len(chunk)} items cannot be combined into a batch"):
                batches.append(TaskBatch(self._user.task.collate(list(chunk)), self._config.seed))
        try:
            pickle.dumps(batches[0])
        except Exception as error:  # the user's objects may raise any exception
            message = f"returns a batch that cannot be sent to another process: {error}"
            hint = "return tensors, numbers, strings, and lists or dictionaries of them"
            self._add("collate", message, hint)
        return batches

    def _items(self, method: str, data: Any, count: int) -> list[Any]:
        def item(index: int) -> Any:
            seed_generators(stable_key(self._config.seed, method.partition("_")[0], "item", index))
            return data.samples[index]

        with self._errors(method, "an item cannot be read"):
            items = [item(index) for index in range(count)]
        if digest_of(items[0]) != digest_of(item(0)):
            self._add(method, "item 0 is different when it is read a second time", UNSEEDED, of=data.samples)
        return items

    def _stream_items(self, data: StreamData) -> list[object]:
        """Return the first items of a stream; check that a new stream object can resume in the middle."""
        with self._errors("train_dataset", "a sample cannot be read"):
            cursor = Cursor(data)
            items = [cursor.next(position) for position in range(HALF)]
            before = cursor.where()
            items.append(cursor.next(HALF))
            again = StreamData(cast(Stream, self._user.task.train_dataset()), self._config)
            resumed = Cursor(again)
            resumed.seek(StreamState(*before, digest_of(items[-1])), HALF + 1)
            items += [cursor.next(position) for position in range(HALF + 1, 2 * HALF)]
        return items

    def _check_structure(self, model: nn.Module) -> None:
        with self._errors("layers", "failed"):
            layers = self._user.task.layers(model)
        overlap = any(layer in set(other.modules()) for layer, other in permutations(layers, 2))
        if overlap or not set(layers) <= set(model.modules()):
            message = "returns modules that overlap or are not in the model"
            self._add(
                "layers", message, "return each layer only once, and no layer that is part of another layer"
            )
        if type(self._user.task).tensor_plan is not Task.tensor_plan:
            find_styles(self._user.task, self._config, model, self._config.parallel.tp)
        for name, param in model.named_parameters():
            with self._errors("parameter_options", "failed"):
                options = self._user.task.parameter_options(name, param)
            if not isinstance(options, ParameterOptions):
                message = f"returned a {type(options).__name__} for {name}"
                self._add("parameter_options", message, "return a ParameterOptions")
                return

    def _check_losses(
        self, module: nn.Module, passes: TaskForwardBackward, batches: list[TaskBatch], *, validates: bool
    ) -> None:
        """Check that the losses of two batches add up to the loss of a single batch with the same samples."""
        module.eval()
        found, method = [], _loss_of(batches[0])
        for batch in batches:
            with torch.no_grad(), self._errors(method, "failed"):
                total, count, *_ = passes.loss_sums(batch).tolist()
            if not math.isfinite(total) or not math.isfinite(count) or count < 0:
                message = f"returned total {total:g} and count {count:g}"
                self._add(method, message, "both values must be finite, and the count must be at least 0")
                return
            found.append((total, count))
        total, count = found[-1]
        if count:
            data, name = ("val_dataset", "val_loss") if validates else ("train_dataset", "loss")
            self._losses.setdefault(data, {})[batches[0].optimizer or name] = total / count
        if validates:
            return
        (first, of_first), (second, of_second), (both, of_both) = found
        is_near = partial(math.isclose, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-6)
        is_sum, adds_up = is_near(first + second, both), is_near(of_first + of_second, of_both)
        mean = (first * of_first + second * of_second) / max(of_both, 1e-9)
        if is_sum and not adds_up:
            message = (
                f"returned count {of_both:g} instead of {of_first + of_second:g} for the samples "
                f"of both batches"
            )
            self._add(
                method,
                message,
                "return, as count, the number of samples or tokens in the total, not the number of batches",
            )
        elif adds_up and not is_sum and is_near(mean, both):
            message = (
                f"returned total {both:g} for two batches with totals {first:g} and {second:g}, "
                f"so the total is a mean"
            )
            self._add(method, message, 'return the sum as total, for example with reduction="sum"')

    def _check_gradients(
        self, module: LossModule, passes: TaskForwardBackward, batches: list[TaskBatch], updated: set[str]
    ) -> None:
        """Check that every parameter named in `updated` receives a gradient."""
        module.train()
        for batch in batches:
            with self._errors(_loss_of(batch), "failed in the backward pass"):
                passes.accumulate_gradient([batch], torch.ones(()), lambda sums: None)
        without = [
            name
            for name, param in module.model.named_parameters()
            if name in updated and param.requires_grad and param.grad is None
        ]
        if without:
            hint = "use these parameters, or freeze them in build_model with parameter.requires_grad_(False)"
            self._add("loss", f"computes no gradient for {listed(without)}", hint)

    def _check_update(
        self,
        module: LossModule,
        weights: list[Weight],
        optimizers: TorchOptimizers | None,
        config: RunConfig,
        alone: World,
    ) -> None:
        """Update the parameters with the task's own optimizers, then save and load the optimizer state."""
        if optimizers is not None:
            optimizers.begin_step(config.optimizer.lr)
            optimizers.collect_gradients()
            with self._errors("optimizers", "failed during the update"):
                optimizers.step(config.optimizer.lr, torch.ones(()), torch.zeros(()))
        if type(module.task).after_step is not Task.after_step:
            with self._errors("after_step", "failed"):
                AfterStep(module, weights, config, alone.device)()
        state = make_own_state(self._user, optimizers, alone)
        if state is not None:
            values, tensors = state.collect()
            state.load(Manifest(state=values), tensors)

    def _errors(self, method: str, failed: str) -> AbstractContextManager[None]:
        """Convert any exception in a task's method to a TaskError with the file and line."""
        return errors_of_user(self._config, f"{self._shown(method)} {failed}")

    def _add(self, method: str, message: str, hint: str, of: object = None) -> None:
        """Add a problem with a method; cite the line of the method or, if given, of `of.__getitem__`."""
        self._found.append(refusal(self._config, f"{self._shown(method, of)} {message}", hint).problem)

    def _shown(self, method: str, of: object = None) -> str:
        function = getattr(type(self._user.task), method)
        if of is not None:
            function = getattr(type(of), "__getitem__", None)
        return f"{method}(){'' if function is getattr(Task, method, None) else line_of(function)}"


def _loss_of(batch: TaskBatch) -> str:
    """Return the name of the task's method that computes the loss of a batch."""
    return "loss_for" if batch.optimizer else "loss"


def smoke(config: RunConfig) -> tuple[list[Problem], str]:
    """Check a task on one rank and, if there are no problems, on two ranks.

    Returns the problems found, and a sentence which says what was tried if there are none.
    """
    with TwoRanks(config) as two:
        one = Smoke(config)
        problems = one.problems() or two.problems()
        return problems, "" if problems else one.tried()


def main() -> None:
    """Read a config from stdin, and print the problems found."""
    values = json.load(sys.stdin)
    config = config_class(values).model_validate(values)
    if "--smoke" not in sys.argv:
        print_problems(unreadable_samples(config))
        return
    print_problems(*smoke(config))


if __name__ == "__main__":
    main()
