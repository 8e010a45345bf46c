"""Runs from Python: `submit`, `sweep` and `map_array` start them, `Run` and `Group` are what one has of them.

They are the runs of the command line, in the same folders: ``trainkit status`` shows them, too.
"""

from __future__ import annotations

import html
import itertools
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from trainkit.backends.jobs import liveness_probe, query_job_status
from trainkit.control.cancel import cancel_group, cancel_run
from trainkit.errors import ConfigError, Problem, TrainkitError, UsageError, warn_caller
from trainkit.formats import rank_list
from trainkit.function import ARGV, CALL_FILE, CALLS_FOLDER, Call, by_value, dumps, read_pickle, result_file
from trainkit.observe.group import GroupStatus, PointStatus
from trainkit.observe.logs import run_is_over
from trainkit.observe.status import ACTIVE_STATES, RunStatus, read_status
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import Workload, workload_of
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.events import read_metrics
from trainkit.run.files import write_atomic
from trainkit.run.group import RunGroup, create_task_run, group_of
from trainkit.run.history import RunHistory
from trainkit.run.owner import refuse_foreign
from trainkit.run.record import read_job
from trainkit.run.registry import find_run, find_run_or_group, iter_known_runs
from trainkit.run.rundir import RunDir
from trainkit.slurm.client import require_controller

if TYPE_CHECKING:
    from trainkit.cli.options import ConfigRequest
    from trainkit.config import LoadedConfig
    from trainkit.launch.submission import ArraySpec, LoadedPoint

Config = str | Path | Mapping[str, Any] | None
"""A file, the name of a shipped config, or its sections: a dictionary or OmegaConf's ``DictConfig``."""
Work = Config | Callable[..., Any]

POLL_S = 0.2
GROUP_POLL_S = 2.0
SLURM_POLL_S = 10.0
"""Between two questions to Slurm about a group."""


class RunError(TrainkitError):
    """A run has no result: it failed, was cancelled or is gone. `hint` says what to do."""


