"""Compares the behaviours in submitit's tests of functions with trainkit: the table in docs/coming-from.md.

Both libraries run the same functions on this machine. on_slurm/test_python.py has the tests that need Slurm.
"""

import asyncio
import functools
import importlib
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.runs import runs_from, wait_until
from tests.test_api import LIMIT_S, ROOT
from trainkit import api
from trainkit.errors import UsageError
from trainkit.function import Requeue

submitit = pytest.importorskip("submitit")
from submitit import helpers  # noqa: E402
from submitit.auto.auto import AutoExecutor  # noqa: E402
from submitit.core import utils  # noqa: E402
from submitit.local.local import LocalExecutor  # noqa: E402
from submitit.slurm import slurm  # noqa: E402

pytestmark = pytest.mark.xdist_group("behaviours")  # the tests share the runs of the fixture
ONCE = {"max_crashes": 0}
HERE = """
import pickle

def add(one, other):
    return one + other

def pickled_here():
    return pickle.dumps(add)
"""


def add(one: int, other: int = 1) -> int:
    print("adds", one, other)
    print("to stderr", file=sys.stderr)
    return one + other


def ranks() -> tuple[int, ...]:
    job = submitit.JobEnvironment()
    Path(job.paths.folder).mkdir(exist_ok=True)
    return job.global_rank, job.local_rank, job.node, job.num_tasks, job.num_nodes


def ids() -> tuple[str, str | None, str, str]:
    job = submitit.JobEnvironment()
    print("in the log", flush=True)
    return job.job_id, job.array_task_id, job.paths.stdout.read_text(), str(job.paths.folder)


def flaky() -> str:
    if submitit.JobEnvironment().local_rank > 0:
        raise LookupError("on purpose: 1")
    return "fine"


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_silently() -> None:
    os._exit(0)


class WithLock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def hold() -> None:
    raise WithLock


def local_class() -> Any:
    class Local:
        number = 3

    return Local()


def wait_for(file: str, call: int = 0) -> str:
    """Wait until a file exists, and count the calls in its folder."""
    folder = Path(file).parent
    (folder / f"began-{len([*folder.glob('began-*')])}").touch()
    while not Path(file).exists():
        time.sleep(0.02)
    return f"call {call}"


class Waits(helpers.Checkpointable):  # type: ignore[misc]
    """A function whose checkpoint requests another call, or none."""

    def __init__(self, again: bool = True) -> None:
        self.again = again

    def __call__(self, file: str, call: int = 0) -> str:
        return wait_for(file, call)

    def checkpoint(self, file: str, call: int = 0) -> Any:
        return utils.DelayedSubmission(self, file, call + 1) if self.again else None


class Prefers(Waits):
    def __submitit_checkpoint__(self, file: str, call: int = 0) -> Any:
        return Requeue(self, file, call + 10)


def code_and_folder() -> tuple[str, str]:
    return Path("text.txt").read_text(), str(Path.cwd())


def submit_another() -> tuple[list[str], int]:
    inner = trainkit.submit(
        add, 20, 1, run_dir=Path(os.environ["TRAINKIT_JOB_RUN_DIR"]).parent / "inner", now=True
    )
    with helpers.clean_env():
        left = [name for name in os.environ if name.startswith("SLURM_")]
    return left, inner.result(LIMIT_S)


@dataclass
class Both:
    """The runs that were started at once with both libraries."""

    folder: Path
    executor: LocalExecutor
    jobs: dict[str, Any]
    runs: dict[str, Any]


def begun(folder: Path, number: int = 0) -> None:
    wait_until((folder / f"began-{number}").exists)


