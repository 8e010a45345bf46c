"""Everything that can be known to be wrong before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.config.loaded import LoadedConfig
from trainkit.config.training import DataConfig
from trainkit.data.checks import data_problems, tokenizer_vocab_size
from trainkit.errors import ConfigError, Problem
from trainkit.frozen import dataclass
from trainkit.plan.cluster import LOCAL, Target
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layout_rules import batch_problems, layout_problems
from trainkit.plan.machine import Machine
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.plan.state_size import host_problem, staging_problem

OURS = "llama"
"""The architecture whose needs are known without its code."""
ANY_VOCABULARY = 1
"""Stands for the tokenizer's size while the data cannot be read: the other sizes are still checked."""


@dataclass(frozen=True)
class DataLook:
    """What was seen of the data of a config."""

    problems: tuple[tuple[str, str, str], ...]
    """Dotted key, message with the value, hint."""
    vocab_size: int


def look_at_data(data: DataConfig) -> DataLook:
    """A look at the data: takes as long as listing its files."""
    problems = tuple(data_problems(data))
    return DataLook(problems, ANY_VOCABULARY if problems else tokenizer_vocab_size(data))


def check_config(
    loaded: LoadedConfig,
    machine: Machine,
    target: Target = LOCAL,
    command: Sequence[str] | None = None,
    launcher: str = "python",
    look: Callable[[DataConfig], DataLook] = look_at_data,
) -> LaunchPlan:
    """The plan of a config whose layout, model, memory and data were all looked at.

    With a `command` there is no model and no data of ours to look at. Who checks many configs can give a
    `look` that remembers.
    Raises ConfigError with every problem.
    """
    plan, problems = None, []
    try:
        plan = make_plan(loaded, machine, target, command, launcher)
    except ConfigError as error:
        problems += error.problems
    if command is not None:
        if plan is None:
            raise ConfigError(problems)
        return plan
    data = look(loaded.config.data)
    problems += [loaded.problem(key, message, hint) for key, message, hint in data.problems]
    shape = None
    try:
        shape = resolve_model_shape(loaded.config.model, data.vocab_size)
    except ConfigError as error:
        problems += [_with_origin(loaded, problem) for problem in error.problems]
    if plan is not None and loaded.config.precision.float8 and plan.device == "cpu" != loaded.config.device:
        message = f"is true, and it would run on CPUs: {plan.reasons['device']}"
        problems.append(loaded.problem("precision.float8", message, "only GPUs have float8"))
    if plan is not None and shape is not None:
        plan, found = _held_against_model(loaded, plan, shape, machine, target)
        problems += found
    if plan is None or problems:
        raise ConfigError(problems)
    return plan


def _held_against_model(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, machine: Machine, target: Target
) -> tuple[LaunchPlan, list[Problem]]:
    """The plan with what it takes, and everything because of which the model cannot be trained so."""
    config, size, steps = loaded.config, plan.batch.device_batch_size, plan.batch.accumulation_steps
    seq_len = config.data.seq_len
    if config.model.architecture != OURS:
        # What else it asks of a layout, and how much memory it takes, only its own code knows.
        found = list(batch_problems(plan.layout, config.parallel, size, seq_len, steps))
        found = [_with_origin(loaded, problem) for problem in found]
        return plan, [*found, *_architecture_problems(loaded)]
    found = list(layout_problems(plan.layout, config.parallel, shape, size, seq_len, steps))
    if found:
        return plan, [_with_origin(loaded, problem) for problem in found]
    words, problem = None, None
    if plan.device == "cuda":
        # Imported only where there is a GPU: it knows every layout, and takes its time for that.
        from trainkit.plan.fit import judge_memory

        words, problem = judge_memory(loaded, plan, shape, machine, target)
        problem = problem or staging_problem(loaded, plan, shape, machine)
    else:
        problem = host_problem(loaded, plan, shape, machine)
    if words is not None:
        plan = replace(plan, reasons={**plan.reasons, "memory": words})
    return plan, [] if problem is None else [problem]


def _architecture_problems(loaded: LoadedConfig) -> Iterator[Problem]:
    name = loaded.config.model.architecture
    file = Path(name.rpartition(":")[0])
    if not file.is_file():
        message = f"is {name}, and there is no file {file.absolute()}"
        yield loaded.problem("model.architecture", message, "FILE.py:CLASS is looked for from where you are")


def _with_origin(loaded: LoadedConfig, problem: Problem) -> Problem:
    return loaded.problem(problem.key, problem.message, problem.hint)
