"""Tests which keyword arguments go to a function, its call, and submitit's names."""

import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support.said import cases, said
from trainkit import api
from trainkit.arguments import Arguments, meant_of_submitit
from trainkit.errors import UsageError
from trainkit.function import Call


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seeded(seed: int = 1) -> None: ...
def named(x: int, name: str = "a") -> None: ...
def any_name(**values: int) -> None: ...
def configured(config: str | None = None) -> None: ...
def limited(limit: int = 1) -> None: ...
def placed(seed: int, /) -> None: ...
async def coroutine() -> None: ...


def generator() -> Any:
    yield 1


@torch.no_grad()
def without_gradients(x: int, lr: float = 1.0) -> None: ...


def injecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that passes the function its first argument, as Hydra's does."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("config", *args, **kwargs)

    return wrapper


@injecting
def injected(config: str, seed: int = 3) -> None: ...


class Callables:
    def __call__(self, seed: int) -> None: ...
    def method(self, seed: int) -> None: ...

    @classmethod
    def of_class(cls, seed: int) -> None: ...

    @staticmethod
    def static(seed: int) -> None: ...


class AsyncCallable:
    async def __call__(self) -> None: ...
    async def method(self) -> None: ...


class Made:
    def __init__(self, size: int, *sizes: int, scale: float = 1.0) -> None: ...


def keywords(*, a: int, b: int, c: object = "x" * 100) -> None: ...
def secretive(key: str = "hf_" + "b" * 20, /) -> None: ...
def nothing() -> None: ...


class Accepted(Exception):
    """Raised in place of planning the run."""


def accept(given: object) -> None:
    raise Accepted


PARTIAL = functools.partial
MODULES = (itertools, math, os, time)


@pytest.mark.parametrize("call", cases(__file__, "test_what_a_wrong_call_prints"))
def test_what_a_wrong_call_prints(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_loaded", accept)
    try:
        eval(call, {**vars(api), **globals(), **{module.__name__: module for module in MODULES}})
    except Accepted:
        said("accepted")
    except UsageError as error:
        said(error.render().replace("required keyword-only", "required"))  # newer Pythons name the kind
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("after", "names"),
    [
        ("first", ["first"]),
        (["first", Path("runs/second")], ["first", "runs/second"]),
        (Path("runs/second"), ["runs/second"]),
        ((name for name in ("a", "b")), ["a", "b"]),
        ((), []),
    ],
)
def test_the_runs_that_one_waits_for(after: Any, names: list[str]) -> None:
    assert api._given("quickstart", None, None, {}, after).after == names


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (numpy.int64(3), 3),
        (numpy.float32(0.5), 0.5),
        (numpy.array([1, 2]), [1, 2]),
        ({"a": (numpy.int8(1), Path("b"))}, {"a": [1, "b"]}),
        ("text", "text"),
        (None, None),
    ],
)
def test_a_value_of_a_config(value: object, plain: object) -> None:
    found = api._plain(value)
    assert (found, type(found)) == (plain, type(plain))


def test_a_parameter_by_position_alone_has_no_name() -> None:
    arguments = Arguments(Call(placed, (1,)))
    arguments.refuse()
    assert not arguments.means("seed", is_used=False)


@pytest.mark.parametrize("parameter", cases(__file__, "test_what_to_write_for_a_parameter_of_submitit"))
def test_what_to_write_for_a_parameter_of_submitit(parameter: str) -> None:
    [(name, value)] = eval(f"dict({parameter})").items()
    said(meant_of_submitit(name, value) or "no hint")
