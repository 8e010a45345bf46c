"""Defines the known properties of a run's machine, data and environment, gathered once per command."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL, Target
from trainkit.data.checks import DataFacts
from trainkit.errors import KeyProblem
from trainkit.plan.torch_build import TorchBuild


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter that agents and ranks use."""

    argv: tuple[str, ...]
    """The first arguments of a rank's command line, valid inside the container if the run uses one."""
    host_argv: tuple[str, ...]
    """The first arguments of the supervisor's command line; the supervisor runs outside any container."""
    options: tuple[str, ...] = ("-u",)
    """Interpreter options; ``-P`` is included only if the interpreter is known to be Python 3.11 or later."""
    host_options: tuple[str, ...] = ("-u",)
    venv: str | None = None
    """The virtual environment whose ``bin/activate`` script the batch script sources."""
    conda: str | None = None
    """The argument of ``conda activate``: the name or the folder of an environment."""
    conda_script: str | None = None
    """The ``conda.sh`` script that defines ``conda activate``; if None, the `conda` on PATH is used."""


@dataclass(frozen=True)
class Environment:
    """Environment of a run's ranks, as far as it can be inspected outside the job."""

    interpreter: Interpreter
    problems: tuple[KeyProblem, ...] = ()
    """Problems with the interpreter, its packages, the container or the webhook that would make the job
    fail."""
    torch: TorchBuild | None = None
    """The torch build that the trainer would import; None if unknown."""
    torch_key: str = "device"
    """The config key that determines which torch installation the trainer imports."""


@dataclass(frozen=True)
class Facts:
    """Known properties of a run's machine, data and environment, gathered by `trainkit.launch.plan_run`."""

    machine: Machine
    """The machine on which the trainkit command is executed."""
    target: Target = LOCAL
    data: DataFacts | None = None
    """Known properties of the data; None if there is nothing to check, because no built-in model is
    trained."""
    missing: tuple[KeyProblem, ...] = ()
    """Problems with config keys that refer to files or runs that do not exist."""
    environment: Environment | None = None
    """The environment of the ranks; None if it was not inspected because only the size of the plan is
    needed."""
