"""Defines the facts about the place where a run starts, which a command gathers once."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL, Target
from trainkit.data.checks import DataFacts
from trainkit.errors import KeyProblem
from trainkit.plan.torch_build import TorchBuild


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter of agents and ranks."""

    argv: tuple[str, ...]
    """The argv prefix of a rank; inside the container if there is one."""
    host_argv: tuple[str, ...]
    """The argv prefix of the supervisor, which runs outside of any container."""
    options: tuple[str, ...] = ("-u",)
    """Options of the interpreter, with ``-P`` only if the interpreter is known to be newer than 3.10."""
    host_options: tuple[str, ...] = ("-u",)
    venv: str | None = None
    """The folder of the bin/activate that the script sources."""
    conda: str | None = None
    """The argument of ``conda activate``: a name or a folder."""
    conda_script: str | None = None
    """The conda.sh that defines ``conda activate``; None uses the `conda` on PATH."""


@dataclass(frozen=True)
class Environment:
    """The environment of a run's ranks, as far as it is known outside of the job."""

    interpreter: Interpreter
    problems: tuple[KeyProblem, ...] = ()
    """Problems that would make the job fail: the interpreter and its packages, the container, the webhook."""
    torch: TorchBuild | None = None
    """The torch of the trainer; None if unknown."""
    torch_key: str = "device"
    """The config key that selects this torch."""


@dataclass(frozen=True)
class Facts:
    """The place, data and environment of a config, as `trainkit.launch.plan_run.gather` finds them."""

    machine: Machine
    """The machine on which the command runs."""
    target: Target = LOCAL
    data: DataFacts | None = None
    """The data; None if the run trains no model of trainkit, so that neither model nor data is checked."""
    missing: tuple[KeyProblem, ...] = ()
    """Problems of keys that name a file or run that does not exist."""
    environment: Environment | None = None
    """The environment; None if only the size of the plan matters."""
