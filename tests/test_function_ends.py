"""Tests the possible ends of a run's function, and its result, status and failure record."""

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tests.support.runs import runs_from
from tests.test_api import LIMIT_S
from trainkit import RunError, api
from trainkit.run.files import read_object
from trainkit.run.rundir import RunDir

pytestmark = pytest.mark.xdist_group("ends")  # the tests share the runs of the fixture
TWO = {"gpus_per_node": 2, "requeue": {"max_crashes": 0}}
ONCE = {"requeue": {"max_crashes": 0}}
call = functools.partial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder of all runs of this module."""
    path = tmp_path_factory.mktemp("ends")
    with runs_from(path):
        yield path


def key_error() -> None:
    {"a": 1}["b"]


def exit_with(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def one_leaves(code: int, rank: str) -> str:
    if os.environ["RANK"] == rank:
        os._exit(code)
    return "returned"


def interrupt() -> None:
    raise KeyboardInterrupt


def kill(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def refuse_connection() -> None:
    raise ConnectionResetError("by the peer")


def nccl() -> None:
    raise RuntimeError("NCCL error in ProcessGroupNCCL.cpp: unhandled system error")


def returned(make: Callable[[], Any]) -> Any:
    return make()


def in_a_module_of_the_job(what: str) -> Any:
    """Raise or return an instance of a class that the caller cannot import."""
    Path("only_in_the_job.py").write_text("class Odd(Exception):\n    pass\n")
    sys.path.insert(0, str(Path.cwd()))
    odd = importlib.import_module("only_in_the_job").Odd
    if what == "raised":
        raise odd("of the job")
    return odd("of the job")


def group() -> None:
    raise ExceptionGroup("two", [ValueError("one"), TypeError("other")])  # noqa: F821


ENDS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str, tuple[str, bool]]] = {
    # Maps a case to (function, options, what result() raises, its text, (type of the failure, is it final)).
    "an exception": (key_error, {}, KeyError, "b", ("KeyError", True)),
    "a group of exceptions": (group, {}, Exception, "two", ("ExceptionGroup", True)),
    "an exception of a module that is not here": (
        call(in_a_module_of_the_job, "raised"),
        {},
        RunError,
        r"Traceback [^$]*only_in_the_job.Odd: of the job",
        ("Odd", True),
    ),
    "a value of a module that is not here": (
        call(in_a_module_of_the_job, "returned"),
        {},
        RunError,
        "the result of rank 0 of .* cannot be loaded in this process: ModuleNotFoundError: .*only_in_the_job",
        ("", False),
    ),
    "sys.exit with a text": (
        call(exit_with, "no GPU here"),
        {},
        RunError,
        "SystemExit: no GPU here",
        ("SystemExit", True),
    ),
    "sys.exit(3)": (call(exit_with, 3), {}, RunError, "SystemExit: 3", ("SystemExit", True)),
    "sys.exit(78)": (call(exit_with, 78), {}, RunError, "a restart would not help", ("exit", False)),
    "os._exit(0)": (
        call(one_leaves, 0, "0"),
        {},
        RunError,
        "rank 0 of .*/runs/.* wrote no result",
        ("NoResult", True),
    ),
    "os._exit(0) of another rank": (
        call(one_leaves, 0, "1"),
        TWO,
        RunError,
        "rank 1 of .*/runs/.* wrote no result",
        ("NoResult", True),
    ),
    "os._exit(5)": (call(one_leaves, 5, "0"), ONCE, RunError, "exit code 5", ("exit", False)),
    "KeyboardInterrupt": (interrupt, {}, RunError, "KeyboardInterrupt", ("KeyboardInterrupt", True)),
    "SIGKILL": (call(kill, signal.SIGKILL), ONCE, RunError, "SIGKILL", ("exit", False)),
    "os.abort": (os.abort, ONCE, RunError, "SIGABRT", ("exit", False)),
    "a lost connection": (
        refuse_connection,
        ONCE,
        ConnectionResetError,
        "peer",
        ("ConnectionResetError", False),
    ),
    "an error of NCCL": (nccl, ONCE, RuntimeError, "NCCL", ("RuntimeError", False)),
    "a generator": (
        call(returned, lambda: (n for n in range(3))),
        {},
        TypeError,
        "the function returned a generator, which cannot be pickled; return plain values or a list",
        ("TypeError", True),
    ),
}


@pytest.fixture(scope="module")
def started(folder: Path) -> dict[str, api.Run]:
    """Start all runs at once."""
    return {
        name: api.submit(function, name=f"end-{number}", device="cpu", now=True, **options)
        for number, (name, (function, options, *_)) in enumerate(ENDS.items())
    }


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", ENDS)
def test_an_end(started: dict[str, api.Run], name: str) -> None:
    _, _, kind, text, (failure, final) = ENDS[name]
    run = started[name]
    with pytest.raises(kind, match=text) as error:
        run.result(LIMIT_S)
    assert isinstance(run.exception(), type(error.value))
    assert RunDir(run.path).attempt_numbers() == [1]
    record = read_object(run.path / "attempts/001/errors/rank-0000.json")
    record = record or read_object(run.path / "attempts/001/errors/rank-0001.json")
    assert (record.get("type", ""), record.get("final") or False) == (failure, final)
    status = run.status
    assert status.state == ("failed" if failure else "finished")
    if final and failure != "NoResult":
        assert record["traceback"].startswith("Traceback") or "Exception Group" in record["traceback"]
        assert status.failure is not None
        assert (status.failure.type, status.failure.message) == (record["type"], record["message"])


class Callables:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, x: int) -> int:
        return self.number * x

    def method(self, x: int) -> int:
        return self.number * x

    @classmethod
    def of_class(cls, x: int) -> int:
        return cls(3).number * x

    @staticmethod
    def static(x: int) -> int:
        return 3 * x


@functools.lru_cache
def cached(x: int) -> int:
    return 3 * x


@torch.no_grad()
def without_gradients(x: int) -> tuple[int, bool]:
    return 3 * x, torch.is_grad_enabled()


def closures() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Return functions of all kinds, with their values for 14."""
    factor = 3

    class Local:
        def __call__(self, x: int) -> int:
            return factor * x

    return {
        "a lambda": (lambda x: factor * x, 42),
        "a function in a function": (functools.partial(lambda y, x: y * x, factor), 42),
        "an object of a class in a function": (Local(), 42),
        "a method": (Callables(3).method, 42),
        "a method of a class": (Callables.of_class, 42),
        "a static method": (Callables.static, 42),
        "an object": (Callables(3), 42),
        "a function with a cache": (cached, 42),
        "a function without gradients": (without_gradients, (42, False)),
        "a builtin": (abs, 14),
        "None": (lambda x: None, None),
        "a tensor": (lambda x: torch.ones(2) * x, torch.ones(2) * 14),
        "64 MB": (lambda x: b"x" * 64_000_000, b"x" * 64_000_000),
        "sys.exit(None)": (lambda x: sys.exit(None), None),
        "sys.exit(0)": (lambda x: sys.exit(0), None),
        "an exception that is returned": (lambda x: repr(KeyError(x)), "KeyError(14)"),
    }


