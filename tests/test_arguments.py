"""Which keyword arguments are meant for a function, what it is called with, and submitit's names."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit import api
from trainkit.arguments import Arguments, meant_of_submitit
from trainkit.errors import UsageError
from trainkit.function import Call


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
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
    """A decorator that gives the function its first argument, as Hydra's does."""

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


class Accepted(Exception):
    """Raised in place of planning the run."""


def accept(given: object) -> None:
    raise Accepted


PARTIAL = functools.partial
CASES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    # function, arguments, options, the error; empty where the call is accepted
    (
        seeded,
        (),
        {"seed": 3},
        "seed=3: seed: is a parameter of seeded\n\nhint: `functools.partial(seeded, seed=3)`",
    ),
    (seeded, (1,), {"seed": 3}, "seed: is a parameter of seeded"),
    (PARTIAL(seeded, seed=2), (), {"seed": 3}, "seed: is a parameter of seeded"),
    (PARTIAL(PARTIAL(seeded)), (), {"seed": 3}, "seed: is a parameter of seeded"),
    (Callables(), (), {"seed": 3}, "seed: is a parameter of Callables"),
    (Callables().method, (), {"seed": 3}, "seed: is a parameter of Callables.method"),
    (Callables.of_class, (), {"seed": 3}, "seed: is a parameter of"),
    (Callables.static, (), {"seed": 3}, "seed: is a parameter of"),
    (lambda train: None, (), {"train": {"steps": 3}}, "`functools.partial(function, train={'steps': 3})`"),
    (without_gradients, (1,), {"lr": 2}, "`functools.partial(without_gradients, lr=2)` gives it"),
    (injected, (), {"seed": 3}, "seed: is a parameter of injected"),
    (torch.nn.Linear(1, 1), (1,), {"seed": 3}, "seed: has no effect on the run of a function"),
    # The name of a run is one of a parameter too, until that has a value.
    (
        named,
        (1,),
        {"name": "x"},
        "`functools.partial(named, name='x')` gives it to the function; once it has",
    ),
    (named, (1, "b"), {"name": "x"}, ""),
    (PARTIAL(named, name="b"), (1,), {"name": "x"}, ""),
    (configured, (), {"config": "quickstart"}, "config: is a parameter of configured"),
    (configured, ("mine",), {"config": "quickstart"}, ""),
    (configured, (), {"run_dir": "x"}, ""),
    # What takes any name gets none that has an effect on the run.
    (any_name, (), {"seed": 3}, "seed: has no effect on the run of a function"),
    (any_name, (), {"lr": 3}, "lr: unknown argument\n\nhint: `functools.partial(any_name, lr=3)` gives it"),
    (any_name, (), {"nodes": 1, "name": "x", "tags": ["a"], "launch": {"env": {"A": "1"}}}, ""),
    (any_name, (), {"timeout_min": 60}, 'hint: write time="01:00:00"'),
    (time.sleep, (1,), {"seed": 3}, "`functools.partial(sleep, seed=3)`"),
    (os._exit, (1,), {}, ""),
    (print, (1,), {"sep": ""}, "sep: is a parameter of print"),
    # Typed wrongly.
    (seeded, (), {"sead": 3}, "did you mean `functools.partial(seeded, seed=3)`?"),
    (seeded, (), {"nodez": 3}, "did you mean nodes?"),
    (seeded, (), {"lr": 3}, "lr=3: lr: unknown argument\n\nhint: `trainkit schema` prints every key"),
    (seeded, (), {"gpus_per_node": 0}, 'a node has at least one rank\n\nhint: write device="cpu"'),
    # The number of arguments.
    (
        named,
        (),
        {},
        "named cannot be called as named(): missing a required argument: 'x'\n\nhint: `functools.partial(",
    ),
    (named, (1, 2, 3), {}, "named cannot be called as named(1, 2, 3): too many positional arguments"),
    (
        PARTIAL(named, 1, y=2),
        (),
        {},
        "got an unexpected keyword argument 'y'\n\nhint: it has the parameters x, name",
    ),
    (PARTIAL(named, 1), (2, 3), {}, "named(1, 2, 3): too many"),
    (Callables(), (), {}, "`functools.partial(Callables, seed=…)` gives it keyword arguments"),
    (without_gradients, (1, 2), {}, ""),
    (injected, (), {}, ""),
    (placed, (), {"seed": 3}, "missing a required argument: 'seed'\n\nhint: it has the parameters seed"),
    (coroutine, (), {}, "coroutine is a coroutine function: a rank would call it without running it"),
    (generator, (), {}, "hint: submit a function that does: `lambda: list(generator(…))`"),
]


@pytest.mark.parametrize(("function", "args", "options", "message"), CASES)
def test_what_is_meant_for_a_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "_loaded", accept)
    with pytest.raises(UsageError if message else Accepted) as error:
        api.submit(function, *args, **options)
    if isinstance(error.value, UsageError):
        assert message in error.value.render()
    assert not Path("runs").exists()


def test_a_sweep_and_an_array_have_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_loaded", accept)
    for start, message in [
        (lambda: api.sweep(seeded, {"seed": [1, 2]}, name="x"), ""),
        (lambda: api.sweep(seeded, {"seed": [1, 2]}, seed=4), "seed=4: seed: is a parameter of seeded"),
        (lambda: api.sweep(named, {"x": [1, 2]}, name="z"), "name: is a parameter of named"),
        (lambda: api.sweep(seeded, {"lr": [1, 2]}), "seeded(lr=1): got an unexpected keyword argument 'lr'"),
        (lambda: api.map_array(seeded, [1, 2], seed=4), "seed=4: seed: is a parameter of seeded"),
        (lambda: api.map_array(named, [1, 2], ["a", "b"], name="x"), ""),
        (lambda: api.map_array(limited, [1], limit=1), ""),
        (lambda: api.sweep(limited, {}, limit=4), "limit=4: limit: is a parameter of limited"),
        (lambda: api.map_array(seeded, [1], [2]), "seeded(1, 2): too many positional arguments"),
        (lambda: api.map_array("quickstart", [1]), "'quickstart' is no function"),  # type: ignore[arg-type]
        (lambda: api.map_array(seeded, [], seed=4), "seed=4: seed: is a parameter of seeded"),
        (lambda: api.submit(command="python train.py"), "write a list: command=['python', 'train.py']"),
    ]:
        with pytest.raises(UsageError if message else Accepted) as error:
            start()
        if isinstance(error.value, UsageError):
            assert message in error.value.render()


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
        ("stderr_to_stdout", True, "leave out stderr_to_stdout: the log of a rank has both"),
        ("slurm_use_srun", False, "leave out slurm_use_srun: each rank is a process of its own"),
        ("slurm_setup", None, "write setup=None"),
        ("steps", 3, None),
    ],
)
def test_what_to_write_for_a_parameter_of_submitit(name: str, value: object, hint: str | None) -> None:
    assert meant_of_submitit(name, value) == hint
