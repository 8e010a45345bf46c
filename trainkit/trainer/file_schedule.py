"""Load the learning rate schedule that a user defines in a file, and check the values that it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from trainkit.config.schema import RunConfig
from trainkit.config.training import ScheduleConfig
from trainkit.run.rundir import RunDir
from trainkit.trainer.user_code import TRACEBACK_HINT, TaskError, describe, line_of, named_in_file

NAME = "schedule.name"
HINT = "FILE.py:FUNCTION names a function(step, total_steps); FILE.py is relative to the current folder"
VALUE_HINT = "return the learning rate of the step as a fraction of optimizer.lr, such as 0.5"
MAX_TRIED_STEPS = 10_000
"""Maximum number of steps for which the schedule is computed before a run starts."""


@dataclass(frozen=True)
class FileSchedule:
    """A user's function that maps a step and the number of steps to a fraction of the peak learning rate."""

    name: str
    function: Callable[[int, int], object]

    def __call__(self, step: int, total_steps: int) -> float:
        """Return the fraction of the peak learning rate for a step, from 1 to `total_steps`.

        Raises TaskError if the function fails, or does not return a finite number of at least 0.
        """
        try:
            value = self.function(step, total_steps)
        except Exception as error:
            message = f"is {self.name}, which failed at step {step} of {total_steps}: {describe(error)}"
            raise TaskError(NAME, message, TRACEBACK_HINT) from error
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if not (math.isfinite(number) and number >= 0):
            found = f"{value!r} at step {step} of {total_steps}{line_of(self.function)}"
            message = f"is {self.name}, which returned {found}, not a finite number of at least 0"
            raise TaskError(NAME, message, VALUE_HINT)
        return number


def load_schedule(schedule: ScheduleConfig, run: RunDir | None = None) -> FileSchedule | None:
    """Return the function that `schedule.name` specifies as FILE.py:FUNCTION; None for trainkit's schedules.

    If `run` is given, the file is loaded from the run's code snapshot. Raises TaskError if the function
    cannot be imported, or does not take two arguments.
    """
    if not schedule.is_own:
        return None
    path, found = named_in_file(NAME, schedule.name, HINT, run)
    function_name = schedule.name.rpartition(":")[2]
    if not callable(found) or isinstance(found, type):
        raise TaskError(
            NAME, f"is {schedule.name}, but {path} does not define {function_name} as a function", HINT
        )
    try:
        inspect.signature(found).bind(1, 2)
    except TypeError as error:
        message = f"is {schedule.name}, but {function_name}{line_of(found)} does not fit: {error}"
        raise TaskError(NAME, message, f"define {function_name}(step, total_steps)") from None
    return FileSchedule(schedule.name, found)


def refuse_schedule(config: RunConfig) -> None:
    """Raise TaskError if the schedule in a file cannot be used, or fails at one of the steps of the run.

    The number of steps is unknown if `train.epochs` is set; then, no step is tried.
    """
    schedule, steps = load_schedule(config.schedule), config.train.steps
    if schedule is not None and steps is not None:
        first = config.schedule.warmup_steps + 1
        for step in range(first, steps, -(-steps // MAX_TRIED_STEPS)):
            schedule(step, steps)
        if first <= steps:
            schedule(steps, steps)
