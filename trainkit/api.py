"""Provides the Python API: `submit`, `sweep` and `map_array` start runs and return a `Run` or a `Group`.

Runs started from Python have the same run folders as runs started from the command line, so ``trainkit
status`` also shows them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast, overload

from trainkit.arguments import Arguments, meant_of_submitit, shown_argument, shown_value
from trainkit.backend import backend_named
from trainkit.backends.jobs import Waiting, liveness_probe
from trainkit.control.cancel import cancel_group, cancel_run
from trainkit.errors import ConfigError, Problem, TrainkitError, UsageError, print_note, warn_caller
from trainkit.formats import MASK, did_you_mean, plural, rank_list, shown, size, there_are
from trainkit.function import (
    ARGV,
    CALL_FILE,
    CALLS_FOLDER,
    Call,
    Result,
    by_value,
    call_file,
    dumps,
    read_pickle,
)
from trainkit.observe.current import look_at, query_group
from trainkit.observe.group import GroupStatus, TrialStatus, state_counts
from trainkit.observe.logs import log_of, ranks_of_nodes, run_is_over
from trainkit.observe.notebook import details, paragraph, shortened, sparkline, table
from trainkit.observe.status import ACTIVE_STATES, RunStatus
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.end import NO_RESULT, AttemptEnd, read_end
from trainkit.run.events import best_result, read_metrics
from trainkit.run.files import read_object, write_atomic, write_json
from trainkit.run.group import RunGroup, create_task_run, group_of
from trainkit.run.history import MetricsHistory, read_plan
from trainkit.run.owner import refuse_foreign
from trainkit.run.record import read_job
from trainkit.run.registry import find_run, find_run_or_group, iter_known_runs
from trainkit.run.rollbacks import ranges_of
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.trial import group_values, trial_values, values_of
from trainkit.shipped import in_order, launchers

if TYPE_CHECKING:
    # Only type checkers import typing_extensions: `typing.TypeVar` has no `default=` before Python 3.13.
    import typing_extensions as types

    from trainkit.config import LoadedConfig
    from trainkit.launch.config_request import ConfigRequest
    from trainkit.launch.sweep import ArraySpec, LoadedTrial

    Args = types.TypeVarTuple("Args")
    Returned = types.TypeVar("Returned", default=types.Never)
    """The type that a function returns. A run of a config or a command has no result."""
    Value = types.TypeVar("Value", covariant=True, default=Any)
else:
    Value = TypeVar("Value", covariant=True)

Config = str | Path | Mapping[str, Any] | None
"""A config file, the name of a built-in config, or the config sections as a dictionary or OmegaConf
``DictConfig``."""
After: TypeAlias = "str | Path | Run | Iterable[str | Path | Run]"
"""Runs and groups, given by name, folder or object, that must finish before a new run starts."""
POLL_S = 0.2
REASON_AFTER_S = 5.0
"""Seconds of waiting for a run after which the reason for the wait is printed to stderr."""
GROUP_POLL_S = 2.0
SLURM_POLL_S = 10.0
"""Seconds between two Slurm queries about the same group."""
MAX_SHOWN_BYTES = 2**20
"""Maximum size, in bytes, of a result file that is loaded to show the result in a notebook table."""


class RunError(TrainkitError):
    """Raised if a run failed, was cancelled or was deleted, and therefore has no result."""


class RemoteTraceback(Exception):
    """The traceback of an exception raised by a run's function, set as the `__cause__` of that exception."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def submit(
    work: Callable[[types.Unpack[Args]], Returned] | Config = None,
    /,
    *args: types.Unpack[Args],
    config: Config = None,
    command: Sequence[str | os.PathLike[str] | float] = (),
    launcher: str = "python",
    run_dir: str | Path | None = None,
    profile: str | None = None,
    after: After = (),
    now: bool = False,
    **options: Any,
) -> Run[Returned]:
    """Start a run on Slurm or in the background on this machine, like ``trainkit submit``.

    `work` is a config for the built-in trainer, or a function that each rank calls with `args`. `Run.result`
    returns the function's return value. To pass keyword arguments to the function, use `functools.partial`.
    Options with the same name as one of the function's parameters are rejected. `command` is a program to run
    instead of `work`, optionally through a `launcher` such as ``torchrun``. For a function or a command,
    `config` configures the job. The run starts after the runs in `after` have finished.

    `options` are command-line options, such as ``nodes=2``, ``gpus_per_node=4``, ``time="1:00:00"``,
    ``name``, ``note`` and ``tags``, and sections of the config, such as ``train={"steps": 50}``. Raises
    UsageError, ConfigError or SlurmError, each with a `hint`, before any run starts.
    """
    calls = {0: _call(work, args)} if callable(work) else {}
    given = _given(work, config, profile, options, after, run_dir, command, launcher, now, calls=calls)
    from trainkit.launch.sweep import LoadedTrial

    if args and given.function is None:
        hint = "a function takes arguments; submit(function, 1, 2) calls function(1, 2)"
        raise UsageError(f"{plural(len(args), 'argument')}, but no function to pass it to", hint=hint)
    given, loaded = _loaded(given)
    values = [trial_values(Arguments(call).given) for call in calls.values()]
    return Run(_start(given, [LoadedTrial(0, {}, loaded)], None, calls, values))


