"""Calls a Python function as one rank of a run started by `trainkit.submit`: ``python -m trainkit.function``.

The call and the results are cloudpickle files that only their owner can read. trainkit never loads a pickle
that another user could have written.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, EXIT_STOPPED, EXIT_STUCK
from trainkit.folders import ensure_folder
from trainkit.run.end import RankFailure
from trainkit.run.files import open_private, to_json, utc_now, write_atomic, write_json
from trainkit.run.process import own_host
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.tracebacks import users_line

ARGV = (sys.executable, "-m", "trainkit.function")
CALL_FILE = "call.pkl"
CALLS_FOLDER = "calls"
"""Folder in a group folder that contains the pickled call of each run."""
POLL_S = 0.1
SUBMITIT_NAMES = {"LOCALID": "LOCAL_RANK", "NODEID": "NODE_RANK", "NTASKS": "WORLD_SIZE"}
"""Maps each variable that ``submitit.JobEnvironment`` reads to the variable that provides its value."""
SUBMITIT_FOLDER = "submitit"
"""The subfolder of a run folder to which `JobEnvironment.paths` refers."""
FOUND = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Operating system errors that would probably occur again if the function were called again."""
_BY_CHANCE = re.compile(
    r"Dist\w*Error|connect|timed? ?out|temporar|unavailable|unreachable|network|socket|http|broken pipe"
    r"|NCCL|gloo|CUDA|cuDNN|cuBLAS|\bECC\b|DataLoader worker|shared memory",
    re.IGNORECASE,
)
"""Matches errors caused by peers, the network or the hardware, which may not occur again after a restart."""


class Requeue:
    """Return value of a callable's `checkpoint` method; contains the call for the next attempt.

    A `Requeue` has the attributes of submitit's ``DelayedSubmission``, which `checkpoint` may return instead.
    """

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Result:
    """The return value of a rank's function, or the exception that it raised."""

    value: Any = None
    error: Exception | None = None
    """The exception, or None if the function returned or the exception cannot be pickled."""
    traceback: str = ""
    """The traceback; empty if the function returned."""


def dumps(value: Any) -> bytes:
    """Pickle a value, keeping the file names of its functions for tracebacks."""
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
    """Load a value pickled by `dumps`; raise UsageError if another user could have written the file."""
    with open_private(path) as stream:
        return pickle.load(stream)


def call_file(run: RunDir) -> Path:
    """Return the file with the call for a run's next attempt.

    For a run in a group, the file is in the group folder until the run saves a different call.
    """
    own = run.path / CALL_FILE
    return own if own.exists() else run.path.parent / CALLS_FOLDER / f"{run.path.name}.pkl"