def trainkit_command(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "trainkit", *words], check=True, capture_output=True, timeout=LIMIT_S
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("behaviours")
    with runs_from(folder) as patch:
        (folder / "text.txt").write_text("as at submit")
        (folder / "here.py").write_text(HERE)
        patch.syspath_prepend(str(folder))
        here = importlib.import_module("here")
        executor = LocalExecutor(folder / "logs")
        several = LocalExecutor(folder / "logs")
        several.update_parameters(tasks_per_node=2)
        command = utils.CommandFunction(
            ["sh", "-c", "echo out; echo err >&2; exit ${1:-0}", "sh"], verbose=False
        )
        jobs: dict[str, Any] = {
            "add": executor.submit(add, 2, other=3),
            "array": executor.map_array(add, [1, 2, 3], [10, 20, 30, 40]),
            "calls": executor.submit_array([functools.partial(add, n) for n in range(2)]),
            "ranks": several.submit(ranks),
            "flaky": several.submit(flaky),
            "kill": executor.submit(kill_itself),
            "silent": executor.submit(end_silently),
            "hold": executor.submit(hold),
            "lock": executor.submit(threading.Lock),
            "local": executor.submit(local_class),
            "pickled": executor.submit(here.pickled_here),
            "command": executor.submit(command),
            "fails": executor.submit(command, 3),
        }
        for name in ("kill", "silent", "lock"):
            jobs[name]._results_timeout_s = 0  # the wait for a result that is missing
        now: dict[str, Any] = {"device": "cpu", "now": True}
        runs: dict[str, Any] = {
            "add": api.submit(functools.partial(add, 2, other=3), **now),
            "ranks": api.submit(ranks, gpus_per_node=2, **now),
            "ids": api.submit(ids, **now),
            "flaky": api.submit(flaky, gpus_per_node=2, **now),
            "kill": api.submit(kill_itself, requeue=ONCE, **now),
            "silent": api.submit(end_silently, **now),
            "hold": api.submit(hold, **now),
            "lock": api.submit(threading.Lock, **now),
            "local": api.submit(local_class, **now),
            "pickled": api.submit(here.pickled_here, **now),
            "command": api.submit(command, name="command", **now),
            "fails": api.submit(command, 3, name="fails", **now),
            "code": api.submit(code_and_folder, config={"launch": {"snapshot": True}}, **now),
            "another": api.submit(submit_another, **now),
            "array": api.map_array(add, [1, 2, 3], [10, 20, 30, 40], limit=2, device="cpu", name="array"),
            "calls": api.map_array(
                lambda call: call(), [functools.partial(add, n) for n in range(2)], device="cpu", name="calls"
            ),
            "groups": [api.map_array(ids_of, [0], device="cpu", name=f"group-{n}") for n in range(2)],
        }
        (folder / "text.txt").write_text("changed after submit")
        # The following runs keep this machine's cores until their rows are checked, because groups wait for a
        # core.
        for group in (runs["array"], runs["calls"], *runs["groups"]):
            group.wait(LIMIT_S)
        for name, function in {
            "asked": Waits(),
            "prefers": Prefers(),
            "none": Waits(again=False),
            "plain": wait_for,
            "cancelled": wait_for,
        }.items():
            (folder / name).mkdir()
            runs[name] = api.submit(function, str(folder / name / "go"), name=name, **now)
        yield Both(folder, executor, jobs, runs)
        for name in ("asked", "prefers", "none", "plain", "cancelled"):
            (folder / name / "go").touch()


def ids_of(_: int) -> tuple[str, str | None, str, str]:
    return ids()


CHECKS: dict[str, Callable[[Both], None]] = {}
"""Maps the first column of a row in the table to its check."""


def row(text: str) -> Callable[[Callable[[Both], None]], Callable[[Both], None]]:
    def add_check(check: Callable[[Both], None]) -> Callable[[Both], None]:
        CHECKS[text] = check
        return check

    return add_check


def parameter_error(**options: Any) -> str:
    with pytest.raises(UsageError) as error:
        api.submit(add, 1, **options)
    return error.value.render()


@row("`result()` returns the value of the function")
def _(both: Both) -> None:
    assert both.jobs["add"].result() == both.runs["add"].result(LIMIT_S) == 5


@row("keyword arguments: `submit(f, 1, y=2)`")
def _(both: Both) -> None:
    assert "`functools.partial(add, other=2)`" in parameter_error(other=2)


@row("`map_array(f, xs, ys)` stops at the end of the shortest iterable")
def _(both: Both) -> None:
    found = [job.result() for job in both.jobs["array"]]
    assert found == both.runs["array"].results(LIMIT_S) == [11, 22, 33]


@row("`submit_array(functions)`")
def _(both: Both) -> None:
    assert [job.result() for job in both.jobs["calls"]] == both.runs["calls"].results(LIMIT_S) == [1, 2]


@row("`with executor.batch():`")
def _(both: Both) -> None:
    assert not hasattr(trainkit, "batch")
    assert {run.path.parent for run in both.runs["calls"]} == {both.runs["calls"].path}