def sweep(
    work: Callable[..., Returned] | Config,
    values: Mapping[str, Iterable[object]],
    /,
    *,
    limit: int | None = None,
    config: Config = None,
    run_dir: str | Path | None = None,
    after: After = (),
    profile: str | None = None,
    **options: Any,
) -> Group[Returned]:
    """Start a run for each combination of `values`, at most `limit` at a time, like ``submit --sweep``.

    The keys of `values` are config keys or, if `work` is a function, names of its keyword arguments.
    Without a `limit`, Slurm decides how many runs to execute at a time. On this machine, runs are executed
    one after another if no `limit` is given. Raises the same errors as `submit`.
    """
    axes = _axes(values, of_function=callable(work))
    found = [dict(zip(axes, trial, strict=True)) for trial in itertools.product(*axes.values())]
    calls = {index: _call(work, (), own) for index, own in enumerate(found)} if callable(work) else {}
    given = _given(work, config, profile, options, after, run_dir, limit=limit, calls=calls)
    if given.function is not None:
        return _start_calls(given, calls, limit, group_values(found))
    if twice := [key for key, _, _ in _keys_of(options) if key in axes]:
        raise UsageError(f"{twice[0]} is given both as an option and in the values", hint="omit one of them")
    from trainkit.launch.sweep import ArraySpec, swept

    array = ArraySpec(tuple(range(len(found))), limit)
    return Group(_start(given, swept(given.request, found), array))


def map_array(
    function: Callable[..., Returned],
    /,
    *iterables: Iterable[Any],
    limit: int | None = None,
    config: Config = None,
    run_dir: str | Path | None = None,
    after: After = (),
    profile: str | None = None,
    **options: Any,
) -> Group[Returned]:
    """Start a run of a function for each item of `iterables`, at most `limit` at a time, as one group.

    Like the built-in `map`, `map_array` stops at the end of the shortest iterable. Raises the same errors as
    `submit`.
    """
    if not callable(function):
        raise UsageError(
            f"{function!r} is not a function", hint="use `trainkit.sweep` to start several runs of a config"
        )
    for one in iterables:
        if not isinstance(one, Iterable):
            what = f"{shown_value(one)} is a single value, not a list"
            raise UsageError(
                what, hint="pass a list with one item per run; to start a single run, use `submit`"
            )
    from trainkit.plan.sweep import MAX_TRIALS

    found = list(itertools.islice(zip(*iterables, strict=False), MAX_TRIALS + 1))
    _refuse_too_many(len(found), MAX_TRIALS)
    calls = {index: _call(function, args) for index, args in enumerate(found)}
    given = _given(function, config, profile, options, after, run_dir, limit=limit, calls=calls)
    common = Arguments(_call(function, ())).given  # functools.partial objects have a `func` attribute
    items = [Arguments(call).given for call in calls.values()]
    values = group_values([{key: own[key] for key in own if key not in common} for own in items])
    return _start_calls(given, calls, limit, values)


def as_completed(runs: Iterable[Run[Value]], timeout_s: float | None = None) -> Iterator[Run[Value]]:
    """Yield the runs of a group or list as they end.

    Raises TimeoutError if a run has not ended `timeout_s` seconds after the first iteration.
    """
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for ended, poll_s in runs._rounds() if isinstance(runs, Group) else _rounds(runs, until_s):
        yield from ended
        if time.monotonic() > until_s and poll_s:
            raise TimeoutError(f"not all runs have ended after {timeout_s} s")
        time.sleep(max(0.0, min(poll_s, until_s - time.monotonic())))


def _rounds(runs: Iterable[Run[Value]], until_s: float) -> Iterator[tuple[list[Run[Value]], float]]:
    """Yield the runs that ended since the last round of polling, and the seconds until the next round.

    In the last round, the seconds until the next round are 0. Each run is polled at its polling interval and
    once more after `until_s`. Slurm is queried once per round and group.
    """
    asked: dict[Path, GroupStatus] = {}

    def ask(group: RunGroup) -> GroupStatus:
        if group.path not in asked:
            asked[group.path] = query_group(group, warn_caller)
        return asked[group.path]

    found = list(runs) if isinstance(runs, Iterable) else [runs]
    if wrong := [one for one in found if not isinstance(one, Run)]:
        raise UsageError(f"{shown_value(wrong[0])} is not a run", hint="pass a group, or a list of runs")
    left = [(run, run._polls(ask), 0.0) for run in found]
    while left:
        asked.clear()
        now, ended, others = time.monotonic(), [], []
        for run, polls, due_s in left:
            if now < min(due_s, until_s):
                others.append((run, polls, due_s))
            elif (poll_s := next(polls, None)) is None:
                ended.append(run)
            else:
                others.append((run, polls, now + poll_s))
        left = others
        yield ended, max(1e-3, min(due_s for _, _, due_s in left) - now) if left else 0.0


def runs() -> list[Run | Group]:
    """Return all runs and groups in this machine's registry, newest first."""
    return [(Group if isinstance(known, RunGroup) else Run)(known.path) for known in iter_known_runs()]


