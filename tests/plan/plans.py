"""Plans of configs that are a few overrides, and why there is none."""

from pathlib import Path

import pytest

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import load_config
from trainkit.data.checks import inspect_data
from trainkit.errors import ConfigError, Problem
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan

NO_GPU = Machine(2, 0, (), "there is no NVIDIA driver on this machine")


def plan_of(
    *overrides: str, machine: Machine = NO_GPU, target: Target = LOCAL, folder: Path | None = None
) -> LaunchPlan:
    """The plan of a config; with the `folder` that it is in, its data is looked at too."""
    loaded = load_config(None, overrides=overrides, environ={}, cwd=folder or Path("/nowhere"))
    data = None if folder is None else inspect_data(loaded.config.data)
    return make_plan(loaded, Facts(machine, target, data))


def problems_of(
    *overrides: str, machine: Machine = NO_GPU, target: Target = LOCAL, folder: Path | None = None
) -> list[Problem]:
    """Why a config has no plan."""
    with pytest.raises(ConfigError) as error:
        plan_of(*overrides, machine=machine, target=target, folder=folder)
    return error.value.problems