class RemoteTraceback(Exception):
    """Where the function of a run raised its exception; the cause of that exception."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def submit(
    work: Work = None,
    /,
    *args: Any,
    config: Config = None,
    command: Sequence[str] = (),
    launcher: str = "python",
    run_dir: str | Path | None = None,
    profile: str | None = None,
    after: Iterable[str | Path | Run] = (),
    now: bool = False,
    **options: Any,
) -> Run:
    """Start a run on Slurm, or in the background on this machine, as ``trainkit submit`` does.

    `work` is a config, which the built-in trainer trains, or a function, which each rank calls with `args`
    and whose value `Run.result` returns; `functools.partial` gives it keyword arguments. `command` runs a
    program instead. A function or a command may have a `config` for its job.

    `options` are those of the command line, such as ``nodes=2``, ``gpus_per_node=4``, ``time="1:00:00"``,
    ``name``, ``note`` and ``tags``, and sections of the config, as ``train={"steps": 50}``. Raises
    UsageError, ConfigError and SlurmError, each with a hint.
    """
    given = _given(work, config, profile, options, after, run_dir, command, launcher, now)
    from trainkit.launch.submission import LoadedPoint

    calls = {} if given.function is None else {0: _call(given.function, args)}
    if args and given.function is None:
        raise UsageError(f"{len(args)} arguments, but no function", hint="they are those of a function")
    given, loaded = _loaded(given)
    return Run(_start(given, [LoadedPoint(0, {}, loaded)], None, calls))


def sweep(
    work: Work,
    values: Mapping[str, Sequence[Any]],
    /,
    *,
    limit: int | None = None,
    config: Config = None,
    run_dir: str | Path | None = None,
    after: Iterable[str | Path | Run] = (),
    profile: str | None = None,
    **options: Any,
) -> Group:
    """Start a run for each combination of `values`, at most `limit` at once, as ``submit --sweep`` does.

    They are values of config keys, or the keyword arguments of a function. Without a `limit` Slurm decides,
    and on this machine the runs start one after another. Raises what `submit` raises.
    """
    given = _given(work, config, profile, options, after, run_dir)
    points = itertools.product(*values.values())
    found = [dict(zip(values, point, strict=True)) for point in points]
    if given.function is not None:
        calls = {index: _call(given.function, (), own) for index, own in enumerate(found)}
        return _start_calls(given, calls, limit, found)
    from trainkit.cli.submit import swept
    from trainkit.launch.submission import ArraySpec

    array = ArraySpec(tuple(range(len(found))), limit)
    return Group(_start(given, swept(given.request, found), array))


def map_array(
    function: Callable[..., Any],
    /,
    *iterables: Iterable[Any],
    limit: int | None = None,
    config: Config = None,
    run_dir: str | Path | None = None,
    after: Iterable[str | Path | Run] = (),
    profile: str | None = None,
    **options: Any,
) -> Group:
    """Start a run of a function for each item of `iterables`, at most `limit` at once, as one group.

    Like `map`, it stops with the shortest of them. Raises what `submit` raises.
    """
    given = _given(function, config, profile, options, after, run_dir)
    calls = {index: _call(function, args) for index, args in enumerate(zip(*iterables, strict=False))}
    return _start_calls(given, calls, limit)


def runs() -> list[Run | Group]:
    """All runs and groups that are known on this machine, the newest first."""
    return [(Group if isinstance(known, RunGroup) else Run)(known.path) for known in iter_known_runs()]


class Run:
    """A run, by its folder or job id, or by its name or ``last`` one of the current folder.

    Raises UsageError if there is none, or several.
    """

    def __init__(self, run: str | Path | RunDir) -> None:
        self._folder = run if isinstance(run, RunDir) else find_run(str(run), acts=True)

    @property
    def path(self) -> Path:
        """Its folder; that of a run of a group may not exist before it starts."""
        return self._folder.path

    @property
    def name(self) -> str:
        """Its name, that of its config, script or function."""
        return read_job(self._folder).name or self.path.name

    @property
    def status(self) -> RunStatus:
        """What ``trainkit status`` shows: ``state``, ``step``, ``loss``, ``attempt``, ``job_id`` and more."""
        record = read_job(self._folder)
        job = query_job_status(self._folder, record, warn_caller)
        now = datetime.now(timezone.utc)
        status, point = read_status(RunHistory(self._folder), record, job.alive, now, job.job), self._point()
        if point is None:
            return status
        return replace(status, state=point.state, reason=point.reason, job_id=point.job_id)

    def _point(self) -> PointStatus | None:
        """What its group says of it, until it starts."""
        from trainkit.cli.status import query_group

        found = None if self._folder.attempt_numbers() else group_of(self._folder)
        if found is None:
            return None
        return next(point for point in query_group(found[0]).points if point.index == found[1])

    def done(self) -> bool:
        """Whether it has ended and does not restart by itself."""
        return not self.status.is_active

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait until it has ended, after all its restarts; raises TimeoutError."""
        _wait(self._polls(), timeout_s, self.path)
        return self

    def _polls(self) -> Iterator[float]:
        """The seconds until its state is read again, until it has ended."""
        while (point := self._point()) is not None:
            if point.state not in ACTIVE_STATES:
                return
            yield _group_poll_s(RunGroup(self.path.parent))
        is_alive = liveness_probe(self._folder)
        while not run_is_over(self._folder, is_alive()):
            yield POLL_S

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, each step once; ``pandas.DataFrame`` makes a table of them."""
        return read_metrics(self._folder)

    def logs(self, rank: int = 0) -> str:
        """What a rank of the newest attempt has printed so far."""
        log = self._folder.attempt(max(self._folder.attempt_numbers(), default=0)).rank_log(rank)
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def cancel(self, *, now: bool = False, wait: bool = False) -> None:
        """Ask it to save and end, or with `now` kill it; with `wait`, wait until it has ended."""
        cancel_run(create_task_run(self._folder), now=now, wait=wait, warn=warn_caller)

    def resume(self, *, new_code: bool = False, now: bool = False, **options: Any) -> Run:
        """Start its next attempt from the newest intact checkpoint, with `options` as those of `submit`."""
        from trainkit.control.resume import planned_resume, resume_run

        run = create_task_run(self._folder)
        refuse_foreign(run.path, "`trainkit resume --trust` executes it as you all the same")
        with planned_resume(run, (), _flags({}, options), warn=warn_caller, new_code=new_code) as found:
            resume_run(run, found.loaded.config, found.plan, new_code=new_code, now=now)
        return self

    def result(self, timeout_s: float | None = None) -> Any:
        """The value of its function, that of rank 0, once it has ended.

        Raises what the function raised, with its traceback as the cause, RunError if the run ended
        otherwise, and TimeoutError.
        """
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """The values of all ranks; raises like `result`."""
        self.wait(timeout_s)
        if not (numbers := self._folder.attempt_numbers()):
            raise self._error(None)
        refuse_foreign(self._folder.path, "copy what you need: reading a result executes what is in it")
        attempt = self._folder.attempt(numbers[-1])
        end = read_end(attempt)
        found = {
            file: read_pickle(file) for file in sorted(result_file(attempt, 0).parent.glob("rank-*.pkl"))
        }
        failed = None if end is None or end.verdict is None else end.verdict.rank
        if failed is not None:  # what the other ranks raised may only be that this one is gone
            first = result_file(attempt, failed)
            found = {first: found[first], **found} if first in found else {}
        for result in found.values():
            if result.error is not None:
                raise result.error from RemoteTraceback(result.traceback)
            if result.traceback:
                raise RunError(f"the function of {self._folder.path} raised:\n\n{result.traceback}")
        if end is None or end.state != "finished" or not found:
            raise self._error(end)
        own = [result_file(attempt, rank) for rank in range(LaunchPlan.read(attempt.plan_file).world_size)]
        if missing := [rank for rank, file in enumerate(own) if file not in found]:
            what = f"{rank_list(missing)} of {self._folder.path} left no result"
            raise RunError(what, hint="a function returns; `os._exit` ends its process before")
        return [found[file].value for file in own]

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """What `result` would raise once it has ended; None if it would return."""
        self.wait(timeout_s)
        try:
            self.results()
        except Exception as error:
            return error
        return None

    def _error(self, end: AttemptEnd | None) -> RunError:
        shown, word = self._folder.shown, self._folder.word
        if end is not None and end.state == "finished":
            return RunError(f"{shown} has no result", hint="only a run of a function has one")
        status = self.status
        what = f"{shown} is {status.state}" + (f": {status.reason}" if status.reason else "")
        if status.failure is not None:
            return RunError(what, hint=f"`trainkit diagnose {word}` names the cause")
        return RunError(what, hint=f"`trainkit resume {word}`, or its method resume, continues it")

    def __await__(self) -> Generator[Any, None, Any]:
        return _after(self._polls(), self.result).__await__()

    def __repr__(self) -> str:
        return f"Run({str(self._folder.path)!r})"

    def _repr_html_(self) -> str:
        status = self.status
        values = {
            "run": status.name,
            "state": status.state,
            "step": status.step and f"{status.step} of {status.total_steps or '?'}",
            "loss": None if status.loss is None else f"{status.loss:.4g}",
            "why": status.reason,
            "folder": str(self._folder.path),
        }
        return _table([[name, value] for name, value in values.items() if value is not None])


class Group(Sequence[Run]):
    """A group of runs, by its folder or name: a sequence of `Run`. Raises UsageError if there is none."""

    def __init__(self, group: str | Path) -> None:
        found = find_run_or_group(str(group), acts=True)
        if not isinstance(found, RunGroup):
            raise UsageError(f"{found.path} is one run, not a group", hint="Run(…) opens it")
        self._group = found
        self._indices = sorted(found.points)

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._group.path

    @property
    def name(self) -> str:
        """Its name, that of its config or function."""
        return self._group.name

    @property
    def status(self) -> GroupStatus:
        """What ``trainkit status`` shows of a group: the state and result of each run."""
        from trainkit.cli.status import query_group

        return query_group(self._group)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | list[Run]:
        chosen = self._indices[index]
        if isinstance(chosen, int):
            return Run(self._group.run(chosen))
        return [Run(self._group.run(one)) for one in chosen]

    def __len__(self) -> int:
        return len(self._indices)

    def wait(self, timeout_s: float | None = None) -> Group:
        """Wait until all runs have ended; raises TimeoutError."""
        _wait(self._polls(), timeout_s, self.path)
        return self

    def _polls(self) -> Iterator[float]:
        while self.status.is_active:
            yield _group_poll_s(self._group)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """The value of each run, in their order; raises like `Run.result` for the first that has none."""
        self.wait(timeout_s)
        return [run.result() for run in self]

    def cancel(self, *, now: bool = False, wait: bool = False) -> None:
        """Cancel all runs that have not ended."""
        cancel_group(self._group, now=now, wait=wait)

    def resume(self) -> Group:
        """Run what has not finished, on this machine; on Slurm submit what has not been submitted."""
        from trainkit.control.resume import resume_group

        if self._group.record.process is None and not self._group.left:
            raise UsageError(f"{self.path} is a Slurm array", hint="resume its runs: group[0].resume()")
        resume_group(self._group)
        return self

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return _after(self._polls(), self.results).__await__()

    def __repr__(self) -> str:
        return f"Group({str(self.path)!r})"

    def _repr_html_(self) -> str:
        status = self.status
        rows = [[point.index, *point.texts(status.keys), point.state] for point in status.points]
        return _table([["run", *status.keys, "state"], *rows])


class _Given(NamedTuple):
    """What `submit`, `sweep` and `map_array` are to run."""

    request: ConfigRequest
    workload: Workload
    function: Callable[..., Any] | None
    after: list[str]
    run_dir: Path | None
    now: bool


def _given(
    work: Work,
    config: Config,
    profile: str | None,
    options: Mapping[str, Any],
    after: Iterable[str | Path | Run] = (),
    run_dir: str | Path | None = None,
    command: Sequence[str] = (),
    launcher: str = "python",
    now: bool = False,
) -> _Given:
    from trainkit.cli.options import ConfigRequest

    function = work if callable(work) else None
    if sum((function is not None, bool(command), not callable(work) and work is not None)) != 1:
        raise UsageError(
            "there is not one thing to run, but none or several",
            hint="give a config, a function or command=; config= is that of a function or command",
        )
    if not callable(work) and work is not None:
        config = work
    if not isinstance(config, str | Path | Mapping | None):
        hint = "give a path, the name of a shipped config, or a mapping of keys"
        raise UsageError(f"a config cannot be {config!r}", hint=hint)
    argv = ARGV if function is not None else tuple(map(str, command))
    path = str(config) if isinstance(config, str | Path) else ""
    sections = {} if isinstance(config, str | Path | None) else config
    name = argv
    if function is not None:
        named = getattr(function, "func", function)  # of a functools.partial
        name = (str(getattr(named, "__name__", type(named).__name__)).strip("<>_") + ".py",)
    request = ConfigRequest(path, profile, (), _flags(sections, options), name)
    names = [str(one.path if isinstance(one, Run) else one) for one in after]
    where = None if run_dir is None else Path(run_dir)
    return _Given(request, workload_of(argv, launcher), function, names, where, now)


def _flags(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[str, object]]:
    """Config values by dotted key, each with its origin; of a key that both have, that of the options."""
    from trainkit.cli.options import FLAGS
    from trainkit.config.schema import is_known

    if type(config).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        config = cast("Mapping[str, Any]", OmegaConf.to_container(config, resolve=True))
    flags = {key: (f"config[{key!r}]", value) for key, value in _keys(config)}
    problems = [
        Problem(name, "unknown argument", f"{name}={value!r}", _meant_argument(name))
        for name, value in options.items()
        if name not in FLAGS and not is_known(tuple(name.split(".")))
    ]
    if problems:
        raise ConfigError(problems)
    named = {FLAGS.get(name, name): value for name, value in options.items()}
    return flags | {key: (f"{key}={value!r}", value) for key, value in _keys(named)}


def _meant_argument(name: str) -> str:
    """The hint of an unknown argument: what was meant, as it is written in Python."""
    from trainkit.cli.options import FLAGS
    from trainkit.config.schema import meant

    key = meant(tuple(name.split(".")))
    if key is None:
        return "`trainkit schema` prints every key"
    section, _, leaf = key.partition(".")
    arguments = {flag_key: argument for argument, flag_key in FLAGS.items()}
    return f"did you mean {arguments.get(key) or (section + (leaf and f'={{{leaf!r}: …}}'))}?"


def _keys(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values by dotted key, those of sections one by one."""
    from trainkit.config.schema import sections

    for name, value in values.items():
        if name in sections() and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", _plain(one)) for key, one in value.items())
        else:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    """A value as YAML has it: paths as text, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return str(value) if isinstance(value, Path) else value


def _call(function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any] = {}) -> Call:
    if isinstance(function, partial):  # so that a method `checkpoint` of its function is found
        return _call(function.func, (*function.args, *args), {**function.keywords, **kwargs})
    return Call(function, tuple(args), dict(kwargs))


def _loaded(given: _Given) -> tuple[_Given, LoadedConfig]:
    """The config; a function is called by the interpreter that its `launch` names, by default this one."""
    from trainkit.launch.environment import find_interpreter

    loaded = given.request.load_to_plan(given.workload)
    if given.function is not None:
        argv = find_interpreter(loaded.config.launch, Path.cwd())[0].argv
        given = given._replace(workload=replace(given.workload, argv=(*argv, *given.workload.argv[1:])))
    return given, loaded


def _start_calls(
    given: _Given, calls: Mapping[int, Call], limit: int | None, values: Sequence[Mapping[str, Any]] = ()
) -> Group:
    """Start a group; `values` are those by which its tables name the calls of a sweep."""
    from trainkit.launch.submission import ArraySpec, LoadedPoint

    if not calls:
        raise UsageError("there is nothing to call", hint="each run is one call: give at least one item")
    given, loaded = _loaded(given)
    shown = [{key: _shown(value) for key, value in own.items()} for own in values]
    points = [LoadedPoint(index, shown[index] if shown else {}, loaded) for index in calls]
    return Group(_start(given, points, ArraySpec(tuple(calls), limit), calls))


def _shown(value: Any) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _start(
    given: _Given, points: Iterable[LoadedPoint], array: ArraySpec | None, calls: Mapping[int, Call] = {}
) -> Path:
    """The folder of what was started."""
    from trainkit.cli.submit import submission_warnings
    from trainkit.launch.create import create_submission, start_submission
    from trainkit.launch.submission import plan_submission

    submission = plan_submission(points, array, given.workload, after=given.after, warn=warn_caller)
    if given.now and submission.plan.slurm is not None:
        raise UsageError("now is for a run on this machine, and this one is for Slurm", hint="leave it out")
    found = submission_warnings(submission, given.run_dir, given.workload, starts=True)
    for text in (*submission.plan.warnings, *found):
        warn_caller(text.strip().removeprefix("warning: "))
    if submission.plan.slurm is not None:
        require_controller(submission.plan.slurm.clusters)
    with nullcontext() if given.function is None else by_value(given.function):
        pickles = {index: dumps(call) for index, call in calls.items()}  # what cannot be leaves no folder
    created = create_submission(submission, [*sys.orig_argv], given.run_dir, "run_dir")
    folder = created.run.path
    if array is not None and pickles:
        (folder / CALLS_FOLDER).mkdir(mode=0o700)
    for index, content in pickles.items():
        write_atomic(folder / CALL_FILE if array is None else folder / CALLS_FOLDER / f"{index}.pkl", content)
    start_submission(submission, created, now=given.now)
    return folder


def _group_poll_s(group: RunGroup) -> float:
    return SLURM_POLL_S if group.record.process is None else GROUP_POLL_S


def _wait(polls: Iterator[float], timeout_s: float | None, path: Path) -> None:
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for poll_s in polls:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{path} has not ended after {timeout_s} s")
        time.sleep(max(0.0, min(poll_s, until_s - time.monotonic())))


async def _after(polls: Iterator[float], result: Callable[[], Any]) -> Any:
    import asyncio  # takes as long as the rest of this module

    # No thread waits for the end: `asyncio.run` would wait for that thread after a timeout.
    while (poll_s := await asyncio.to_thread(next, polls, None)) is not None:
        await asyncio.sleep(poll_s)
    return await asyncio.to_thread(result)


def _table(rows: Iterable[Iterable[object]]) -> str:
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
