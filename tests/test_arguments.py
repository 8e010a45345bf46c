"""Tests which keyword arguments go to a function, its call, and submitit's names."""

from __future__ import annotations

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
CASES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    # Each case is a function, its arguments, options, and the error, which is empty for an accepted call.
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
    (without_gradients, (1,), {"lr": 2}, "`functools.partial(without_gradients, lr=2)` passes the argument"),
    (injected, (), {"seed": 3}, "seed: is a parameter of injected"),
    (torch.nn.Linear(1, 1), (1,), {"seed": 3}, "seed: has no effect on the run of a function"),
    # The name of a run is also a parameter's name, until that parameter has a value.
    (
        named,
        (1,),
        {"name": "x"},
        "`functools.partial(named, name='x')` passes the argument to the function; then",
    ),
    (named, (1, "b"), {"name": "x"}, ""),
    (PARTIAL(named, name="b"), (1,), {"name": "x"}, ""),
    (configured, (), {"config": "quickstart"}, "config: is a parameter of configured"),
    (configured, ("mine",), {"config": "quickstart"}, ""),
    (configured, (), {"run_dir": "x"}, ""),
    # A function that accepts any name gets no argument whose name has an effect on the run.
    (any_name, (), {"seed": 3}, "seed: has no effect on the run of a function"),
    (
        any_name,
        (),
        {"lr": 3},
        "lr: unknown argument\n\nhint: `functools.partial(any_name, lr=3)` passes the argument",
    ),
    (any_name, (), {"nodes": 1, "name": "x", "tags": ["a"], "launch": {"env": {"A": "1"}}}, ""),
    (any_name, (), {"timeout_min": 60}, 'hint: write time="01:00:00"'),
    (time.sleep, (1,), {"seed": 3}, "`functools.partial(sleep, seed=3)`"),
    (os._exit, (1,), {}, ""),
    (print, (1,), {"sep": ""}, "sep: is a parameter of print"),
    # The name is misspelt.
    (seeded, (), {"sead": 3}, "did you mean `functools.partial(seeded, seed=3)`?"),
    (seeded, (), {"nodez": 3}, "did you mean nodes?"),
    (seeded, (), {"lr": 3}, "lr=3: lr: unknown argument\n\nhint: `trainkit schema` prints every key"),
    (seeded, (), {"gpus_per_node": 0}, 'each node runs at least one rank\n\nhint: write device="cpu"'),
    # The number of arguments is wrong.
    (
        named,
        (),
        {},
        "named cannot be called as named(): missing a required argument: 'x'\n\n"
        "hint: its signature is named(x, name='a'); `functools.partial(named, x=…)` passes keyword",
    ),
    (named, (1, 2, 3), {}, "named cannot be called as named(1, 2, 3): too many positional arguments"),
    (
        PARTIAL(named, 1, y=2),
        (),
        {},
        "got an unexpected keyword argument 'y'\n\nhint: its signature is named(x, name='a')",
    ),
    (PARTIAL(named, 1), (2, 3), {}, "named(1, 2, 3): too many"),
    (Callables(), (), {}, "`functools.partial(Callables, seed=…)` passes keyword arguments"),
    (without_gradients, (1, 2), {}, ""),
    (injected, (), {}, ""),
    (
        placed,
        (),
        {"seed": 3},
        "missing a required argument: 'seed'\n\nhint: its signature is placed(seed, /)",
    ),
    (coroutine, (), {}, "coroutine is a coroutine function: calling it would not run its body"),
    (generator, (), {}, "hint: submit a function that runs it: `lambda: list(generator(…))`"),
    (AsyncCallable(), (), {}, "AsyncCallable is a coroutine function"),
    (AsyncCallable, (), {}, ""),  # the call makes a coroutine
    (AsyncCallable().method, (), {}, "`lambda: asyncio.run(AsyncCallable.method(…))`"),
    (PARTIAL(coroutine), (), {}, "coroutine is a coroutine function"),
    (lambda: (yield), (), {}, "<lambda> is a generator function"),
    # Everything callable is accepted.
    (Made, (1,), {}, ""),
    (Made, (), {}, "hint: its signature is Made(size, *sizes, scale=1.0); `functools.partial(Made, size=…)`"),
    (Made, (1, 2, 3), {}, ""),
    (Made, (1,), {"scale": 2}, "scale: is a parameter of Made"),
    (Callables.method, (1,), {}, "missing a required argument: 'seed'"),
    (keywords, (), {}, "`functools.partial(keywords, a=…, b=…)` passes keyword arguments"),
    (PARTIAL(keywords, a=1, b=2), (), {}, ""),
    (
        PARTIAL(keywords, a=1, bb=2),
        (),
        {},
        "argument: 'b'\n\nhint: did you mean b? its signature is keywords(",
    ),
    (PARTIAL(seeded, 1, seed=2), (), {}, "multiple values for argument 'seed'"),
    (PARTIAL(print, 1, sep=""), (), {}, ""),
    (len, (), {}, "len cannot be called as len(): missing a required argument: 'obj'"),
    (max, (1, 2), {}, ""),
    (dict, (1, 2, 3), {}, ""),  # dict has no signature
    ("{}".format, (1,), {}, ""),
    (
        secretive,
        ("hf_" + "a" * 20, 2),
        {},
        "secretive('***', 2): too many positional arguments\n\nhint: its signature is secretive(key='***'",
    ),
    (PARTIAL(nothing, api_token="hunter22"), (), {}, "nothing(api_token='***'): got an unexpected"),
    (nothing, (list(range(10**4)),), {}, "14, 15, 16, …): too many"),
    (nothing, (math.nan, "ü" * 3), {}, "nothing(nan, 'üüü'): too many positional arguments"),
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


