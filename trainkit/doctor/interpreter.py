"""The interpreter with which the ranks of a config run, as far as it is known outside of the job."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from trainkit.config import LoadedConfig
from trainkit.doctor.check import Check, Request
from trainkit.doctor.environment import IMPORT_VARIABLES
from trainkit.submit.interpreters import find_interpreter


def with_interpreter(
    request: Request, loaded: LoadedConfig, cwd: Path, *, on_slurm: bool
) -> tuple[Request, list[Check]]:
    """The request for the interpreter of a job, and the checks of the settings that choose it.

    Without a batch script, a run does not use a container, conda, modules and setup lines.
    """
    launch = loaded.config.launch
    if not on_slurm:
        unused = {"container": None, "conda": None, "modules": (), "setup": ()}
        launch = launch.model_copy(update=unused)
    found, problems = find_interpreter(launch, sys.executable, os.environ, cwd)
    checks = [Check("environment", "failure", f"{key} {text}", hint) for key, text, hint in problems]
    before = [f"launch.{name}" for name in ("modules", "setup") if getattr(launch, name)]
    named = [f"launch.{name}" for name in ("conda", "python") if getattr(launch, name) is not None]
    argv = (*found.argv, *found.options)
    is_known = "/" in found.argv[0] or not (launch.conda or before)
    hint = "run `trainkit doctor` in that environment, or read the first lines of a job's log"
    if launch.container is not None or not is_known:
        uses = "launch.container" if launch.container is not None else " and ".join(named + before)
        text = f"checked the environment of this command; the job uses that of {uses}"
        argv = (sys.executable,)
        checks.append(Check("environment", "warning", text, hint))
    elif before:
        text = f"checked {found.argv[0]} without {' and '.join(before)}, which the job runs first"
        checks.append(Check("environment", "warning", text, hint))
    env = tuple((name, launch.env[name]) for name in IMPORT_VARIABLES if name in launch.env)
    if on_slurm and launch.snapshot:
        checks.append(Check("code", "ok", "each run gets a copy at its submission (launch.snapshot)"))
    code = None if launch.snapshot else cwd
    return replace(request, python=argv, env=env, code=code), checks
