"""How the function of a run can end, and what its result, status and failure record say of it."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.test_api import LIMIT_S, ROOT
from trainkit import api
from trainkit.run.files import read_object
from trainkit.run.rundir import RunDir

pytestmark = pytest.mark.xdist_group("ends")  # they share what the fixture starts
TWO = {"gpus_per_node": 2, "requeue": {"max_crashes": 0}}
ONCE = {"requeue": {"max_crashes": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all runs of this module."""
    path = tmp_path_factory.mktemp("ends")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("PYTHONPATH", str(ROOT))
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
    """An exception or a value whose class the caller cannot import."""
    Path("only_in_the_job.py").write_text("class Odd(Exception):\n    pass\n")
    sys.path.insert(0, str(Path.cwd()))
    odd = importlib.import_module("only_in_the_job").Odd
    if what == "raised":
        raise odd("of the job")
    return odd("of the job")


def group() -> None:
    raise ExceptionGroup("two", [ValueError("one"), TypeError("other")])  # noqa: F821


class Held(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def hold() -> None:
    raise Held


ENDS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str, tuple[str, bool]]] = {
    # what it does: (function, options, what result() raises, its text, (type of the failure, is it final))
    "an exception": (key_error, {}, KeyError, "b", ("KeyError", True)),
    "a group of exceptions": (group, {}, Exception, "two", ("ExceptionGroup", True)),
    "an exception with a lock": (hold, {}, trainkit.RunError, "Held: holds a lock", ("Held", True)),
    "an exception of a module that is not here": (
        functools.partial(in_a_module_of_the_job, "raised"),
        {},
        trainkit.RunError,
        r"Traceback [^$]*only_in_the_job.Odd: of the job",
        ("Odd", True),
    ),
    "a value of a module that is not here": (
        functools.partial(in_a_module_of_the_job, "returned"),
        {},
        trainkit.RunError,
        "the result of rank 0 of .* cannot be loaded here: ModuleNotFoundError: .*only_in_the_job",
        ("", False),
    ),
    "sys.exit with a text": (
        functools.partial(exit_with, "no GPU here"),
        {},
        trainkit.RunError,
        "SystemExit: no GPU here",
        ("SystemExit", True),
    ),
    "sys.exit(3)": (
        functools.partial(exit_with, 3),
        {},
        trainkit.RunError,
        "SystemExit: 3",
        ("SystemExit", True),
    ),
    "sys.exit(78)": (
        functools.partial(exit_with, 78),
        {},
        trainkit.RunError,
        "a restart cannot help",
        ("exit", False),
    ),
    "os._exit(0)": (
        functools.partial(one_leaves, 0, "0"),
        {},
        trainkit.RunError,
        "rank 0 of .*/runs/.* left no result",
        ("NoResult", True),
    ),
    "os._exit(0) of another rank": (
        functools.partial(one_leaves, 0, "1"),
        TWO,
        trainkit.RunError,
        "rank 1 of .*/runs/.* left no result",
        ("NoResult", True),
    ),
    "os._exit(5)": (
        functools.partial(one_leaves, 5, "0"),
        ONCE,
        trainkit.RunError,
        "exit code 5",
        ("exit", False),
    ),
    "KeyboardInterrupt": (
        interrupt,
        {},
        trainkit.RunError,
        "KeyboardInterrupt",
        ("KeyboardInterrupt", True),
    ),
    "SIGKILL": (
        functools.partial(kill, signal.SIGKILL),
        ONCE,
        trainkit.RunError,
        "SIGKILL",
        ("exit", False),
    ),
    "os.abort": (os.abort, ONCE, trainkit.RunError, "SIGABRT", ("exit", False)),
    "a lost connection": (
        refuse_connection,
        ONCE,
        ConnectionResetError,
        "peer",
        ("ConnectionResetError", False),
    ),
    "an error of NCCL": (nccl, ONCE, RuntimeError, "NCCL", ("RuntimeError", False)),
    "a generator": (
        functools.partial(returned, lambda: (n for n in range(3))),
        {},
        TypeError,
        "the function returned a generator, which cannot be pickled: return plain values or a list",
        ("TypeError", True),
    ),
    "a lock": (
        functools.partial(returned, threading.Lock),
        {},
        TypeError,
        "returned a lock, which cannot be pickled",
        ("TypeError", True),
    ),
}


@pytest.fixture(scope="module")
def started(folder: Path) -> dict[str, api.Run]:
    """All runs, started at once."""
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
