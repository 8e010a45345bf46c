"""Check a user's task, architecture, optimizer or schedule before a run is submitted.

``python -m trainkit.trainer.task_check`` reads a config as JSON from standard input. The command then imports
the task, or checks that an architecture's class supports the layout. Finally, the command prints a line that
begins with ``problems: ``, followed by a JSON list of ``[key, message, hint]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch

from trainkit.adapters import lora_config, require
from trainkit.config.schema import RunConfig, config_class
from trainkit.data.checks import tokenizer_vocab_size
from trainkit.errors import Problem, TrainkitError
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.safetensors import StoredWeights
from trainkit.trainer.file_optimizer import refuse_optimizer
from trainkit.trainer.file_schedule import refuse_schedule
from trainkit.trainer.models import load_architecture, refuse_unsupported_layout
from trainkit.trainer.optimizers.interface import refuse_unused_groups
from trainkit.trainer.optimizers.muon import refuse_without_matrices
from trainkit.trainer.user_code import TaskError, load_task_class, problem_of
from trainkit.trainer.user_task import load_task

PREFIX, TRIED = "problems: ", "tried: "
DEFINITE = (SyntaxError, ImportError, NameError, TypeError, AttributeError)
"""Errors in user code that would occur with any data and on any machine."""


def definite_problem(config: RunConfig) -> Problem | None:
    """Return a problem that makes the code of a user unusable on any machine, or None."""
    found = _problem_of_model(config) or _problem_of(refuse_optimizer, config)
    return found or _problem_of(refuse_schedule, config)


def _problem_of(refuse: Callable[[RunConfig], None], config: RunConfig) -> Problem | None:
    try:
        refuse(config)
    except TaskError as error:
        cause = error.__cause__
        is_definite = isinstance(cause, (*DEFINITE, ValueError, ArithmeticError, LookupError))
        return error.problem if cause is None or is_definite else None
    return None


def _problem_of_model(config: RunConfig) -> Problem | None:
    is_task = config.has_user_task
    try:
        if is_task:
            load_task_class(config)
            if config.model.lora is not None:
                require("peft", "model.lora", "peft")
                lora_config(config.model.lora)
        elif config.uses_transformers:
            cast(Any, load_task(config)).check()
        elif config.model.hf is not None:
            if not config.model.from_scratch:
                StoredWeights(Path(config.model.hf))
        else:
            architecture = load_architecture(config.model.architecture)
            refuse_unsupported_layout(config, architecture)
            if config.optimizer.groups or config.optimizer.name == "muon":
                shape = resolve_model_shape(config.model, tokenizer_vocab_size(config.data))
                with torch.device("meta"):
                    model = architecture(shape, config.data.seq_len, None)
                refuse_unused_groups({name for name, _ in model.named_parameters()}, config.optimizer)
                if config.optimizer.name == "muon":
                    refuse_without_matrices(model.projections)
    except TaskError as error:
        cause = error.__cause__
        return None if is_task and cause is not None and not isinstance(cause, DEFINITE) else error.problem
    except TrainkitError as error:
        # If the model does not come from files, the error concerns the data, which another check covers.
        return problem_of(config, error) if is_task or config.model.hf is not None else None
    return None


def print_problems(found: Iterable[Problem], tried: str = "") -> None:
    """Print the problems on a line of their own, because the task's code may also print output.

    A sentence which says what was tried is printed on another line.
    """
    if tried:
        print(f"\n{TRIED}{tried}")
    print("\n" + PREFIX + json.dumps([[item.key, item.message, item.hint] for item in found]))


def main() -> None:
    """Read a config from standard input; print its problem if the code is unusable."""
    values = json.load(sys.stdin)
    problem = definite_problem(config_class(values).model_validate(values))
    print_problems([] if problem is None else [problem])


if __name__ == "__main__":
    main()
