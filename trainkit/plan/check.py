"""Everything that can be known to be wrong before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.config.loaded import LoadedConfig
from trainkit.data.checks import data_problems, tokenizer_vocab_size
from trainkit.errors import ConfigError, Problem
from trainkit.plan.cluster import LOCAL, Target
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.machine import Machine
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import resolve_model_shape

ANY_VOCABULARY = 1
"""Stands for the tokenizer's size while the data cannot be read: the other sizes are still checked."""


def check_config(
    loaded: LoadedConfig,
    machine: Machine,
    target: Target = LOCAL,
    command: Sequence[str] | None = None,
    launcher: str = "python",
) -> LaunchPlan:
    """The plan of a config whose layout, model and data were all looked at.

    With a `command` there is no model and no data of ours to look at.
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
    data = loaded.config.data
    wrong_data = [loaded.problem(key, message, hint) for key, message, hint in data_problems(data)]
    problems += wrong_data
    vocab_size = ANY_VOCABULARY if wrong_data else tokenizer_vocab_size(data)
    try:
        resolve_model_shape(loaded.config.model, vocab_size)
    except ConfigError as error:
        problems += [_with_origin(loaded, problem) for problem in error.problems]
    if plan is None or problems:
        raise ConfigError(problems)
    return plan


def _with_origin(loaded: LoadedConfig, problem: Problem) -> Problem:
    return loaded.problem(problem.key, problem.message, problem.hint)
