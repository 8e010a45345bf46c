"""Checks arguments of `trainkit.submit` that are not config keys, but meant for the function or submitit."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainkit.errors import Problem, UsageError
from trainkit.formats import mask_secrets, near, slurm_memory, time_text
from trainkit.function import Call

MAX_SHOWN = 60
_ANY = inspect.signature(lambda *args, **kwargs: None)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DEFERRED = (
    (inspect.iscoroutinefunction, "coroutine function", "asyncio.run"),
    (inspect.isasyncgenfunction, "asynchronous generator function", "…"),
    (inspect.isgeneratorfunction, "generator function", "list"),
)


@dataclass(frozen=True)
class Arguments:
    """A function and the arguments that a run passes to it, which are checked against its parameters."""

    call: Call

    @property
    def name(self) -> str:
        """Return the function's name for messages."""
        function = self.call.function
        return str(getattr(function, "__qualname__", None) or type(function).__qualname__)

    @cached_property
    def _named(self) -> inspect.Signature | None:
        """Return the signature as documented, ignoring decorators, or None if a builtin has no signature."""
        return _signature(self.call.function, follow_wrapped=True)

    @property
    def given(self) -> dict[str, object]:
        """Map parameter names to arguments. Extra positional arguments have keys such as ``NAME.INDEX``."""
        signature = self._named or _ANY
        try:
            bound = signature.bind_partial(*self.call.args, **self.call.kwargs).arguments
        except TypeError:  # A decorator may have changed the parameters.
            signature = _ANY
            bound = {"args": self.call.args, "kwargs": self.call.kwargs}
        found: dict[str, object] = {}
        for name, value in bound.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                found |= {f"{name}.{index}": item for index, item in enumerate(value)}
            else:
                found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return found

    @property
    def names(self) -> list[str]:
        """Return the parameters that can be passed by keyword."""
        found = () if self._named is None else self._named.parameters.values()
        return [one.name for one in found if one.kind in _BY_NAME]

    @property
    def takes_any(self) -> bool:
        """Return whether the function may accept any keyword argument."""
        kinds = () if self._named is None else [one.kind for one in self._named.parameters.values()]
        return self._named is None or inspect.Parameter.VAR_KEYWORD in kinds

    @cached_property
    def _bound(self) -> set[str]:
        """Return the parameters that already have an argument."""
        try:
            signature = self._named or inspect.Signature()
            return {*signature.bind_partial(*self.call.args, **self.call.kwargs).arguments}
        except TypeError:  # A decorator may have changed the parameters.
            return {*self.call.kwargs}

    def means(self, name: str, *, is_used: bool) -> bool:
        """Return whether an option is meant for the function.

        `is_used` means that the option affects the run. The same name, for example `name`, can be both an
        option of the run and a parameter of the function. Such a name is considered an option of the run if
        the parameter already has an argument.
        """
        if name in self.names:
            return not is_used or name not in self._bound
        return self.takes_any and not is_used

    def problem(self, options: Mapping[str, object], name: str, *, is_used: bool, is_known: bool) -> Problem:
        """Return the problem caused by an option that is meant for the function.

        `is_used` is True if the option affects this run, and `is_known` is True if it is an option of any
        run.
        """
        hint = f"`{self.bound(options)}` passes the argument to the function"
        if is_used:
            hint += f"; {name}= is then interpreted as an option of the run"
        what = "has no effect on the run of a function" if is_known else "unknown argument"
        if name in self.names:
            what = f"is a parameter of {self.name}"
        return Problem(name, what, shown_argument(name, options[name]), hint)

    def bound(self, options: Mapping[str, object]) -> str:
        """Return the source code of a functools.partial call that passes `options` to the function."""
        return self._partial(shown_argument(key, value) for key, value in options.items())

    def _partial(self, given: Iterable[str]) -> str:
        name = self.name.rpartition("<locals>.")[2]
        return f"functools.partial({name if name.isidentifier() else 'function'}, {', '.join(given)})"

    def near(self, name: str) -> str | None:
        """Return the parameter whose name is most similar to `name`, or None if none is similar."""
        return near(name, self.names)

    @property
    def signature(self) -> str:
        """Return the function's name with its parameters and defaults, as in ``train(lr, *, seed=0)``."""
        documented = () if self._named is None else self._named.parameters.values()
        shown = [
            one.replace(annotation=inspect.Parameter.empty)
            if one.default is inspect.Parameter.empty
            else one.replace(annotation=inspect.Parameter.empty, default=_Text(shown_value(one.default)))
            for one in documented
        ]
        return f"{self.name}{inspect.Signature(shown)}"

    def refuse(self) -> None:
        """Raise UsageError if the function cannot be called with the given arguments.

        Also raises UsageError for a coroutine or generator function, because calling it does not execute its
        body.
        """
        function = self.call.function
        for is_one, kind, runs in _DEFERRED:
            if is_one(function) or is_one(type(function).__call__):
                message = f"{self.name} is a {kind}: calling it would not run its body"
                raise UsageError(
                    message, hint=f"submit a function that runs it: `lambda: {runs}({self.name}(…))`"
                )
        # Check the outermost function, which is the one that is called, because a decorator may supply
        # arguments itself.
        signature = _signature(function, follow_wrapped=False)
        if signature is None:
            return
        try:
            signature.bind(*self.call.args, **self.call.kwargs)
        except TypeError as error:
            shown = [shown_value(one) for one in self.call.args]
            shown += [shown_argument(*item) for item in self.call.kwargs.items()]
            message = f"{self.name} cannot be called as {self.name}({', '.join(shown)}): {error}"
            raise UsageError(message, hint=self._hint(signature)) from None

    def _hint(self, signature: inspect.Signature) -> str:
        """Return a hint that shows how to correct a call with missing or unexpected arguments."""
        hint = f"its signature is {self.signature}"
        ordered = [one for one in signature.parameters.values() if one.kind in _BY_POSITION]
        given = {one.name for one in ordered[: len(self.call.args)]} | self.call.kwargs.keys()
        needed = [one.name for one in signature.parameters.values() if one.default is one.empty]
        free = [f"{name}=…" for name in self.names if name in needed and name not in given]
        unknown = next((name for name in self.call.kwargs if name not in self.names), None)
        if unknown is not None and (match := self.near(unknown)) is not None:
            return f"did you mean {match}? {hint}"
        return f"{hint}; `{self._partial(free)}` passes keyword arguments" if free else hint


