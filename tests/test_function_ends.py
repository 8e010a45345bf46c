"""Tests the possible ends of a run's function, and its result, status and failure record."""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tests.support.runs import runs_from
from tests.test_api import LIMIT_S, ended_run
from trainkit import RunError, api, function
from trainkit.cli.main import main
from trainkit.function import CALL_FILE, Call, dumps, read_pickle
from trainkit.run.files import read_object, write_atomic
from trainkit.run.rundir import AttemptDir, RunDir

pytestmark = pytest.mark.xdist_group("ends")  # the tests share the runs of the fixture
call = functools.partial


def called(folder: Path, function_: Callable[..., Any], *args: Any) -> AttemptDir:
    """Call a function in this process as the only rank of a run."""
    attempt = RunDir(ended_run(folder, state="failed").path).attempt(1)
    write_atomic(attempt.run.path / CALL_FILE, dumps(Call(function_, args)))
    environ = {"RUN_DIR": str(attempt.run.path), "ATTEMPT": "1", "DONE_FILE": str(folder / "done")}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        for name, value in {**{f"TRAINKIT_JOB_{key}": environ[key] for key in environ}, **ranks}.items():
            patch.setenv(name, value)
        function.main()
    return attempt


def exit_with(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


class Unpicklable(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def raised(error: BaseException) -> None:
    raise error


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


ODD = call(in_a_module_of_the_job, "raised")
RESET = ConnectionResetError("by the peer")
NCCL = RuntimeError("NCCL error in ProcessGroupNCCL.cpp: unhandled system error")
ENDS: list[tuple[Callable[[], Any], type[Exception], str, str]] = [
    # Each row is a function, what result() raises, its text, and the type of the failure.
    (group, Exception, "two", "ExceptionGroup"),
    (ODD, RunError, r"Traceback [^$]*only_in_the_job.Odd: of the job", "Odd"),
    (call(exit_with, "no GPU here"), RunError, "SystemExit: no GPU here", "SystemExit"),
    (call(exit_with, 3), RunError, "SystemExit: 3", "SystemExit"),
    (call(raised, KeyboardInterrupt()), RunError, "KeyboardInterrupt", "KeyboardInterrupt"),
    (call(raised, RESET), ConnectionResetError, "peer", "ConnectionResetError"),
    (call(raised, NCCL), RuntimeError, "NCCL", "RuntimeError"),
    (call(raised, TimeoutError("of the function")), TimeoutError, "of the function", "TimeoutError"),
    (raise_unpicklable, RunError, "1 and 2", "Unpicklable"),
    (lambda: (n for n in range(3)), TypeError, "the function returned a generator", "TypeError"),
]
BY_CHANCE = (ConnectionResetError, RuntimeError, TimeoutError)
"""Exceptions in `ENDS` that may not occur again."""


@pytest.mark.parametrize(("function_", "kind", "text", "failure"), ENDS)
def test_an_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function_: Callable[[], Any],
    kind: type[Exception],
    text: str,
    failure: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Exception, SystemExit)):
        called(tmp_path, function_)
    sys.modules.pop("only_in_the_job", None)
    run = api.Run(tmp_path / "runs" / "made")
    with pytest.raises(kind, match=text):
        run.result()
    record = read_object(run.path / "attempts/001/errors/rank-0000.json")
    assert (record["type"], record["final"]) == (failure, kind not in BY_CHANCE)
    assert record["traceback"].startswith("Traceback") or "Exception Group" in record["traceback"]


def test_a_value_of_a_module_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    called(tmp_path, in_a_module_of_the_job, "returned")
    sys.modules.pop("only_in_the_job")
    with pytest.raises(RunError, match="cannot be loaded in this process: ModuleNotFoundError"):
        api.Run(tmp_path / "runs" / "made").result()


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_without_an_error_is_a_return(tmp_path: Path, code: object) -> None:
    attempt = called(tmp_path, exit_with, code)
    assert read_pickle(attempt.rank_result(0)).value is None
    assert (tmp_path / "done").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder of the runs of this module."""
    path = tmp_path_factory.mktemp("ends")
    with runs_from(path):
        yield path


def one_leaves(rank: str) -> str:
    if os.environ["RANK"] == rank:
        os._exit(0)
    return "returned"


def key_error() -> None:
    {"a": 1}["b"]


RUNS: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    # Maps a case to (function, what result() raises, its text, the type of the failure).
    "an exception": (key_error, KeyError, "b", "KeyError"),
    "sys.exit(78)": (call(exit_with, 78), RunError, "a restart would not help", "exit"),
    "another rank": (call(one_leaves, "1"), RunError, "rank 1 of .*/runs/.* wrote no result", "NoResult"),
}


@pytest.fixture(scope="module")
def started(folder: Path) -> dict[str, api.Run]:
    """Start all runs at once."""
    runs = {
        name: api.submit(row[0], name=f"end-{number}", device="cpu", gpus_per_node=1 + number // 2, now=True)
        for number, (name, row) in enumerate(RUNS.items())
    }
    functions = [function for function, _ in closures().values()]
    return {**runs, "values": api.submit(call_all, functions, name="values", device="cpu", now=True)}


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", RUNS)
def test_the_end_of_a_run(started: dict[str, api.Run], name: str) -> None:
    _, kind, text, failure = RUNS[name]
    run = started[name]
    with pytest.raises(kind, match=text):
        run.result(LIMIT_S)
    assert RunDir(run.path).attempt_numbers() == [1]
    rank = int(name == "another rank")
    record = read_object(run.path / f"attempts/001/errors/rank-000{rank}.json")
    assert (record["type"], record.get("final") or False) == (failure, failure != "exit")
    status = run.status
    assert status.state == "failed"
    if failure == "KeyError":
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
        "16 MB": (lambda x: b"x" * 16_000_000, b"x" * 16_000_000),
        "an exception that is returned": (lambda x: repr(KeyError(x)), "KeyError(14)"),
    }


def call_all(functions: list[Callable[[int], Any]]) -> list[Any]:
    return [function(14) for function in functions]


@pytest.mark.slow(seconds=5)
def test_values_of_all_kinds(started: dict[str, api.Run]) -> None:
    values = started["values"].result(LIMIT_S)
    for value, (name, (_, expected)) in zip(values, closures().items(), strict=True):
        assert type(value) is type(expected), name
        same = torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
        assert same, name


MAIN = """
import sys
import trainkit

factor = 3

class Odd(Exception):
    pass

def times(x):
    raise Odd(factor * x)

if __name__ == "__main__":
    error = trainkit.submit(times, 14, device="cpu", now=True).exception(100)
    print(error, type(error) is Odd)
"""


@pytest.mark.slow(seconds=5)
def test_a_function_of_a_script(folder: Path) -> None:
    (folder / "main.py").write_text(MAIN)
    done = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "42 True\n", done.stderr


@pytest.mark.slow(seconds=5)
def test_a_rank_that_does_not_exist(started: dict[str, api.Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = started["another rank"].wait(LIMIT_S)
    assert run.logs(1) == ""
    for rank in (2, -1):
        with pytest.raises(trainkit.UsageError, match=f"has no rank {rank}") as error:
            run.logs(rank)
    assert error.value.hint == "there are 0 to 1"
    assert main(["diagnose", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 1
    assert main(["logs", str(run.path), "--rank", "2"]) == 2
