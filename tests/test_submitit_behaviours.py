"""Checks the table in docs/coming-from.md: the behaviours in submitit's tests of functions, with trainkit."""

import importlib
import inspect
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.runs import runs_from
from tests.test_api import LIMIT_S, ROOT
from tests.test_function_ends import called
from trainkit import api
from trainkit.arguments import meant_of_submitit
from trainkit.errors import UsageError
from trainkit.function import CALL_FILE, Requeue, read_pickle

submitit = pytest.importorskip("submitit")
from submitit import helpers  # noqa: E402
from submitit.auto.auto import AutoExecutor  # noqa: E402
from submitit.core import utils  # noqa: E402
from submitit.local.local import LocalExecutor  # noqa: E402
from submitit.slurm import slurm  # noqa: E402

pytestmark = pytest.mark.xdist_group("behaviours")  # the tests share the runs of the fixture
PARAMETERS = "`timeout_min`, `mem_gb` and other parameters are translated to Slurm options"
SETUP = "`setup`, `srun_args`, `additional_parameters`"
PROVEN = {
    "test_api.py::test_a_function": (
        "`result()` returns the value of the function",
        "`results()` returns the return values of all tasks",
        "an exception in the function is raised in the caller",
        "`exception()` returns None after a success",
        "`exception()` of a job that was killed returns an exception",
        "`done()`, `wait()`, `state`",
        "a job object can be created from a folder and a job ID",
        "`DebugExecutor`",
    ),
    "test_api.py::test_an_array_and_a_sweep": (
        "`map_array(f, xs, ys)` stops at the end of the shortest iterable",
        "`helpers.as_completed(jobs)`",
        "`await job.awaitable().result()`, `results()`",
        "`helpers.monitor_jobs(jobs)`",
    ),
    "test_api.py::test_a_notice_a_cancel_and_a_resume": (
        "`cancel()`",
        "`checkpoint()` returns the call that continues the job",
        "`__submitit_checkpoint__()` takes precedence over `checkpoint()`",
    ),
    "test_api.py::test_a_handle_is_small_and_an_await_can_time_out": ("a job object can be pickled",),
    "test_function_ends.py::test_the_end_of_a_run": (
        "a job is not retried after an exception in the function",
        "`exception()` of a job that terminates without a result returns an exception",
    ),
    "test_function_ends.py::test_an_end": (
        "the function raises an exception that cannot be pickled",
        "the function returns a value that cannot be pickled",
    ),
    "test_function_ends.py::test_values_of_all_kinds": (
        "the class of an argument is defined inside a function",
    ),
    "on_slurm/test_python.py::test_job_environment_on_slurm": (
        "`JobEnvironment` on Slurm contains `array_job_id`, `array_task_id` and `hostnames`",
        "`array_parallelism`, job IDs of an array",
    ),
    "test_submitit_behaviours.py::test_the_environment_of_a_job": (
        "`JobEnvironment` contains the ranks",
        "`JobEnvironment` contains `job_id` and `paths`",
        "`submit_array(functions)`",
    ),
    "test_submitit_behaviours.py::test_the_error_names_the_rank": ("the error names the task that failed",),
    "test_submitit_behaviours.py::test_the_code_and_the_environment_of_a_job": (
        "`helpers.RsyncSnapshot`",
        "`helpers.clean_env()` in a job that submits another job",
        "a pickled function refers to its module by name",
        "the folder name contains spaces, quotes and backslashes",
        "`%j` in the folder name is replaced",
    ),
    "test_submitit_behaviours.py::test_the_call_after_a_stop": (
        "`checkpoint()` returns None",
        "a function without `checkpoint()`",
    ),
    "test_submitit_behaviours.py::test_helpers": (
        "`helpers.FunctionSequence`",
        "`helpers.CommandFunction` returns the output of a program",
        "`helpers.CommandFunction` raises an error if the program fails",
    ),
    "test_submitit_behaviours.py::test_what_trainkit_does_not_have": (
        "`with executor.batch():`",
        "`cancel_at_deletion()`",
        "`JobEnvironment()` outside of a job raises an error",
    ),
    "test_submitit_behaviours.py::test_the_interpreter": (
        "`python=` of the executor sets the Python interpreter",
    ),
    "test_submitit_behaviours.py::test_what_an_option_of_submitit_is_called": (
        "keyword arguments: `submit(f, 1, y=2)`",
        "`stdout()`, `stderr()`, `stderr_to_stdout`",
        "`max_num_timeout`",
        "`max_pickle_size_gb` limits the size of pickle files",
        "an unknown parameter raises an error",
        "a value of the wrong type raises an error",
        PARAMETERS,
        SETUP,
    ),
}
"""Maps a test to the rows of the table that it checks, by their first column."""


