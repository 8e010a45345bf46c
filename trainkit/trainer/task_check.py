"""Tries a user's task or architecture on the CPU, with a few samples, before it costs time on a cluster.

``python -m trainkit.trainer.task_check [--smoke | --samples]`` reads a config as JSON from stdin and prints a
line ``problems: `` with a JSON list of ``[key, message, hint]``. ``--samples`` reads every sample instead;
without options it only imports its class, and compares that of an architecture with the layout.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.adapters import lora_config, require
from trainkit.config.schema import RunConfig
from trainkit.errors import Problem, TrainkitError
from trainkit.task import Loss, ParameterOptions, Stream, Task
from trainkit.trainer.checkpoint.state import StreamState
from trainkit.trainer.distributed import World
from trainkit.trainer.hf_task import find_hf_problem
from trainkit.trainer.load_task import load_task_class
from trainkit.trainer.models import find_architecture_problem
from trainkit.trainer.parallel.tensor import find_styles
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.progress import Progress
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.stream import Cursor, StreamData, is_stream
from trainkit.trainer.task_batches import digest_of, read_in_worker, seed_generators
from trainkit.trainer.task_errors import TRACEBACK_HINT, TaskError, describe, errors_of_user, line_of
from trainkit.trainer.user_task import Digests, LossModule, TaskForwardBackward, UserTask

PREFIX = "problems: "
HALF = 2
"""Samples in each of the two batches that are also tried as one."""
RELATIVE_TOLERANCE = 1e-3
DEFINITE = (SyntaxError, ImportError, NameError, TypeError, AttributeError)
"""Errors of the user's code that other data or another machine would not change."""


def definite_problem(config: RunConfig) -> Problem | None:
    """The problem of a task, model or architecture that certainly cannot be used; None without one."""
    if not config.has_user_task:
        return find_architecture_problem(config) if config.model.hf is None else find_hf_problem(config)
    try:
        load_task_class(config)
        if config.model.lora is not None:
            require("peft", "model.lora", "peft")
            lora_config(config.model.lora)
    except TaskError as error:
        cause = error.__cause__
        return error.problem if cause is None or isinstance(cause, DEFINITE) else None
    except TrainkitError as error:
        key, _, message = error.message.partition(" ")
        return Problem(key, message, hint=error.hint)
    return None


def unreadable_samples(config: RunConfig) -> Iterator[Problem]:
    """Read every sample of a task's datasets, and yield a problem for each that cannot be read."""
    try:
        task = UserTask(config, None, opens_data=False).task
        for name in ("train_dataset", "val_dataset"):
            with errors_of_user(config, f"{name}() failed"):
                samples: Any = getattr(task, name)()
                count = 0 if samples is None or is_stream(samples) else len(samples)
            if samples is not None and is_stream(samples):
                yield Problem(f"{name}()", "returned a stream, which may have no end: it was not read")
            for index, (_, problem) in enumerate(
                read_in_worker(Digests(samples, config.seed), range(count), config)
            ):
                if problem:
                    yield Problem(f"{name}()", f"sample {index}: {problem}")
    except TrainkitError as error:
        yield _problem_of(config, error)


def _problem_of(config: RunConfig, error: TrainkitError) -> Problem:
    if isinstance(error, TaskError):
        return error.problem
    return Problem("task", f"is {config.task}, but {error.message}", hint=error.hint)