class Run(Generic[Value]):
    """A run, given by its folder, job id or name, or by ``last`` for the newest run in the current folder.

    A run whose function returns an int is a ``Run[int]``, and its `result` is an int. Raises UsageError if no
    run or more than one run matches.
    """

    def __init__(self, run: str | Path | RunDir) -> None:
        self._folder = run if isinstance(run, RunDir) else find_run(str(run), acts=True)

    @property
    def path(self) -> Path:
        """The folder of the run. For a run in a group, the folder may not exist until the run starts."""
        return self._folder.path

    @property
    def name(self) -> str:
        """The name of the run, which defaults to the name of its config, script or function."""
        return read_job(self._folder).name or self.path.name

    @property
    def status(self) -> RunStatus:
        """The status shown by ``trainkit status``: ``state``, ``reason``, ``attempt``, ``job_id`` and others.

        ``progress`` contains ``step`` and ``loss``. ``place`` contains the host and the number of nodes.
        """
        return self._status(warn_caller)

    def _status(self, warn: Callable[[str], None]) -> RunStatus:
        return look_at(self._folder, warn)[1]

    def _trial(self, ask: Callable[[RunGroup], GroupStatus]) -> TrialStatus | None:
        """Return the status of the run as a trial of its group, or None once the run has started."""
        found = None if self._folder.attempt_numbers() else group_of(self._folder)
        if found is None:
            return None
        return next(trial for trial in ask(found[0]).trials if trial.index == found[1])

    def done(self) -> bool:
        """Return whether the run has ended and will not be restarted automatically."""
        return not self.status.is_active

    def wait(self, timeout_s: float | None = None) -> Run[Value]:
        """Wait until the run has ended, including all restarts; raise TimeoutError after `timeout_s`."""
        _wait(self._polls(), timeout_s, self.path)
        return self

    def _polls(self, ask: Callable[[RunGroup], GroupStatus] | None = None) -> Iterator[float]:
        """Until the run has ended, yield the seconds before each poll. `ask` queries the run's group."""
        ask = ask or partial(query_group, warn=warn_caller)
        waiting = Waiting(print_note, REASON_AFTER_S)
        while (trial := self._trial(ask)) is not None:
            if trial.state not in ACTIVE_STATES:
                return
            waiting.look(trial.problem and f"{self._folder.shown} {trial.state}: {trial.problem}")
            yield _group_poll_s(RunGroup(self.path.parent))
        is_alive = liveness_probe(self._folder, print_note, REASON_AFTER_S)
        while not run_is_over(self._folder, is_alive()):
            yield POLL_S

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, one per step, ready for ``pandas.DataFrame``."""
        return read_metrics(self._folder)

    def logs(self, rank: int = 0) -> str:
        """Return the output of a rank in the newest attempt; raise UsageError if the rank does not exist."""
        attempt = self._folder.attempt(max(self._folder.attempt_numbers(), default=0))
        nodes = ranks_of_nodes(plan := read_plan(attempt))  # The plan is empty before the attempt starts.
        if nodes and not 0 <= rank < nodes[-1].stop:
            raise UsageError(
                f"{self._folder.shown} has no rank {rank}", hint=there_are(range(nodes[-1].stop))
            )
        log = log_of(attempt, plan, rank)
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def cancel(self, *, now: bool = False, wait: bool = False) -> None:
        """Ask the run to save and exit, or kill it if `now` is set.

        If `wait` is set, returns after the run has ended.
        """
        refuse_foreign(self._folder.path, "use `trainkit cancel --trust` to cancel the run anyway")
        cancel_run(create_task_run(self._folder), now=now, wait=wait, warn=warn_caller)

    def resume(
        self,
        *,
        from_step: int | None = None,
        skip_samples: Iterable[range] = (),
        new_code: bool = False,
        now: bool = False,
        **options: Any,
    ) -> Run[Value]:
        """Start the next attempt from the newest intact checkpoint. `options` are the options of `submit`.

        With `from_step`, the run goes back to the checkpoint of this step. With `skip_samples`, the run
        leaves out the samples at these positions of the training data, such as ``[range(320, 560)]``.
        """
        from trainkit.control.resume import planned_resume, resume_run
        from trainkit.control.rollback import RollbackRequest

        run = create_task_run(self._folder)
        refuse_foreign(run.path, "use `trainkit resume --trust` to execute it under your account anyway")
        request = RollbackRequest.of(from_step, ranges_of(skip_samples))
        planned = planned_resume(
            run, (), _flags({}, options), warn=warn_caller, new_code=new_code, request=request
        )
        with planned as found:
            for text in found.plan.warnings:
                warn_caller(text)
            rollback = found.rollback
            resume_run(run, found.loaded.config, found.plan, new_code=new_code, now=now, rollback=rollback)
        return self

    def result(self, timeout_s: float | None = None) -> Value:
        """Wait until the run has ended, and return the value that its function returned on rank 0.

        If the function raised an exception, raises the same exception with a `RemoteTraceback` as its cause.
        Raises RunError if the run has no result and no exception, and TimeoutError after `timeout_s`.
        """
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Value]:
        """Return the values that the function returned on all ranks; raises the same errors as `result`."""
        self.wait(timeout_s)
        if not (numbers := self._folder.attempt_numbers()):
            raise self._error(None)
        refuse_foreign(
            self._folder.path,
            "ask the owner for the data in another format: loading a result executes code in its file",
        )
        attempt = self._folder.attempt(numbers[-1])
        end = read_end(attempt)
        verdict = None if end is None else end.verdict
        files = {
            int(file.stem[5:]): file for file in sorted(attempt.rank_result(0).parent.glob("rank-*.pkl"))
        }
        if verdict is not None and verdict.rank is not None:
            # Load the result of the rank that failed first. Other ranks may have failed only because of this
            # failure.
            files = {verdict.rank: files[verdict.rank], **files} if verdict.rank in files else {}
        found = {rank: self._loaded(attempt, rank, file) for rank, file in files.items()}
        for result in found.values():
            if result.error is not None:
                raise result.error from RemoteTraceback(result.traceback)
            if result.traceback:
                raise RunError(f"the function of {self._folder.path} raised:\n\n{result.traceback}")
        left = verdict.rank if verdict is not None and verdict.type == NO_RESULT else None
        is_over = end is not None and (end.state == "finished" or left is not None)
        if not is_over or not call_file(self._folder).exists():
            raise self._error(end)
        ranks = range(LaunchPlan.read(attempt.plan_file).world_size)
        if missing := [rank for rank in ranks if rank not in found and left in (None, rank)]:
            what = f"{rank_list(missing)} of {self._folder.path} wrote no result"
            raise RunError(
                what,
                hint="let the function return: `os._exit` exits before the result is written",
            )
        return [found[rank].value for rank in ranks]

    def _loaded(self, attempt: AttemptDir, rank: int, file: Path) -> Result:
        """Load the result of a rank; raise RunError if this process cannot import a required module."""
        try:
            return cast("Result", read_pickle(file))
        except (OSError, UsageError):
            raise
        except Exception as error:
            if trace := read_object(attempt.rank_error(rank)).get("traceback"):
                raise RunError(f"the function of {self._folder.path} raised:\n\n{trace}") from error
            what = f"the result of rank {rank} of {self._folder.path} cannot be loaded in this process"
            hint = (
                "load the result where the same modules and devices are available, or let the function "
                "return plain values and CPU tensors"
            )
            raise RunError(f"{what}: {type(error).__name__}: {error}", hint=hint) from error

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """Wait until the run has ended, and return the exception that `result` would raise, or None."""
        self.wait(timeout_s)
        try:
            self.results()
        except Exception as error:
            return error
        return None

    def _error(self, end: AttemptEnd | None) -> RunError:
        shown, word = self._folder.shown, self._folder.quoted
        if end is not None and end.state == "finished":
            return RunError(f"{shown} has no result", hint="only runs of a function have a result")
        status = self.status
        what = f"{shown} is {status.state}" + (f": {status.reason}" if status.reason else "")
        if status.failure is not None:
            return RunError(what, hint=f"run `trainkit diagnose {word}` to see the cause")
        return RunError(what, hint=f"`trainkit resume {word}`, or the resume() method, continues the run")

    def __await__(self) -> Generator[Any, None, Value]:
        return _after(self._polls(), self.result).__await__()

    def __repr__(self) -> str:
        return f"Run({str(self._folder.path)!r})"

    def _repr_html_(self) -> str:
        warnings = list[str]()
        try:
            status = self._status(warnings.append)
            best = best_result(self._folder)
            after: dict[str, dict[str, object]] = {
                "state": {"values": shown(values_of(self._folder)) or None},
                "loss": {"curve": _curve(self._folder)},
                "val_loss": {
                    "best": best and f"{best.metric} {best.value:.4g} at step {best.step}",
                    "result": self._shown_result(status.state),
                },
                "folder": {"warning": "; ".join(warnings) or None},
            }
            return details(in_order(status.shown(), after))
        except (OSError, TrainkitError) as error:
            return details({"folder": str(self.path), "error": str(error)})

    def _shown_result(self, state: str) -> str | None:
        """Return the function's return value on rank 0 as text for a table, or None if the value is large."""
        numbers = self._folder.attempt_numbers() if state == "finished" else []
        file = self._folder.attempt(numbers[-1]).rank_result(0) if numbers else None
        if file is None or not file.exists():
            return None
        if file.stat().st_size > MAX_SHOWN_BYTES:
            return f"{size(file.stat().st_size)}; call result() to load it"
        try:
            refuse_foreign(self._folder.path, "")
            return shortened(self._loaded(self._folder.attempt(numbers[-1]), 0, file).value)
        except (OSError, TrainkitError) as error:
            return f"cannot be shown: {error}"


