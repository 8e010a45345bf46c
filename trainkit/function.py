"""Calls a Python function as a rank of a run: ``python -m trainkit.function``, in a run of `trainkit.submit`.

Call and results are cloudpickles that only their owner can read, and that nobody else's process loads.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

from trainkit.errors import EXIT_STOPPED
from trainkit.folders import ensure_folder
from trainkit.run.files import open_private, write_atomic
from trainkit.run.rundir import AttemptDir, RunDir

ARGV = (sys.executable, "-m", "trainkit.function")
CALL_FILE = "call.pkl"
CALLS_FOLDER = "calls"
"""In the folder of a group: the call of each run."""
POLL_S = 0.1
SUBMITIT_NAMES = {"GLOBALID": "RANK", "LOCALID": "LOCAL_RANK", "NODEID": "NODE_RANK", "NTASKS": "WORLD_SIZE"}
"""Variables by which ``submitit.JobEnvironment`` knows a rank, and those with their values."""


class Requeue:
    """What a callable's method `checkpoint` returns: the call with which the next attempt continues.

    It has the attributes of submitit's ``DelayedSubmission``, which may be returned too.
    """

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Result:
    """What the function of a rank returned or raised."""

    value: Any = None
    error: Exception | None = None
    """None too if it cannot be pickled."""
    traceback: str = ""
    """Empty if it returned."""


def dumps(value: Any) -> bytes:
    """The pickle of a value; functions that it contains keep the names of their files for tracebacks."""
    import cloudpickle

    def reduce(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
        make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)[:2]
        return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in args)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap({CodeType: reduce}, cloudpickle.Pickler.dispatch_table)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def read_pickle(path: Path) -> Any:
    """The value in a file of `dumps`; raises UsageError if another user could have written it."""
    with open_private(path) as stream:
        return pickle.load(stream)


def call_file(run: RunDir) -> Path:
    """The call of the next attempt of a run; it is in the group's folder until the run has saved another."""
    own = run.path / CALL_FILE
    return own if own.exists() else run.path.parent / CALLS_FOLDER / f"{run.path.name}.pkl"


def result_file(attempt: AttemptDir, rank: int) -> Path:
    """The result of a rank."""
    return attempt.path / "results" / f"rank-{rank:04d}.pkl"


@contextmanager
def by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle the module of a function with it within the block, unless the job can import the same module.

    It can where the module is in the current folder, of which the run has a copy, or is installed.
    """
    import cloudpickle

    named = getattr(function, "func", function)  # of a functools.partial
    module = sys.modules.get(getattr(named, "__module__", None) or type(named).__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        yield  # cloudpickle does so by itself, or it is built in
        return
    parts = module.__name__.split(".")
    here = Path(*parts)
    places = {here.with_suffix(".py"), here / "__init__.py"}
    is_here = any(Path(file) == Path.cwd() / place for place in places)
    is_installed = any(Path(file).is_relative_to(folder) for folder in (sys.prefix, sys.base_prefix))
    if is_here or is_installed or parts[0] == "trainkit":
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def stop_when_asked(call: Call, run: RunDir, attempt: AttemptDir, rank: int) -> None:
    """Exit with `EXIT_STOPPED` when the run is asked to stop; rank 0 first calls the method `checkpoint`."""
    checkpoint = getattr(call.function, "checkpoint", None)
    checkpoint = getattr(call.function, "__submitit_checkpoint__", checkpoint)
    saved = attempt.path / "results" / "saved"

    def stop(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(other, signal.SIG_IGN)
        if checkpoint is None:
            raise SystemExit(EXIT_STOPPED)
        if rank:
            threading.Thread(target=leave, daemon=True).start()  # rank 0 may need this one to save
            return
        try:
            again = checkpoint(*call.args, **call.kwargs)
            if again is not None:
                call_again = Call(again.function, tuple(again.args), dict(again.kwargs))
                write_atomic(run.path / CALL_FILE, dumps(call_again))
        finally:  # the other ranks wait for no more
            saved.touch()
        raise SystemExit(EXIT_STOPPED)

    def leave() -> None:
        while not saved.exists():
            time.sleep(POLL_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STOPPED)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, stop)


def appear_as_submitit(name: str) -> None:
    """Let ``submitit.JobEnvironment`` work in a function that was written for it; `name` is of the run."""
    num_nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    values = {key: os.environ[own] for key, own in SUBMITIT_NAMES.items()}
    values |= {"JOB_ID": os.environ.get("SLURM_JOB_ID", name), "JOB_NUM_NODES": str(num_nodes)}
    os.environ |= {f"SUBMITIT_LOCAL_{key}": value for key, value in values.items()}
    os.environ["SUBMITIT_EXECUTOR"] = "local"


def main() -> None:
    """Call the function of a run as one of its ranks, and write what it returns or raises."""
    run, rank = RunDir(os.environ["TRAINKIT_JOB_RUN_DIR"]), int(os.environ["RANK"])
    attempt = run.attempt(int(os.environ["TRAINKIT_JOB_ATTEMPT"]))
    file = result_file(attempt, rank)
    ensure_folder(file.parent, 0o700)
    try:
        call = read_pickle(call_file(run))
        appear_as_submitit(run.path.name)
        stop_when_asked(call, run, attempt, rank)
        try:
            value = call()
        except SystemExit as left:
            if left.code:
                raise
            value = None  # as if it had returned
        write_atomic(file, dumps(Result(value)))
    except Exception as error:
        text = traceback.format_exc()
        try:
            write_atomic(file, dumps(Result(error=error, traceback=text)))
            pickle.loads(file.read_bytes())
        except Exception:  # of an exception that cannot be pickled, its text is what can be shown
            write_atomic(file, dumps(Result(traceback=text)))
        raise
    if rank == 0:
        Path(os.environ["TRAINKIT_JOB_DONE_FILE"]).touch()


if __name__ == "__main__":
    # The classes above are pickled by the name of this module, not as those of __main__.
    from trainkit import function

    function.main()