@pytest.fixture(scope="module")
def values(folder: Path) -> dict[str, api.Run]:
    """Start a run of each function at once."""
    return {
        name: api.submit(function, 14, name=f"value-{number}", device="cpu", now=True)
        for number, (name, (function, _)) in enumerate(closures().items())
    }


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", closures())
def test_a_value(values: dict[str, api.Run], name: str) -> None:
    value, expected = values[name].result(LIMIT_S), closures()[name][1]
    assert type(value) is type(expected)
    assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected


MAIN = """
import sys
import trainkit

factor = 3

class Odd(Exception):
    pass

def times(x):
    if x < 0:
        raise Odd(x)
    return factor * x

if __name__ == "__main__":
    good = trainkit.submit(times, 14, device="cpu", now=True)
    bad = trainkit.submit(times, -1, device="cpu", now=True)
    print(good.result(100), type(bad.exception(100)) is Odd)
"""


@pytest.mark.slow(seconds=5)
def test_a_function_of_a_script(folder: Path) -> None:
    (folder / "main.py").write_text(MAIN)
    done = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "42 True\n", done.stderr


@pytest.mark.slow(seconds=5)
def test_a_rank_that_does_not_exist(started: dict[str, api.Run]) -> None:
    run = started["os._exit(0) of another rank"].wait(LIMIT_S)
    assert run.logs(1) == ""
    with pytest.raises(trainkit.UsageError, match="has no rank 2") as error:
        run.logs(2)
    assert error.value.hint == "there are 0 to 1"
    with pytest.raises(trainkit.UsageError, match="has no rank -1"):
        run.logs(-1)
    found = command("diagnose", str(run.path)).stdout
    assert "rank 1 on" in found
    assert "exited with code 0 before its function returned" in found
    shown = command("logs", str(run.path), "--rank", "2")
    assert (shown.returncode, "has no rank 2" in shown.stderr) == (2, True)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "trainkit", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