class Group(Sequence[Run[Value]]):
    """A sequence of the `Run` objects in a group, identified by the group's folder or name.

    The items of a ``Group[int]`` are ``Run[int]`` objects. Raises UsageError if no group matches.
    """

    def __init__(self, group: str | Path) -> None:
        found = find_run_or_group(str(group), acts=True)
        if not isinstance(found, RunGroup):
            raise UsageError(f"{found.path} is a single run, not a group", hint="Run(…) opens it")
        self._group = found
        self._indices = sorted(found.trials)

    @property
    def path(self) -> Path:
        """The folder of the group."""
        return self._group.path

    @property
    def name(self) -> str:
        """The name of the group, which defaults to the name of its config or function."""
        return self._group.name

    @property
    def status(self) -> GroupStatus:
        """The status shown by ``trainkit status``: the state and result of each run."""
        return query_group(self._group, warn_caller)

    def best(self, metric: str | None = None) -> Run[Value] | None:
        """Return the best run by `metric`, or None if no run has a result.

        The default metric is the metric that ``trainkit status`` uses. Runs that have diverged are never the
        best. Raises UsageError if no run has logged the metric.
        """
        best = query_group(self._group, warn_caller, metric).best
        return None if best is None else Run(self._group.run(best.index))

    @overload
    def __getitem__(self, index: int) -> Run[Value]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Run[Value]]: ...
    def __getitem__(self, index: int | slice) -> Run[Value] | list[Run[Value]]:
        chosen = self._indices[index]
        if isinstance(chosen, int):
            return Run(self._group.run(chosen))
        return [Run(self._group.run(one)) for one in chosen]

    def __len__(self) -> int:
        return len(self._indices)

    def wait(self, timeout_s: float | None = None) -> Group[Value]:
        """Wait until all runs have ended; raise TimeoutError after `timeout_s`."""
        _wait(self._polls(), timeout_s, self.path)
        return self

    def _polls(self) -> Iterator[float]:
        waiting = Waiting(print_note, REASON_AFTER_S)
        while (status := self.status).is_active:
            waiting.look(_queued(status))
            yield _group_poll_s(self._group)

    def _rounds(self) -> Iterator[tuple[list[Run[Value]], float]]:
        """Yield rounds like the function `_rounds`, but query all runs of the group at once."""
        left, waiting = {*self._indices}, Waiting(print_note, REASON_AFTER_S)
        while left:
            waiting.look(_queued(status := self.status))
            over = [one.index for one in status.trials if one.state not in ACTIVE_STATES]
            ended = [index for index in over if index in left]
            left.difference_update(ended)
            yield [Run(self._group.run(one)) for one in ended], _group_poll_s(self._group) if left else 0.0

    def results(self, timeout_s: float | None = None) -> list[Value]:
        """Return the result of each run, in order; raise the error of the first run without a result."""
        self.wait(timeout_s)
        return [run.result() for run in self]

    def cancel(self, *, now: bool = False, wait: bool = False) -> None:
        """Cancel all runs that have not ended."""
        cancel_group(self._group, now=now, wait=wait)

    def resume(self) -> Group[Value]:
        """Continue the group: run its unfinished trials on this machine, or submit the rest to Slurm."""
        from trainkit.control.resume import resume_group

        if self._group.record.process is None and not self._group.unsubmitted:
            raise UsageError(
                f"{self.path} is a Slurm array", hint="resume individual runs, for example group[0].resume()"
            )
        resume_group(self._group)
        return self

    def __await__(self) -> Generator[Any, None, list[Value]]:
        return _after(self._polls(), self.results).__await__()

    def __repr__(self) -> str:
        return f"Group({str(self.path)!r})"

    def _repr_html_(self) -> str:
        warnings = list[str]()
        try:
            status = query_group(self._group, warnings.append)
            runs = [(Run(self._group.run(one.index)), one.state) for one in status.shown_trials]
            *own, reasons = status.columns()
            curves = ("loss", [_curve(run._folder) for run, _ in runs])
            results = ("result", [run._shown_result(state) for run, state in runs])
            lines = [paragraph(text) for text in (status.summary(), *warnings)]
            return "".join(lines) + table([*own, curves, results, reasons])
        except (OSError, TrainkitError) as error:
            return details({"folder": str(self.path), "error": str(error)})