@row("`results()` returns the return values of all tasks")
def _(both: Both) -> None:
    assert both.jobs["ranks"].results() == [*map(tuple, both.runs["ranks"].results(LIMIT_S))]


@row("`JobEnvironment` contains the ranks")
def _(both: Both) -> None:
    assert both.runs["ranks"].results(LIMIT_S) == [(0, 0, 0, 2, 1), (1, 1, 0, 2, 1)]


@row("`JobEnvironment` contains `job_id` and `paths`")
def _(both: Both) -> None:
    found = [both.runs["ids"].result(LIMIT_S), *(group[0].result(LIMIT_S) for group in both.runs["groups"])]
    assert len({job_id for job_id, *_ in found}) == 3
    assert all(job_id.isdigit() and array is None for job_id, array, *_ in found)
    assert {log for *_, log, _ in found} == {"in the log\n"}
    assert found[0][3] == str(both.runs["ids"].path / "submitit")


@row("`JobEnvironment()` outside of a job raises an error")
def _(both: Both) -> None:
    with pytest.raises(RuntimeError):
        submitit.JobEnvironment()


@row("an exception in the function is raised in the caller")
def _(both: Both) -> None:
    assert type(both.jobs["flaky"].exception()) is utils.FailedJobError
    error = both.runs["flaky"].exception(LIMIT_S)
    assert type(error) is LookupError
    assert "in flaky" in str(error.__cause__)


@row("the error names the task that failed")
def _(both: Both) -> None:
    assert "on purpose: 1" in str(both.jobs["flaky"].exception())
    assert str(both.runs["flaky"].exception(LIMIT_S)) == "on purpose: 1"
    assert both.runs["flaky"].status.failure.rank == 1


@row("`exception()` returns None after a success")
def _(both: Both) -> None:
    assert both.jobs["add"].exception() is both.runs["add"].exception(LIMIT_S) is None


@row("a job is not retried after an exception in the function")
def _(both: Both) -> None:
    assert both.runs["flaky"].exception(LIMIT_S) is not None
    assert both.runs["flaky"].status.attempt == 1


@row("the function raises an exception that cannot be pickled")
def _(both: Both) -> None:
    assert "holds a lock" in str(both.jobs["hold"].exception())
    assert "WithLock: holds a lock" in str(both.runs["hold"].exception(LIMIT_S))


@row("the function returns a value that cannot be pickled")
def _(both: Both) -> None:
    assert "returned a lock" not in str(both.jobs["lock"].exception())
    assert "returned a lock, " in str(both.runs["lock"].exception(LIMIT_S))


@row("`exception()` of a job that was killed returns an exception")
def _(both: Both) -> None:
    assert isinstance(both.jobs["kill"].exception(), utils.UncompletedJobError)
    assert "SIGKILL" in str(both.runs["kill"].exception(LIMIT_S))


@row("`exception()` of a job that terminates without a result returns an exception")
def _(both: Both) -> None:
    assert isinstance(both.jobs["silent"].exception(), utils.UncompletedJobError)
    assert "wrote no result" in str(both.runs["silent"].exception(LIMIT_S))


@row("`stdout()`, `stderr()`, `stderr_to_stdout`")
def _(both: Both) -> None:
    assert "adds 2 3\n" in both.jobs["add"].stdout()
    assert both.runs["add"].wait(LIMIT_S).logs() == "adds 2 3\nto stderr\n"
    assert "omit stderr_to_stdout" in parameter_error(stderr_to_stdout=True)


@row("`done()`, `wait()`, `state`")
def _(both: Both) -> None:
    both.jobs["add"].wait()
    both.runs["add"].wait(LIMIT_S)
    assert (both.jobs["add"].done(), both.jobs["add"].state) == (True, "FINISHED")
    assert (both.runs["add"].done(), both.runs["add"].status.state) == (True, "finished")
    assert not both.runs["cancelled"].done() or both.runs["cancelled"].status.state == "cancelled"


@row("`cancel()`")
def _(both: Both) -> None:
    begun(both.folder / "cancelled")
    both.runs["cancelled"].cancel(wait=True)
    assert both.runs["cancelled"].status.state == "cancelled"
    with pytest.raises(trainkit.RunError, match="is cancelled"):
        both.runs["cancelled"].result(LIMIT_S)


@row("`cancel_at_deletion()`")
def _(both: Both) -> None:
    assert not hasattr(api.Run, "cancel_at_deletion")