def submits(*args: Any, **options: Any) -> Callable[[], object]:
    return lambda: api.submit(*args, **options)


def sweeps(*args: Any, **options: Any) -> Callable[[], object]:
    return lambda: api.sweep(*args, **options)


def maps(*args: Any, **options: Any) -> Callable[[], object]:
    return lambda: api.map_array(*args, **options)


LIST = "pass a list: command="
OTHERS: list[tuple[Callable[[], object], str]] = [
    # The same rules apply to the calls of a group.
    (sweeps(seeded, {"seed": [1, 2]}, name="x"), ""),
    (sweeps(seeded, {"seed": [1, 2]}, seed=4), "seed=4: seed: is a parameter of seeded"),
    (sweeps(named, {"x": [1, 2]}, name="z"), "name: is a parameter of named"),
    (sweeps(seeded, {"lr": [1, 2]}), "seeded(lr=1): got an unexpected keyword argument 'lr'"),
    (sweeps(seeded, {"sed": [1, 2]}), "hint: did you mean seed? its signature is seeded(seed=1)"),
    (sweeps(named, {"name": ["a"]}), "`functools.partial(named, x=…)` passes keyword arguments"),
    (maps(seeded, [1, 2], seed=4), "seed=4: seed: is a parameter of seeded"),
    (maps(named, [1, 2], ["a", "b"], name="x"), ""),
    (maps(limited, [1], limit=1), ""),
    (sweeps(limited, {}, limit=4), "limit=4: limit: is a parameter of limited"),
    (maps(seeded, [1], [2]), "seeded(1, 2): too many positional arguments"),
    (maps(named, [[], [1]]), ""),
    (maps(keywords, [1]), "keywords(1): too many positional arguments"),
    (maps("quickstart", [1]), "'quickstart' is not a function"),
    (maps(seeded, [], seed=4), "seed=4: seed: is a parameter of seeded"),
    (maps(seeded, 5), "5 is a single value, not a list\n\nhint: pass a list"),
    (maps(seeded, itertools.count()), "more than 100,000 runs"),
    (maps(coroutine, [1]), "coroutine is a coroutine function"),
    # These are the values of a sweep.
    (
        sweeps(seeded, {"seed": 5}),
        "the values of seed are 5, which is a single value\n\nhint: pass a list: {'seed': [5]}",
    ),
    (sweeps(seeded, {"seed": "12"}), "pass a list: {'seed': ['12']}"),
    (sweeps(seeded, {"seed": {1: 2}}), "pass a list: {'seed': [{1: 2}]}"),
    (sweeps(seeded, {"seed": []}), "seed has no values"),
    (sweeps(seeded, {"seed": itertools.count()}), "more than 100,000 runs"),
    (sweeps(seeded, {"seed": range(400), "other": range(400)}), "more than 100,000 runs"),
    (sweeps(seeded, {5: [1]}), "5 is not a key"),
    (sweeps(seeded, [("seed", [1])]), "has no keys\n\nhint: pass a mapping"),
    (
        sweeps("quickstart", {"optimizer.lrr": [1]}),
        "sweep of optimizer.lrr: unknown key optimizer.lrr\n\nhint: did you",
    ),
    (
        sweeps("quickstart", {"name": ["a", "b"]}),
        "name cannot be swept: all trials share the name of their group",
    ),
    (sweeps("quickstart", {"seed": [1, 2, 1]}), "1 appears twice"),
    (sweeps("quickstart", {"seed": [object]}), "seed cannot be <class 'object'>"),
    (sweeps("quickstart", {"train.steps": ["many"]}), "must be a whole number"),
    (sweeps("quickstart", {"seed": [1]}, command=["true"]), "only `submit` accepts it;"),
    (
        sweeps("quickstart", {"seed": [1]}, now=True),
        "omit it: the runs of a group always share the free resources",
    ),
    (sweeps("quickstart", {"seed": [1]}, limit=0), "limit=0 is not a valid number of runs"),
    (maps(seeded, [1], limit=-1), "limit=-1 is not a valid number of runs"),
    (maps(seeded, [1], limit=True), "limit=True is not a valid number of runs"),
    (maps(seeded, [1], limit=2.0), "limit=2.0 is not a valid number of runs"),
    (maps(seeded, [1], limit="2"), "limit='2' is not a valid number of runs"),
    (submits(seeded, limit=2), "only `map_array` and `sweep` accept it"),
    # The command is a text instead of a list.
    (submits(command="python train.py"), f"{LIST}['python', 'train.py']"),
    (submits(command="python train.py --name 'a b'"), f"{LIST}['python', 'train.py', '--name', 'a b']"),
    (submits(command="python 'train.py"), 'command="python \'train.py": No closing quotation'),
    (submits(command=""), f"{LIST}[]"),
    (submits(command=b"true"), "command=b'true' is not a list of words"),
    (submits(command={"true"}), "command={'true'} is not a list of words"),
    (submits(command=Path("train.sh")), "is not a list of words"),
    (submits(command=["true", None]), "command contains None, which is not a word"),
    (submits(command=[["true"]]), "command contains ['true'], which is not a word"),
    (submits(command=["true", True]), "command contains True, which is not a word"),
    (submits(command=["true", b"x"]), "command contains b'x', which is not a word"),
    (submits(command=["true", 0.1, 2, Path("a"), numpy.int64(3), numpy.float32(0.5)]), ""),
    (submits(command=["python", "a.py"], launcher="torchrun"), "omit the interpreter: command=['a.py']"),
    (submits(command=["python3.11"], launcher="accelerate"), "omit the interpreter: command=['train.py']"),
    (submits(command=["/usr/bin/python3", "a.py"], launcher="torchrun"), ""),
    (
        submits(command=["train.py"], launcher="torchrum"),
        "did you mean torchrun? launchers are python, torchrun",
    ),
    (submits(command=["train.py"], launcher=None), "launcher=None is unknown"),
    # These options would have no effect.
    (submits("quickstart", launcher="torchrun"), "launcher='torchrun' has no effect on a config"),
    (submits(seeded, launcher="torchrun"), "launcher='torchrun' has no effect on a function"),
    (submits("quickstart", config="other"), "two configs are given"),
    (
        submits("quickstart", nodes=2, resources={"nodes": 4}),
        "resources={'nodes': 4}: resources.nodes: is also given by nodes\n\nhint: give it once",
    ),
    (submits("quickstart", train={"steps": 1}, **{"train.steps": 1}), "train.steps: is also given by train"),
    (
        submits(seeded, 1, time="1:00:00", **{"resources.time": "2:00:00"}),
        "resources.time: is also given by time",
    ),
    (submits("quickstart", train={"steps": 1}, **{"train.log_every": 1}), ""),
    (submits({"train": {"steps": 3}}, train={"steps": 1}), ""),
    (sweeps("quickstart", {"seed": [1, 2]}, seed=5), "seed is given both as an option and in the values"),
    (
        sweeps("quickstart", {"train.steps": [1]}, train={"steps": 5}),
        "train.steps is given both as an option and in the values",
    ),
    (submits("quickstart", command=["true"]), "both a config and a command are given"),
    (submits({"seed": 1}, command=["true"]), "config={'seed': 1} sets the config of a command"),
    (submits(seeded, command=["true"]), "both a function and a command are given"),
    (submits(config="quickstart"), "there is nothing to run"),
    (submits(launcher="torchrun"), "there is nothing to run"),
    (submits("quickstart", 1), "1 argument, but no function to pass it to"),
    (submits("quickstart", 1, 2), "2 arguments, but no function to pass it to"),
    (submits(["python", "a.py"]), "to run a program, use command=['python', 'a.py']"),
    (submits("quickstart", run_dir=""), "run_dir cannot be ''\n\nhint: give one, or omit run_dir"),
    (submits("quickstart", run_dir=5), "run_dir cannot be 5"),
    (submits(seeded, profile=5), "profile cannot be 5"),
    (submits(""), "the config is empty"),
    (submits(seeded, config=" "), "the config is empty"),
    (submits("train.py"), "train.py is a script, not a config\n\nhint: write command=['python', 'train.py']"),
    (submits("python train.py"), "hint: write command=['python', 'train.py']"),
    (submits(seeded, config=Path("a/run.sh")), "hint: write command=['bash', 'a/run.sh']"),
    (submits(seeded, after=5), "after contains 5, which is not a run"),
    (submits(seeded, after=[None]), "after contains None, which is not a run"),
    (submits(5), "a config cannot be 5"),
    (submits(None), "there is nothing to run"),
    (submits(function=seeded), "pass a config or a function as the first argument"),
    (lambda: next(api.as_completed("abc")), "'a' is not a run\n\nhint: pass a group, or a list of runs"),  # type: ignore[arg-type]
    (lambda: next(api.as_completed(None)), "None is not a run"),  # type: ignore[arg-type]
    (submits(seeded, after="x"), ""),
]


@pytest.mark.parametrize(("start", "message"), OTHERS, ids=[text[:40] for _, text in OTHERS])
def test_what_is_refused_of_other_arguments(
    start: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_loaded", accept)
    with pytest.raises(UsageError if message else Accepted) as error:
        start()
    if isinstance(error.value, UsageError):
        assert message in error.value.render()
        assert error.value.hint
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
        (
            "stderr_to_stdout",
            True,
            "omit stderr_to_stdout: the log of a rank contains both output streams",
        ),
        ("slurm_use_srun", False, "omit slurm_use_srun: each rank is a separate process"),
        ("slurm_setup", None, "write setup=None"),
        ("steps", 3, None),
    ],
)
def test_what_to_write_for_a_parameter_of_submitit(name: str, value: object, hint: str | None) -> None:
    assert meant_of_submitit(name, value) == hint