def _curve(run: RunDir) -> str | None:
    """Plot the loss curve of a run as a small inline image."""
    metrics = MetricsHistory(run.metrics_file)
    metrics.update()
    return sparkline(metrics.curve("loss"), "loss")


def _axes(values: Mapping[str, Iterable[object]], *, of_function: bool) -> dict[str, list[object]]:
    """Return a list of values for each key of a sweep; raise UsageError if a key's values are not a list."""
    from trainkit.plan.sweep import MAX_TRIALS, refuse_axis

    if not isinstance(values, Mapping):
        hint = 'pass a mapping, such as {"optimizer.lr": [1e-4, 3e-4]}'
        raise UsageError(f"{shown_value(values)} has no keys", hint=hint)
    axes = dict[str, list[object]]()
    for key, own in values.items():
        if not isinstance(key, str):
            raise UsageError(
                f"{key!r} is not a key", hint="pass a config key, or the name of a parameter, as a string"
            )
        if not isinstance(own, Iterable) or isinstance(own, str | bytes | Mapping):
            hint = f"pass a list: {{{key!r}: [{shown_value(own)}]}}"
            raise UsageError(
                f"the values of {key} are {shown_value(own)}, which is a single value", hint=hint
            )
        axes[key] = list(itertools.islice(own, MAX_TRIALS + 1))
        if not axes[key]:
            raise UsageError(f"{key} has no values", hint="specify at least one value, or omit the key")
        if not of_function:
            axes[key] = [_written(key, value) for value in axes[key]]
            refuse_axis(key, axes[key], f"sweep of {key}")
    _refuse_too_many(math.prod(map(len, axes.values())), MAX_TRIALS)
    return axes


def _written(key: str, value: object) -> object:
    """Convert a value to types that a config file can contain; raise UsageError if that is impossible."""
    plain = _plain(value)
    try:
        json.dumps(plain)
    except (TypeError, ValueError):
        hint = "use strings, numbers, lists and mappings; only the arguments of a function can be any object"
        raise UsageError(f"{key} cannot be {shown_value(value)}", hint=hint) from None
    return plain


