"""Defines the facts about a run's machine, data and environment, which are gathered once per command."""

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
    """The first arguments of a rank's command line; inside the container if the run uses one."""
    host_argv: tuple[str, ...]
    """The first arguments of the supervisor's command line; the supervisor runs outside any container."""
    options: tuple[str, ...] = ("-u",)
    """Options of the interpreter; they include ``-P`` only if the interpreter is known to be Python 3.11 or
    newer."""
    host_options: tuple[str, ...] = ("-u",)
    venv: str | None = None
    """The virtual environment whose bin/activate the batch script sources."""
    conda: str | None = None
    """The argument of ``conda activate``: the name or the folder of an environment."""
    conda_script: str | None = None
    """The conda.sh that defines ``conda activate``; if None, the `conda` on PATH is used."""


@dataclass(frozen=True)
class Environment:
    """The environment of a run's ranks, as far as it can be determined outside the job."""

    interpreter: Interpreter
    problems: tuple[KeyProblem, ...] = ()
    """Problems that would make the job fail: with the interpreter, its packages, the container or the
    webhook."""
    torch: TorchBuild | None = None
    """The torch that the trainer would import; None if unknown."""
    torch_key: str = "device"
    """The config key that determines which torch the trainer imports."""


@dataclass(frozen=True)
class Facts:
    """Facts about the machine, data and environment of a run; `trainkit.launch.plan_run` gathers them."""

    machine: Machine
    """The machine on which the command is executed."""
    target: Target = LOCAL
    data: DataFacts | None = None
    """Facts about the data; None if the run does not train one of trainkit's models, so that nothing is
    checked."""
    missing: tuple[KeyProblem, ...] = ()
    """Problems with keys that refer to a file or run that does not exist."""
    environment: Environment | None = None
    """The environment of the ranks; None if only the size of the plan matters."""