def test_every_row_of_the_table_has_a_test() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text()
    _, _, after = text.partition("| what submitit's tests check | with trainkit |\n|---|---|\n")
    found = dict(line.strip("| ").split(" | ", 1) for line in after.partition("\n\n")[0].splitlines())
    assert sorted(found) == sorted(row for rows in PROVEN.values() for row in rows)
    assert all(re.match(r"(?:same|better|not)\b", text) for text in found.values())
    for file, _, name in (test.partition("::") for test in PROVEN):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), name


def add(one: int, other: int = 1) -> int:
    return one + other


def of_rank() -> tuple[tuple[int, ...], str, str | None, str, str]:
    job = submitit.JobEnvironment()
    print("in the log", flush=True)
    ranks = (job.global_rank, job.local_rank, job.node, job.num_tasks, job.num_nodes)
    return ranks, job.job_id, job.array_task_id, job.paths.stdout.read_text(), str(job.paths.folder)


def flaky() -> str:
    if submitit.JobEnvironment().local_rank > 0:
        raise LookupError("on purpose: 1")
    return "fine"


HERE = """
import pickle

def add(one, other):
    return one + other

def pickled_here():
    return pickle.dumps(add)
"""


def in_the_job(pickled_here: Callable[[], bytes]) -> tuple[str, str, list[str], int, bytes]:
    """Return the code and its folder, Slurm's variables, the value of an inner run, and a pickle."""
    inner = Path(os.environ["TRAINKIT_JOB_RUN_DIR"]).parent / "inner"
    value = trainkit.submit(add, 20, 1, run_dir=inner, now=True).result(LIMIT_S)
    with helpers.clean_env():
        left = [name for name in os.environ if name.startswith("SLURM_")]
    return Path("text.txt").read_text(), str(Path.cwd()), left, value, pickled_here()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start all runs at once, in the current folder."""
    folder = tmp_path_factory.mktemp("behaviours")
    with runs_from(folder) as patch:
        (folder / "text.txt").write_text("as at submit")
        (folder / "here.py").write_text(HERE)
        patch.syspath_prepend(str(folder))
        here = importlib.import_module("here")
        now: dict[str, Any] = {"device": "cpu", "now": True}
        started: dict[str, Any] = {
            "ranks": api.submit(of_rank, gpus_per_node=2, **now),
            "flaky": api.submit(flaky, gpus_per_node=2, **now),
            "job": api.submit(
                in_the_job, here.pickled_here, run_dir="runs/a \"0'\\; %j", launch={"snapshot": True}, **now
            ),
            "calls": api.map_array(lambda call: call(), [of_rank, lambda: 2], device="cpu", name="calls"),
            "pickle": pickle.dumps(here.add),
        }
        (folder / "text.txt").write_text("changed after submit")
        yield started


@pytest.mark.slow(seconds=5)
def test_the_environment_of_a_job(runs: dict[str, Any]) -> None:
    run, calls = runs["ranks"], runs["calls"].results(LIMIT_S)
    found = [*run.results(LIMIT_S), calls[0]]
    assert [ranks for ranks, *_ in found] == [(0, 0, 0, 2, 1), (1, 1, 0, 2, 1), (0, 0, 0, 1, 1)]
    first, second, other = (job_id for _, job_id, *_ in found)
    assert first == second != other
    assert all(job_id.isdigit() and array is None for _, job_id, array, *_ in found)
    assert {log for *_, log, _ in found} == {"in the log\n"}
    assert found[0][4] == str(run.path / "submitit")
    assert calls[1] == 2


@pytest.mark.slow(seconds=5)
def test_the_error_names_the_rank(runs: dict[str, Any]) -> None:
    assert str(runs["flaky"].exception(LIMIT_S)) == "on purpose: 1"
    assert (runs["flaky"].status.failure.rank, runs["flaky"].status.attempt) == (1, 1)


@pytest.mark.slow(seconds=5)
def test_the_code_and_the_environment_of_a_job(runs: dict[str, Any]) -> None:
    found = runs["job"].result(LIMIT_S)
    assert found == ("as at submit", str(runs["job"].path / "work"), [], 21, runs["pickle"])
    assert runs["job"].path.name == "a \"0'\\; %j"


class Stopped(helpers.Checkpointable):  # type: ignore[misc]
    """A function that gets a stop signal, and whose checkpoint requests another call, or none."""

    def __init__(self, again: bool = True) -> None:
        self.again = again

    def __call__(self, number: int) -> None:
        signal.raise_signal(signal.SIGTERM)

    def checkpoint(self, number: int) -> Any:
        return utils.DelayedSubmission(self, number + 1) if self.again else None


class Prefers(Stopped):
    def __submitit_checkpoint__(self, number: int) -> Any:
        return Requeue(self, number + 10)


def without_checkpoint(number: int) -> None:
    signal.raise_signal(signal.SIGUSR2)


@pytest.mark.parametrize(
    ("function", "number"),
    [(Stopped(), 2), (Prefers(), 11), (Stopped(again=False), 1), (without_checkpoint, 1)],
)
def test_the_call_after_a_stop(tmp_path: Path, function: Callable[..., Any], number: int) -> None:
    with pytest.raises(SystemExit) as stopped:
        called(tmp_path, function, 1)
    assert stopped.value.code == 75
    assert read_pickle(tmp_path / "runs" / "made" / CALL_FILE).args == (number,)


def test_helpers(tmp_path: Path) -> None:
    sequence = helpers.FunctionSequence()
    sequence.add(add, 1)
    sequence.add(add, 2)
    command = utils.CommandFunction(["sh", "-c", "echo out; exit ${1:-0}", "sh"], verbose=False)
    for name, function, value in (("sequence", sequence, [2, 3]), ("command", command, "out")):
        assert read_pickle(called(tmp_path / name, function).rank_result(0)).value == value
    with pytest.raises(utils.FailedJobError):
        called(tmp_path / "fails", command, 3)


def test_what_trainkit_does_not_have() -> None:
    assert not hasattr(trainkit, "batch")
    assert not hasattr(api.Run, "cancel_at_deletion")
    with pytest.raises(RuntimeError):
        submitit.JobEnvironment()


def test_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    given = api._given(add, None, None, {"launch": {"python": str(python)}, "device": "cpu"}, calls={})
    assert api._loaded(given)[0].workload.argv[0] == str(python)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"other": 2}, "`functools.partial(add, other=2)`"),
        ({"stderr_to_stdout": True}, "omit stderr_to_stdout"),
        ({"slurm_max_num_timeout": 2}, 'write requeue={"max": 2}'),
        ({"max_pickle_size_gb": 1}, "omit max_pickle_size_gb"),
        ({"blublu": 2}, "blublu=2: blublu: "),
        ({"nodes": "two"}, "resources.nodes: "),
        ({"timeout_min": 60}, 'write time="01:00:00"'),
        ({"mem_gb": 3.5}, 'write resources={"mem": "3584M"}'),
        ({"slurm_setup": ["module load cuda"]}, 'write launch={"setup": ["module load cuda"]}'),
        ({"slurm_srun_args": ["-vv", "--cpu-bind", "no"]}, 'write launch={"srun_extra": {"cpu-bind": "no"}}'),
        (
            {"slurm_additional_parameters": {"mem_per_gpu": 12}},
            'write resources={"extra": {"mem-per-gpu": 12}}',
        ),
    ],
)
def test_what_an_option_of_submitit_is_called(options: dict[str, Any], shown: str) -> None:
    with pytest.raises(UsageError) as error:
        api.submit(add, 1, **options)
    assert shown in error.value.render()


def test_every_parameter_of_submitit_has_a_hint() -> None:
    own = {*inspect.signature(slurm._make_sbatch_string).parameters} - {"command"}
    own |= {*AutoExecutor._typed_parameters()} | {*inspect.signature(LocalExecutor.__init__).parameters}
    own -= {"self"}
    names = [*own, *(f"slurm_{name}" for name in own), "local_setup", "local_python", "visible_gpus"]
    assert [name for name in names if meant_of_submitit(name, 1) is None] == []
    assert meant_of_submitit("lr", 1) is None