def _refuse_too_many(count: int, limit: int) -> None:
    if count > limit:
        raise UsageError(
            f"more than {limit:,} runs", hint="specify fewer values, or do more work in each run"
        )


class _Given(NamedTuple):
    """The validated arguments of `submit`, `sweep` or `map_array`."""

    request: ConfigRequest
    workload: Workload
    function: Callable[..., Any] | None
    after: list[str]
    run_dir: Path | None
    now: bool


def _given(
    work: Callable[..., Any] | Config,
    config: Config,
    profile: str | None,
    options: Mapping[str, object],
    after: After = (),
    run_dir: str | Path | None = None,
    command: Sequence[str | os.PathLike[str] | float] = (),
    launcher: str = "python",
    now: bool = False,
    limit: int | None = None,
    *,
    calls: Mapping[int, Call] = {},
) -> _Given:
    from trainkit.launch.config_request import ConfigRequest

    function, argv, arguments = work if callable(work) else None, _words(command), None
    config = _config_of(work, config, argv)
    for place, value in {"profile": profile, "run_dir": run_dir}.items():
        if value is not None and not (isinstance(value, str | Path) and str(value)):
            raise UsageError(
                f"{place} cannot be {shown_value(value)}", hint=f"specify a value, or omit {place}"
            )
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UsageError(
            f"limit={limit!r} is not a valid number of runs", hint="specify at least 1, or omit limit"
        )
    earlier = list(after) if isinstance(after, Iterable) and not isinstance(after, str | Group) else [after]
    if function is not None:
        own: dict[str, object] = {"config": config, "profile": profile, "run_dir": run_dir, "limit": limit}
        own |= {
            "after": earlier or None,
            "now": now or None,
            "launcher": None if launcher == "python" else launcher,
        }
        own = {name: value for name, value in own.items() if value is not None}
        arguments = Arguments(next(iter(calls.values()), Call(function)))
        _refuse_meant_for_function(arguments, options, own)
        for call in calls.values():
            Arguments(call).refuse()
    workload = _workload(argv, launcher, function)
    path = str(config) if isinstance(config, str | Path) else ""
    sections = {} if isinstance(config, str | Path | None) else config
    name = argv
    if function is not None:
        named = getattr(function, "func", function)  # functools.partial objects have a `func` attribute
        name = (str(getattr(named, "__name__", type(named).__name__)).strip("<>_") + ".py",)
    request = ConfigRequest(path, profile, (), _flags(sections, options, arguments), name)
    where = None if run_dir is None else Path(run_dir)
    return _Given(request, workload, function, [*map(_name_of_run, earlier)], where, now)


def _config_of(work: Callable[..., object] | Config, config: Config, argv: Sequence[str]) -> Config:
    """Return the config passed to `submit`; raise UsageError unless exactly one kind of work is given."""
    if work is not None and argv:
        what, hint = "function", "omit one of them"
        if not callable(work):
            what, hint = "config", f"config={shown_value(work)} sets the config of a command"
        raise UsageError(f"a {what} and a command cannot be combined", hint=hint)
    if work is None and not argv:
        hint = "pass a config or a function as the first argument, or command=[…], optionally with config="
        raise UsageError("there is nothing to run", hint=hint)
    if not callable(work) and work is not None:
        if config is not None:
            hint = "pass changes as options, such as train={…}; config= is only for a function or a command"
            raise UsageError("two configs are given", hint=hint)
        config = work
    hint = "pass a path, the name of a shipped config, or a mapping of keys"
    if isinstance(config, str | Path):
        from trainkit.config.layers import SCRIPTS

        if program := SCRIPTS.get(Path(config).suffix):
            words = config.split() if isinstance(config, str) else [str(config)]
            argv = words if len(words) > 1 else [program, *words]
            raise UsageError(f"{config} is a script, not a config", hint=f"write command={argv!r}")
        if not str(config).strip():
            raise UsageError("the config is empty", hint=hint)
    elif not isinstance(config, Mapping | None):
        hint = f"to run a program, use command={config!r}" if isinstance(config, list | tuple) else hint
        raise UsageError(f"a config cannot be {shown_value(config)}", hint=hint)
    return config


def _name_of_run(run: object) -> str:
    """Return a run or group as a string that `--after` accepts."""
    if isinstance(run, Run | Group):
        return str(run.path)
    if not isinstance(run, str | Path):
        hint = "pass names, folders, or the objects that `submit` returned"
        raise UsageError(f"after contains {shown_value(run)}, which is not a run", hint=hint)
    return str(run)


def _words(command: Sequence[str | os.PathLike[str] | float]) -> tuple[str, ...]:
    """Return the arguments of a command; raise UsageError if `command` is not a list of arguments."""
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError as error:  # raised by shlex for an unclosed quote
            raise UsageError(f"command={command!r}: {error}", hint="pass a list of arguments") from None
        hint = f"pass a list: command={words!r}"
        raise UsageError(f"command={command!r} is a string, not a list of arguments", hint=hint)
    if not isinstance(command, Sequence) or isinstance(command, bytes):
        hint = 'pass a list: command=["python", "train.py"]'
        raise UsageError(f"command={shown_value(command)} is not a list of arguments", hint=hint)
    for word in command:
        if not isinstance(word, str | os.PathLike | Real) or isinstance(word, bool):
            what = f"command contains {shown_value(word)}, which is not a string, number or path"
            raise UsageError(what, hint="str(…) converts any value to a string")
    return tuple(os.fsdecode(word) if isinstance(word, str | os.PathLike) else str(word) for word in command)


