"""Everything that can be known to be wrong before anything starts."""

from __future__ import annotations

from trainkit.config.loaded import LoadedConfig
from trainkit.data.checks import data_problems, tokenizer_vocab_size
from trainkit.errors import ConfigError, Problem
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.machine import Machine
from trainkit.plan.make_plan import make_plan
from trainkit.plan.model_shape import resolve_model_shape

ANY_VOCABULARY = 1
"""Stands for the tokenizer's size while the data cannot be read: the other sizes are still checked."""


def check_config(loaded: LoadedConfig, machine: Machine) -> LaunchPlan:
    """The plan of a config whose layout, model and data were all looked at.

    Raises ConfigError with every problem.
    """
    plan, problems = None, []
    try:
        plan = make_plan(loaded, machine)
    except ConfigError as error:
        problems += error.problems
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