def requeued(both: Both, name: str) -> tuple[str, int]:
    """Return the value after a requeue, and the number of calls."""
    begun(both.folder / name)
    trainkit_command("requeue", str(both.runs[name].path))
    begun(both.folder / name, 1)
    (both.folder / name / "go").touch()
    return both.runs[name].result(LIMIT_S), len([*(both.folder / name).glob("began-*")])


@row("`checkpoint()` returns the call that continues the job")
def _(both: Both) -> None:
    assert requeued(both, "asked") == ("call 1", 2)


@row("`__submitit_checkpoint__()` takes precedence over `checkpoint()`")
def _(both: Both) -> None:
    assert requeued(both, "prefers") == ("call 10", 2)


@row("`checkpoint()` returns None")
def _(both: Both) -> None:
    assert requeued(both, "none") == ("call 0", 2)


@row("a function without `checkpoint()`")
def _(both: Both) -> None:
    assert requeued(both, "plain") == ("call 0", 2)


@row("`max_num_timeout`")
def _(both: Both) -> None:
    assert 'write requeue={"max": 2}' in parameter_error(slurm_max_num_timeout=2)


@row("`helpers.FunctionSequence`")
def _(both: Both) -> None:
    sequence = helpers.FunctionSequence()
    sequence.add(add, 1)
    sequence.add(add, 2)
    run = api.submit(sequence, device="cpu", now=True)
    assert run.result(LIMIT_S) == [2, 3]


@row("`helpers.CommandFunction` returns the output of a program")
def _(both: Both) -> None:
    assert both.jobs["command"].result() == both.runs["command"].result(LIMIT_S) == "out"


@row("`helpers.CommandFunction` raises an error if the program fails")
def _(both: Both) -> None:
    assert "err" in str(both.jobs["fails"].exception())
    assert isinstance(both.runs["fails"].exception(LIMIT_S), utils.FailedJobError)


@row("`helpers.as_completed(jobs)`")
def _(both: Both) -> None:
    first = next(trainkit.as_completed([both.runs["add"]], LIMIT_S))
    assert first.result() == next(iter(helpers.as_completed([both.jobs["add"]]))).result()


@row("`await job.awaitable().result()`, `results()`")
def _(both: Both) -> None:
    async def value(one: Any) -> Any:
        return await one

    assert asyncio.run(value(both.jobs["add"].awaitable().result())) == asyncio.run(value(both.runs["add"]))
    assert asyncio.run(value(both.runs["array"])) == [11, 22, 33]


@row("`helpers.RsyncSnapshot`")
def _(both: Both) -> None:
    text, folder = both.runs["code"].result(LIMIT_S)
    assert text == "as at submit"
    assert folder == str(both.runs["code"].path / "work")


@row("`helpers.clean_env()` in a job that submits another job")
def _(both: Both) -> None:
    assert both.runs["another"].result(LIMIT_S) == ([], 21)


@row("the class of an argument is defined inside a function")
def _(both: Both) -> None:
    assert both.jobs["local"].result().number == both.runs["local"].result(LIMIT_S).number == 3


@row("a pickled function refers to its module by name")
def _(both: Both) -> None:
    expected = pickle.dumps(importlib.import_module("here").add)
    assert both.jobs["pickled"].result() == both.runs["pickled"].result(LIMIT_S) == expected


@row("a job object can be created from a folder and a job ID")
def _(both: Both) -> None:
    code = "import trainkit; print(trainkit.Run('add').result(100))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "5\n", done.stderr


@row("a job object can be pickled")
def _(both: Both) -> None:
    assert pickle.loads(pickle.dumps(both.jobs["add"])).result() == 5
    assert pickle.loads(pickle.dumps(both.runs["add"])).result(LIMIT_S) == 5


@row("the folder name contains spaces, quotes and backslashes")
def _(both: Both) -> None:
    names = ["a 0", 'a"=0"', "a'; echo foo", r"a\=0"]
    runs = [api.submit(add, 1, run_dir=both.folder / "odd" / name, now=True, device="cpu") for name in names]
    assert [run.result(LIMIT_S) for run in runs] == [2] * len(names)


@row("`%j` in the folder name is replaced")
def _(both: Both) -> None:
    run = api.submit(add, 1, run_dir=both.folder / "run-%j", now=True, device="cpu")
    assert run.result(LIMIT_S) == 2
    assert run.path.name == "run-%j"