def _workload(argv: tuple[str, ...], launcher: str, function: Callable[..., object] | None) -> Workload:
    """Return the workload of the ranks; raise UsageError if the launcher cannot start it."""
    known = ("python", *launchers())
    if launcher not in known:
        hint = f"{did_you_mean(str(launcher), known)}launchers are {', '.join(known)}"
        raise UsageError(f"launcher={launcher!r} is unknown", hint=hint)
    if not argv:
        if launcher != "python":
            what = "a config" if function is None else "a function"
            hint = 'omit launcher, or combine it with command=["train.py"]'
            raise UsageError(f"launcher={launcher!r} has no effect on {what}", hint=hint)
        return TRAINER if function is None else Workload(ARGV)
    workload = Workload(argv, launcher)
    if workload.has_two_pythons:
        hint = f"omit the interpreter: command={[*argv[1:]] or ['train.py']!r}"
        raise UsageError(f"{launcher} starts Python itself, but the command begins with {argv[0]}", hint=hint)
    return workload


def _refuse_meant_for_function(
    arguments: Arguments, options: Mapping[str, object], own: Mapping[str, object]
) -> None:
    """Raise ConfigError for keyword arguments that are meant for the function, not for `submit` (`own`)."""
    from trainkit.launch.config_request import FLAGS

    run = Workload(ARGV)
    used = {name for name in options if run.uses(FLAGS.get(name, name))} | own.keys()
    meant = {
        name: value
        for name, value in {**options, **own}.items()
        if arguments.means(name, is_used=name in used)
        and (name in arguments.names or _is_known(name) or meant_of_submitit(name, value) is None)
    }
    if meant:
        raise ConfigError(
            [arguments.problem(meant, name, is_used=name in used, is_known=_is_known(name)) for name in meant]
        )


def _is_known(name: str) -> bool:
    """Return whether a name is a command-line option, or a section or key of the config."""
    from trainkit.config.schema import is_known
    from trainkit.launch.config_request import FLAGS

    return name in FLAGS or is_known(tuple(name.split(".")))


def _flags(
    config: Mapping[str, object], options: Mapping[str, object], arguments: Arguments | None = None
) -> dict[str, tuple[str, object]]:
    """Map dotted config keys to their values and the origins of these values; options override sections.

    `arguments` are the function's arguments, or None if the run has no function.
    """
    if type(config).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        config = cast("Mapping[str, Any]", OmegaConf.to_container(config, resolve=True))
    flags = {key: (f"config[{key!r}]", value) for key, value in _keys(config)}
    problems = [
        Problem(
            name, "unknown argument", shown_argument(name, value), _meant_argument(name, value, arguments)
        )
        for name, value in options.items()
        if not _is_known(name)
    ]
    if options.get("gpus_per_node") == 0:  # submitit accepts gpus_per_node=0 for a job without GPUs
        hint = meant_of_submitit("gpus_per_node", 0) or ""
        problems.append(Problem("gpus_per_node", "each node runs at least one rank", "gpus_per_node=0", hint))
    found = _keys_of(options)
    first = {key: name for key, _, name in reversed(found)}
    problems += [
        Problem(key, f"is also set by {first[key]}", shown_argument(name, options[name]), "give it once")
        for key, _, name in found
        if name != first[key]
    ]
    if problems:
        raise ConfigError(problems)
    return flags | {key: (f"{key}={value!r}", value) for key, value, _ in found}


def _keys_of(options: Mapping[str, object]) -> list[tuple[str, object, str]]:
    """Return the dotted keys set by options, each with its value and the option's name."""
    from trainkit.launch.config_request import FLAGS

    pairs = ((name, _keys({FLAGS.get(name, name): value})) for name, value in options.items())
    return [(key, value, name) for name, found in pairs for key, value in found]


_OF_OTHERS = {
    "limit": "only `map_array` and `sweep` accept it, to limit how many runs run at the same time",
    "now": "omit this option: the runs of a group always share the free resources",
    **dict.fromkeys(
        ("command", "launcher"),
        "only `submit` accepts it; to sweep a command, use `trainkit submit --sweep` in a shell",
    ),
}
"""Maps each argument that only some API functions accept to a hint, shown if another function receives the
argument."""


def _meant_argument(name: str, value: object, arguments: Arguments | None) -> str:
    """Return a hint for an unknown argument that shows the probably intended argument as Python code."""
    from trainkit.config.schema import meant
    from trainkit.launch.config_request import FLAGS

    if (written := _OF_OTHERS.get(name) or meant_of_submitit(name, value)) is not None:
        return written
    if arguments is not None and (parameter := arguments.near(name)) is not None:
        return f"did you mean `{arguments.bound({parameter: value})}`?"
    key = meant(tuple(name.split(".")))
    if key is None or (arguments is not None and not Workload(ARGV).uses(key)):
        return "`trainkit schema` prints every key"
    section, _, leaf = key.partition(".")
    options = {flag_key: argument for argument, flag_key in FLAGS.items()}
    return f"did you mean {options.get(key) or (section + (leaf and f'={{{leaf!r}: …}}'))}?"