@contextlib.contextmanager
def by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, pickle the function's module by value unless the job can import the module.

    A job can import a module that is installed or in the current folder, because the run has a copy of the
    current folder.
    """
    import cloudpickle

    named = getattr(function, "func", function)  # functools.partial objects have a `func` attribute
    module = sys.modules.get(getattr(named, "__module__", None) or type(named).__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        yield  # cloudpickle always pickles __main__ by value, and builtins can be imported in the job.
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
    """Exit with `EXIT_STOPPED` on a stop signal. Rank 0 first calls the callable's `checkpoint` method."""
    checkpoint = getattr(call.function, "checkpoint", None)
    checkpoint = getattr(call.function, "__submitit_checkpoint__", checkpoint)
    saved = attempt.path / "results" / "saved"

    def stop(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(other, signal.SIG_IGN)
        if checkpoint is None:
            raise SystemExit(EXIT_STOPPED)
        if rank:
            # keep running, because saving on rank 0 may need this rank
            threading.Thread(target=leave, daemon=True).start()
            return
        try:
            again = checkpoint(*call.args, **call.kwargs)
            if again is not None:
                call_again = Call(again.function, tuple(again.args), dict(again.kwargs))
                write_atomic(run.path / CALL_FILE, dumps(call_again))
        finally:  # the other ranks wait for this file before they exit
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


def appear_as_submitit(attempt: AttemptDir) -> None:
    """Set the environment variables that ``submitit.JobEnvironment`` reads inside a function.

    On Slurm, the ids identify the job and the job array. Without Slurm, the ids are derived from the
    run and are the same in each attempt. `JobEnvironment.paths` refers to the rank's log file.
    """
    job = read_job(attempt.run)
    is_local = job.of_attempt(attempt.number).backend is None
    prefix, rank = ("SUBMITIT_LOCAL_", "GLOBALID") if is_local else ("SLURM_", "PROCID")
    values = {prefix + key: os.environ[own] for key, own in {**SUBMITIT_NAMES, rank: "RANK"}.items()}
    num_nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    values[f"{prefix}JOB_NUM_NODES"] = str(num_nodes)
    if is_local:
        begun = job.attempts[0].submitted_at if job.attempts else ""
        digest = sha256(f"{attempt.run.path} {begun}".encode()).digest()
        job_id = values["SUBMITIT_LOCAL_JOB_ID"] = str(int.from_bytes(digest[:6], "big"))
    elif array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    else:
        job_id = os.environ["SLURM_JOB_ID"]
    folder = attempt.run.path / SUBMITIT_FOLDER
    values |= {"SUBMITIT_EXECUTOR": "local" if is_local else "slurm", "SUBMITIT_FOLDER": str(folder)}
    os.environ |= values
    ensure_folder(folder, 0o700)
    log = attempt.rank_log(int(os.environ["RANK"]))
    for stream in ("out", "err"):
        link = folder / f"{job_id}_{os.environ['RANK']}_log.{stream}"
        link.unlink(missing_ok=True)  # An earlier attempt may have created the link.
        with contextlib.suppress(FileExistsError):  # an attempt that is still exiting may create the link too
            link.symlink_to(os.path.relpath(log, folder))


def would_fail_again(error: BaseException, run: RunDir) -> bool:
    """Return whether calling the function again would probably raise the same exception.

    Another call may succeed if the exception was caused by a peer or the machine, or if the function resumes
    from checkpoints that it saved with `trainkit.loop`.
    """
    is_of_system = isinstance(error, OSError | MemoryError) and not isinstance(error, FOUND)
    is_by_chance = _BY_CHANCE.search(f"{type(error).__name__}: {error}") is not None
    return not (is_of_system or is_by_chance or any(run.checkpoints_dir.glob("*")))


def record_failure(attempt: AttemptDir, rank: int, error: BaseException, text: str) -> None:
    """Record a function's exception both as the rank's result and as the failure that `diagnose` reads."""
    file, raised = attempt.rank_result(rank), error if isinstance(error, Exception) else None
    code = error.code if isinstance(error, SystemExit) else EXIT_FAILED
    try:
        write_atomic(file, dumps(Result(error=raised, traceback=text)))
        pickle.loads(file.read_bytes())
    except Exception:  # An exception that cannot be pickled is stored as text.
        write_atomic(file, dumps(Result(traceback=text)))
    failure = RankFailure(
        rank=rank,
        node_rank=int(os.environ["NODE_RANK"]),
        host=own_host(),
        time=utc_now(),
        type=type(error).__name__,
        message=str(error),
        exit_code=code if isinstance(code, int) else EXIT_FAILED,
        final=would_fail_again(error, attempt.run),
        code=users_line(text.splitlines()),
    )
    write_json(attempt.rank_error(rank), {**to_json(failure), "traceback": text})


def main() -> None:
    """Call the function of a run as one of its ranks, and write the return value or exception to a file."""
    run, rank = RunDir(os.environ["TRAINKIT_JOB_RUN_DIR"]), int(os.environ["RANK"])
    attempt = run.attempt(int(os.environ["TRAINKIT_JOB_ATTEMPT"]))
    file = attempt.rank_result(rank)
    ensure_folder(file.parent, 0o700)
    try:
        call = read_pickle(call_file(run))
        appear_as_submitit(attempt)
        stop_when_asked(call, run, attempt, rank)
        try:
            value = call()
        except SystemExit as left:
            if left.code:
                raise
            value = None  # treat sys.exit(0) like a return
        write_atomic(file, _pickled(value))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (EXIT_STUCK, EXIT_STOPPED, EXIT_NO_RESTART):
            raise  # These exit codes need no failure record.
        record_failure(attempt, rank, error, traceback.format_exc())
        if isinstance(error, Exception | SystemExit):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        # Do not raise KeyboardInterrupt, because Python would then terminate itself with SIGINT.
        raise SystemExit(EXIT_FAILED) from None
    if rank == 0:
        Path(os.environ["TRAINKIT_JOB_DONE_FILE"]).touch()


def _pickled(value: Any) -> bytes:
    try:
        return dumps(Result(value))
    except Exception as error:
        what = f"the function returned a {type(value).__name__}, which cannot be pickled"
        raise TypeError(f"{what}; return plain values or a list ({error})") from error


if __name__ == "__main__":
    # Import this module by its name, so that its classes are not pickled as classes of __main__.
    from trainkit import function

    function.main()
