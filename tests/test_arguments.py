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


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("timeout_min", 60, 'write time="01:00:00"'),
        ("slurm_timeout_min", 2880, 'write time="2-00:00:00"'),
        ("slurm_time", 90, 'write time="01:30:00"'),
        ("slurm_time", "1-0", 'write time="1-0"'),
        ("mem_gb", 64, 'write resources={"mem": "64G"}'),
        ("mem_gb", 3.5, 'write resources={"mem": "3584M"}'),
        ("slurm_mem", "20GB", 'write resources={"mem": "20G"}'),
        ("slurm_mem_per_gpu", "8G", 'write resources={"extra": {"mem-per-gpu": "8G"}}'),
        ("cpus_per_task", 8, 'write resources={"cpus_per_gpu": 8}'),
        ("tasks_per_node", 4, "write gpus_per_node=4"),
        ("slurm_ntasks_per_node", 4, "write gpus_per_node=4"),
        ("slurm_num_gpus", 4, "write gpus_per_node=4"),
        ("slurm_partition", "gpu", 'write partition="gpu"'),
        ("slurm_array_parallelism", 4, "write limit=4 in `map_array` or `sweep`"),
        ("slurm_signal_delay_s", 90, 'write requeue={"grace_s": 90}'),
        ("slurm_max_num_timeout", 3, 'write requeue={"max": 3}'),
        ("slurm_job_name", "it's", 'write name="it\'s"'),
        ("slurm_exclude", "n[1-3]", 'write resources={"exclude": "n[1-3]"}'),
        (
            "slurm_additional_parameters",
            {"mail_type": "END"},
            'write resources={"extra": {"mail-type": "END"}}',
        ),
        ("slurm_setup", "module load x", 'write launch={"setup": ["module load x"]}'),
        (
            "slurm_srun_args",
            ["--mpi=pmix", "--exact"],
            'write launch={"srun_extra": {"mpi": "pmix", "exact": True}}',
        ),
        ("slurm_exclusive", True, 'write resources={"extra": {"exclusive": True}}'),
        ("visible_gpus", (0, 2), 'write launch={"env": {"CUDA_VISIBLE_DEVICES": "0,2"}}'),
        ("folder", "logs", 'write run_dir="logs"'),
        ("stderr_to_stdout", True, "omit stderr_to_stdout: the log of a rank contains both output streams"),
        ("slurm_use_srun", False, "omit slurm_use_srun: each rank is a separate process"),
        ("slurm_setup", None, "write setup=None"),
        ("steps", 3, None),
    ],
)
def test_what_to_write_for_a_parameter_of_submitit(name: str, value: object, hint: str | None) -> None:
    assert meant_of_submitit(name, value) == hint