@row("`max_pickle_size_gb` limits the size of pickle files")
def _(both: Both) -> None:
    assert "omit max_pickle_size_gb" in parameter_error(max_pickle_size_gb=1)


@row("`python=` of the executor sets the Python interpreter")
def _(both: Both) -> None:
    other = both.folder / "python"
    other.symlink_to(sys.executable)
    given = api._given(add, None, None, {"launch": {"python": str(other)}, "device": "cpu"}, calls={})
    assert api._loaded(given)[0].workload.argv[0] == str(other)


@row("an unknown parameter raises an error")
def _(both: Both) -> None:
    with pytest.raises(NameError):
        AutoExecutor("logs", cluster="local").update_parameters(blublu=2)
    assert "blublu=2: blublu: " in parameter_error(blublu=2)


@row("a value of the wrong type raises an error")
def _(both: Both) -> None:
    with pytest.raises(AssertionError):
        AutoExecutor("logs", cluster="local").update_parameters(mem_gb="2.0GB")
    assert "whole number of at" in parameter_error(nodes="two")


@row("`timeout_min`, `mem_gb` and other parameters are translated to Slurm options")
def _(both: Both) -> None:
    assert 'write time="01:00:00"' in parameter_error(timeout_min=60)
    assert 'write resources={"mem": "3584M"}' in parameter_error(mem_gb=3.5)


@row("`setup`, `srun_args`, `additional_parameters`")
def _(both: Both) -> None:
    text = parameter_error(
        slurm_setup=["module load cuda"],
        slurm_srun_args=["-vv", "--cpu-bind", "none"],
        slurm_additional_parameters={"mem_per_gpu": 12},
    )
    assert 'write launch={"setup": ["module load cuda"]}' in text
    assert 'write launch={"srun_extra": {"cpu-bind": "none"}}' in text
    assert 'write resources={"extra": {"mem-per-gpu": 12}}' in text


@row("`DebugExecutor`")
def _(both: Both) -> None:
    assert add(2, 3) == both.runs["add"].result(LIMIT_S)


@row("`helpers.monitor_jobs(jobs)`")
def _(both: Both) -> None:
    both.runs["array"].wait(LIMIT_S)
    argv = [sys.executable, "-m", "trainkit", "status", str(both.runs["array"].path)]
    assert "finished" in subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S).stdout


SLURM_TEST = "test_job_environment_on_slurm"
ON_SLURM = {
    "`JobEnvironment` on Slurm contains `array_job_id`, `array_task_id` and `hostnames`": SLURM_TEST,
    "`array_parallelism`, job IDs of an array": SLURM_TEST,
}
"""Maps a row of the table to the test in on_slurm/test_python.py that checks it."""


def rows() -> dict[str, str]:
    """Return the rows of the table in the docs: the behaviour, and trainkit's counterpart."""
    text = (ROOT / "docs" / "coming-from.md").read_text()
    table = text.partition("| what submitit's tests check | with trainkit |\n|---|---|\n")[2].partition(
        "\n\n"
    )[0]
    return dict(line.strip("| ").split(" | ", 1) for line in table.splitlines())


def test_the_table_has_the_rows_that_are_checked() -> None:
    found = rows()
    assert found.keys() == CHECKS.keys() | ON_SLURM.keys()
    assert len(found) >= 40
    assert all(re.match(r"(?:same|better|not)\b", text) for text in found.values())
    on_slurm = (ROOT / "tests" / "on_slurm" / "test_python.py").read_text()
    assert all(f"def {test}(" in on_slurm for test in ON_SLURM.values())


def test_every_parameter_of_submitit_has_a_hint() -> None:
    from trainkit.arguments import meant_of_submitit

    own = {*inspect.signature(slurm._make_sbatch_string).parameters} - {"command"}
    own |= {*AutoExecutor._typed_parameters()} | {*inspect.signature(LocalExecutor.__init__).parameters} - {
        "self"
    }
    names = [*own, *(f"slurm_{name}" for name in own), "local_setup", "local_python", "visible_gpus"]
    assert [name for name in names if meant_of_submitit(name, 1) is None] == []
    assert meant_of_submitit("lr", 1) is None


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", CHECKS)
def test_a_row(both: Both, name: str) -> None:
    CHECKS[name](both)