class Smoke:
    """One batch of a task, forward and backward, and what can be wrong with it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._name = config.task

    def problems(self) -> Iterator[Problem]:
        """The problems of a task; ends at the first that makes further ones unknowable."""
        try:
            yield from self._problems()
        except TrainkitError as error:
            yield _problem_of(self._config, error)

    def _problems(self) -> Iterator[Problem]:
        self._user = UserTask(self._config, None)
        halves = []
        for method, data in (("train_dataset", self._user.train_data), ("val_dataset", self._user.val_data)):
            if data is not None:
                batches, found = self._batches(method, data)
                yield from found
                halves.append(batches)
        model = self._user.build_whole_model()
        if digest_of(model) != digest_of(self._user.build_whole_model()):
            yield self._problem(
                "build_model",
                "builds another model when it is called twice",
                "draw random numbers from random, numpy.random or torch without seeding them",
            )
        yield from self._structure(model)
        passes = TaskForwardBackward(
            LossModule(model, self._user),
            lambda enabled: None,
            World(0, 1, torch.device("cpu"), None, None),
            DTYPES[self._config.precision.dtype],
            Progress(),
            self._user,
        )
        for index, batches in enumerate(halves):
            yield from self._losses(model, batches, validates=index > 0)
        yield from self._gradients(model, passes, halves[0])

    def _batches(self, method: str, data: Any) -> tuple[list[Any], list[Problem]]:
        """Two batches, and both of them as one; and the problems of the items."""
        found: list[Problem] = []
        if isinstance(data, StreamData):
            size, items = HALF, self._stream_items(data)
        else:
            size = min(HALF, max(1, data.num_samples // 2))
            items = self._items(method, data, min(2 * size, data.num_samples), found)
        batches = []
        for part in (items[:size], items[size:] or items[:size], items):
            with self._errors("collate", f"{len(part)} items cannot be joined to a batch"):
                batches.append(self._user.task.collate(list(part)))
        try:
            pickle.dumps(batches[0])
        except Exception as error:  # whatever the objects of the user raise
            message = f"returns a batch that cannot be sent to another process: {error}"
            hint = "return tensors, numbers, strings, and lists or dictionaries of them"
            found.append(self._problem("collate", message, hint))
        if any(tensor.device.type != "cpu" for tensor in tensors_in(batches[0])):
            found.append(
                self._problem("collate", "returns tensors on a GPU", "the trainer copies batches to the GPU")
            )
        return batches, found

    def _items(self, method: str, data: Any, count: int, found: list[Problem]) -> list[Any]:
        def item(index: int) -> Any:
            seed_generators(stable_key(self._config.seed, method.partition("_")[0], "item", index))
            return data.samples[index]

        with self._errors(method, "an item cannot be read"):
            items = [item(index) for index in range(count)]
        if digest_of(items[0]) != digest_of(item(0)):
            message = "item 0 differs when it is read twice"
            hint = "draw random numbers from random, numpy.random or torch without seeding them"
            found.append(self._problem(method, message, hint, of=data.samples))
        return items

    def _stream_items(self, data: StreamData) -> list[Any]:
        """The first items of a stream; another object of it must continue in the middle."""
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

    def _structure(self, model: nn.Module) -> Iterator[Problem]:
        own = set(model.modules())
        with self._errors("layers", "failed"):
            layers = list(self._user.task.layers(model))
        inside = [
            layer
            for layer in layers
            if any(layer is not other and layer in set(other.modules()) for other in layers)
        ]
        if len(set(layers)) != len(layers) or inside or not set(layers) <= own:
            message = "returns modules that overlap or are not in the model"
            yield self._problem("layers", message, "return each layer once, and none that is inside another")
        if type(self._user.task).tensor_plan is not Task.tensor_plan:
            find_styles(self._user.task, self._config, model, self._config.parallel.tp)
        for name, param in model.named_parameters():
            with self._errors("parameter_options", "failed"):
                options = self._user.task.parameter_options(name, param)
            if not isinstance(options, ParameterOptions):
                message = f"returned a {type(options).__name__} for {name}"
                yield self._problem("parameter_options", message, "return a ParameterOptions")
                return

    def _losses(self, model: nn.Module, batches: list[Any], *, validates: bool) -> Iterator[Problem]:
        """The loss of two batches must be that of both as one, in evaluation mode, without dropout."""
        model.eval()
        found = []
        with torch.no_grad():
            for batch in batches:
                loss = self._loss(model, batch)
                total, count = float(loss.total), float(loss.count)
                if not math.isfinite(total) or not math.isfinite(count) or count < 0:
                    message = f"returned total {total:g} and count {count:g}"
                    yield self._problem("loss", message, "both must be finite, and the count at least 0")
                    return
                found.append((total, count))
        model.train()
        if validates:
            return
        (first, of_first), (second, of_second), (both, of_both) = found
        is_sum = math.isclose(first + second, both, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-6)
        adds_up = math.isclose(of_first + of_second, of_both, rel_tol=RELATIVE_TOLERANCE)
        if is_sum and not adds_up:
            message = f"has count {of_both:g} instead of {of_first + of_second:g} for two batches as one"
            yield self._problem("loss", message, "count what the total sums: samples or tokens, not batches")
        elif not is_sum and adds_up and self._is_mean(found):
            message = f"has total {both:g} for two batches of {first:g} and {second:g}: that is a mean"
            yield self._problem("loss", message, 'return the sum, for example with reduction="sum"')

    @staticmethod
    def _is_mean(found: list[tuple[float, float]]) -> bool:
        (first, of_first), (second, of_second), (both, of_both) = found
        mean = (first * of_first + second * of_second) / max(of_both, 1e-9)
        return math.isclose(mean, both, rel_tol=RELATIVE_TOLERANCE)

    def _loss(self, model: nn.Module, batch: Any) -> Loss:
        dtype = DTYPES[self._config.precision.dtype]
        with (
            self._errors("loss", "failed"),
            torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16),
        ):
            loss = self._user.task.loss(model, batch)
        if not isinstance(loss, Loss):
            raise TaskError(
                self._problem("loss", f"returned a {type(loss).__name__}", "return a trainkit.task.Loss")
            )
        if loss.total.numel() != 1:
            message = f"returned a total of shape {list(loss.total.shape)}"
            raise TaskError(self._problem("loss", message, "sum it: total.sum()"))
        return loss

    def _gradients(
        self, model: nn.Module, passes: TaskForwardBackward, batches: list[Any]
    ) -> Iterator[Problem]:
        loss = self._loss(model, batches[2])
        if not loss.total.requires_grad:
            yield self._problem(
                "loss", "returned a total without a gradient", "do not detach it, and use no item()"
            )
            return
        with self._errors("loss", "failed in the backward pass"):
            loss.total.backward()  # type: ignore[no-untyped-call]
        without = [
            name for name, param in model.named_parameters() if param.requires_grad and param.grad is None
        ]
        if without:
            shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
            message = f"gives no gradient to {shown}"
            hint = "use them, or freeze them in build_model: parameter.requires_grad_(False)"
            yield self._problem("loss", message, hint)
        passes.check_names(loss.metrics)

    @contextmanager
    def _errors(self, method: str, failed: str) -> Iterator[None]:
        """Raise TaskError, with file and line, for whatever a method of the task raises."""
        try:
            yield
        except TaskError:
            raise
        except Exception as error:
            message = f"{failed}: {describe(error)}"
            raise TaskError(self._problem(method, message, TRACEBACK_HINT)) from error

    def _problem(self, method: str, message: str, hint: str, of: object = None) -> Problem:
        """A problem of a method, with the line where it, or the item of a dataset, is defined."""
        function = getattr(type(self._user.task), method)
        if of is not None:
            function = getattr(type(of), "__getitem__", None)
        place = "" if function is getattr(Task, method, None) else line_of(function)
        return Problem("task", f"is {self._name}, but {method}(){place} {message}", hint=hint)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a tree of mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def main() -> None:
    """Print the problems of the config on stdin."""
    config = RunConfig.model_validate(json.load(sys.stdin))
    if "--smoke" in sys.argv:
        found = list(Smoke(config).problems())
    elif "--samples" in sys.argv:
        found = list(unreadable_samples(config))
    else:
        problem = definite_problem(config)
        found = [] if problem is None else [problem]
    # On a line of its own: the task may print too.
    print("\n" + PREFIX + json.dumps([[item.key, item.message, item.hint] for item in found]))


if __name__ == "__main__":
    main()