def _keys(values: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values, flattening sections."""
    from trainkit.config.schema import sections

    for name, value in values.items():
        if name in sections() and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", _plain(one)) for key, one in value.items())
        else:
            yield name, _plain(value)


def _plain(value: object) -> object:
    """Convert a value to a YAML type: paths to strings, tuples to lists, numpy values to Python values."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    return str(value) if isinstance(value, Path) else value


def _call(function: Callable[..., Any], args: Iterable[object], kwargs: Mapping[str, object] = {}) -> Call:
    if isinstance(
        function, partial
    ):  # Keep the partial's function accessible, because it may have a `checkpoint` method.
        return _call(function.func, (*function.args, *args), {**function.keywords, **kwargs})
    return Call(function, tuple(args), dict(kwargs))


def _loaded(given: _Given) -> tuple[_Given, LoadedConfig]:
    """Load the config.

    A function uses the interpreter set in `launch`, which defaults to the current interpreter.
    """
    from trainkit.launch.environment import find_interpreter

    loaded = given.request.load_to_plan(given.workload)
    if given.function is not None:
        argv = find_interpreter(loaded.config.launch, Path.cwd())[0].argv
        given = given._replace(workload=replace(given.workload, argv=(*argv, *given.workload.argv[1:])))
    return given, loaded


def _start_calls(
    given: _Given, calls: Mapping[int, Call], limit: int | None, values: Sequence[dict[str, object]]
) -> Group:
    """Start a group of calls. `values` contains each call's arguments for display in tables of the group."""
    from trainkit.launch.sweep import ArraySpec, LoadedTrial

    if not calls:
        raise UsageError("there is nothing to call", hint="each item becomes one run: pass at least one item")
    given, loaded = _loaded(given)
    trials = [LoadedTrial(index, {}, loaded) for index in calls]
    return Group(_start(given, trials, ArraySpec(tuple(calls), limit), calls, values))


def _start(
    given: _Given,
    trials: Iterable[LoadedTrial],
    array: ArraySpec | None,
    calls: Mapping[int, Call] = {},
    values: Sequence[dict[str, object]] = (),
) -> Path:
    """Start a run or a group and return its folder.

    `values` contains each call's arguments, for display only.
    """
    from trainkit.launch.create import create_submission, start_submission
    from trainkit.launch.submission import plan_submission, submission_warnings

    submission = plan_submission(trials, array, given.workload, after=given.after, warn=warn_caller)
    if given.now and submission.plan.is_job:
        raise UsageError(
            "now applies only to runs on this machine, but this run goes to Slurm", hint="omit it"
        )
    found = submission_warnings(submission, given.run_dir, given.workload, starts=True)
    for text in (*submission.plan.warnings, *found):
        warn_caller(text.strip().removeprefix("warning: "))
    backend_named(submission.plan.backend).require_reachable(submission.plan)
    with nullcontext() if given.function is None else by_value(given.function):
        pickles = {
            index: dumps(call) for index, call in calls.items()
        }  # This call raises an error before any folder is created.
    if values:
        pairs = zip(submission.trials, values, strict=True)
        own = [replace(trial, values=_without_leaks(one, trial.config.secrets)) for trial, one in pairs]
        submission = replace(submission, trials=own)
    created = create_submission(submission, [*sys.orig_argv], given.run_dir, "run_dir")
    folder = created.run.path
    if array is not None and pickles:
        (folder / CALLS_FOLDER).mkdir(mode=0o700)
    for index, content in pickles.items():
        write_atomic(folder / CALL_FILE if array is None else folder / CALLS_FOLDER / f"{index}.pkl", content)
    if array is None and submission.trials[0].values:
        write_json(created.run.values_file, submission.trials[0].values)
    start_submission(submission, created, now=given.now)
    return folder


def _without_leaks(values: Mapping[str, object], secrets: Sequence[str]) -> dict[str, object]:
    """Return `values`, masking each value that contains the value of a secret environment variable."""
    from trainkit.launch.secrets import leaked

    found = {key: leaked(str(value), secrets, os.environ) for key, value in values.items()}
    return {key: value if found[key] is None else MASK for key, value in values.items()}


def _group_poll_s(group: RunGroup) -> float:
    return SLURM_POLL_S if group.record.process is None else GROUP_POLL_S


def _queued(status: GroupStatus) -> str:
    """Return why no run of a group is running yet; empty if a run is running or the reason is unknown."""
    queued = [trial for trial in status.trials if trial.state in ("pending", "requeueing")]
    reason = next((trial.problem for trial in queued if trial.problem), "")
    if not reason or status.states.keys() & {"starting", "running", "paused", "stopping", "restarting"}:
        return ""
    return f"{status.name}: {state_counts(status.states)}: {reason}"


def _wait(polls: Iterator[float], timeout_s: float | None, path: Path) -> None:
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for poll_s in polls:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{path} has not ended after {timeout_s} s")
        time.sleep(max(0.0, min(poll_s, until_s - time.monotonic())))


async def _after(polls: Iterator[float], result: Callable[[], Any]) -> Any:
    import asyncio  # Importing asyncio takes as long as importing the rest of this module.

    while (poll_s := await asyncio.to_thread(next, polls, None)) is not None:
        await asyncio.sleep(poll_s)
    return await asyncio.to_thread(result)