class _Text:
    """A default value with a given text as its repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(function: Callable[..., Any], *, follow_wrapped: bool) -> inspect.Signature | None:
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):  # raised for an object that is a builtin or not a function
        return None


def shown_value(value: object) -> str:
    """Format a value for a message: masked if it looks like a secret, and truncated if it is long."""
    return _shortened(mask_secrets(repr(value)))


def shown_argument(name: str, value: object) -> str:
    """Format a keyword argument for a message: masked if its name or value looks like a secret."""
    return f"{name}={_shortened(mask_secrets(f'{name}={value!r}').removeprefix(f'{name}='))}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


# The remaining functions find replacements for submitit parameters.


def _shown(value: object) -> str:
    """Return a value as Python source code, using double quotes unless they require escapes."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')


def _as(name: str, *keys: str) -> Callable[[Any], str]:
    """Return a function that formats a value as a keyword argument, nested in dictionaries under `keys`."""

    def written(value: object) -> str:
        for key in reversed(keys):
            value = {key: value}
        return f"{name}={_shown(value)}"

    return written


def _time(minutes: Any) -> str:
    is_number = isinstance(minutes, int | float)
    return _as("time")(time_text(round(minutes * 60)) if is_number else minutes)


def _mem_gb(value: object) -> str:
    return _mem(value if isinstance(value, str) else slurm_memory(f"{value}G"))


def _mem(value: object) -> str:
    return _as("resources", "mem")(str(value).removesuffix("B"))


def _options(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the long options of a command line with their values, or True for options without a value.

    Short options are skipped.
    """
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            yield name, value if equals else after.startswith("-") or after


def _srun(value: Any) -> str:
    words = shlex.split(value) if isinstance(value, str) else [*map(str, value)]
    return _as("launch", "srun_extra")(dict(_options(words)))


def _additional(value: Mapping[str, object]) -> str:
    return _as("resources", "extra")({name.replace("_", "-"): one for name, one in value.items()})


def _setup(value: Any) -> str:
    return _as("launch", "setup")([value] if isinstance(value, str) else [*value])


def _gpus(value: object) -> str:
    return _as("gpus_per_node")(value) if value else 'device="cpu"'


def _visible(value: Any) -> str:
    numbers = value if isinstance(value, str) else ",".join(map(str, value))
    return _as("launch", "env", "CUDA_VISIBLE_DEVICES")(numbers)


_WRITE: dict[str, Callable[[Any], str]] = {
    **{"timeout_min": _time, "time": _time, "mem_gb": _mem_gb, "mem": _mem, "job_name": _as("name")},
    **{name: _as(name) for name in ("name", "nodes", "partition", "qos", "account", "constraint")},
    **{"gpus_per_node": _gpus, "num_gpus": _gpus, "tasks_per_node": _as("gpus_per_node")},
    **{"ntasks_per_node": _as("gpus_per_node"), "array_parallelism": _as("limit")},
    **{name: _as("resources", "cpus_per_gpu") for name in ("cpus_per_task", "cpus_per_gpu")},
    **{name: _as("resources", name) for name in ("comment", "exclude", "mail_type", "mail_user")},
    **{
        name: _as("resources", "extra", name.replace("_", "-"))
        for name in ("mem_per_gpu", "mem_per_cpu", "gres", "nodelist", "exclusive", "wckey")
    },
    **{"additional_parameters": _additional, "srun_args": _srun, "setup": _setup},
    **{"signal_delay_s": _as("requeue", "grace_s"), "max_num_timeout": _as("requeue", "max")},
    **{"python": _as("launch", "python"), "visible_gpus": _visible, "folder": _as("run_dir")},
}
_LEAVE_OUT = {
    "gpus_per_task": "each rank has exactly one GPU",
    "stderr_to_stdout": "the log of a rank contains both output streams",
    "use_srun": "each rank is a separate process",
    "teardown": "use a `try` statement with `finally` in the function",
    "map_count": "`trainkit.map_array` counts its items",
    "max_pickle_size_gb": "the size of a pickle is not limited",
    "dependency": "use `after=[run]` to wait for a trainkit run",
}


def meant_of_submitit(name: str, value: object) -> str | None:
    """Return the trainkit replacement for a parameter of submitit's executors, or None for any other name."""
    base = next(
        (name.removeprefix(one) for one in ("slurm_", "local_", "debug_") if name.startswith(one)), name
    )
    if base in _LEAVE_OUT:
        return f"omit {name}: {_LEAVE_OUT[base]}"
    if base not in _WRITE:
        return None
    try:
        written = _WRITE[base](value)
    except (AttributeError, TypeError, ValueError):  # submitit would also reject this value
        written = _as(base)(value)
    return f"write {written}" + (" in `map_array` or `sweep`" if base == "array_parallelism" else "")
