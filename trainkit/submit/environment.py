"""The environment that a batch script sets up before the ranks start, as data for its template."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainkit.config.running import LaunchConfig
from trainkit.errors import KeyProblem
from trainkit.plan.facts import Interpreter
from trainkit.slurm.environment import RANK_VARIABLES

SRUN_DROPS_CPUS_PER_TASK = ((22, 5), (23, 11))
"""srun ignores the --cpus-per-task of sbatch from the first version until before the second."""


@dataclass(frozen=True)
class JobEnvironment:
    """The environment of the ranks; `context` is for templates/partials/environment.sh.j2."""

    workdir: str
    """The working directory of the job: in the copy of the code, or the folder it was submitted from."""
    rank_python: tuple[str, ...]
    """The argv prefix of Python in a task of the step: container, interpreter, options."""
    host_python: tuple[str, ...]
    """The argv prefix of Python in the script itself, outside of any container."""
    srun_options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    venv: str | None = None
    conda: str | None = None
    conda_script: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    python_path: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sets_cpus_per_task: bool = True
    """Whether the script must repeat --cpus-per-task for srun."""
    rank_names: ClassVar[tuple[str, ...]] = RANK_VARIABLES


def make_job_environment(
    launch: LaunchConfig,
    interpreter: Interpreter,
    *,
    run_dir: str,
    workdir: str,
    cwd: str | None = None,
    slurm_version: tuple[int, ...] = (),
    python_path: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    folders: Sequence[str] = (),
    program: str | None = None,
    gpus: bool = False,
) -> JobEnvironment:
    """The environment for a launch section and its interpreter.

    `env` are its variables, by default those of `launch`. A container mounts `folders` in addition to the run
    folder and `workdir`, all at the same paths; `program` is the result of `container_program`. The path of
    an image is relative to `cwd`, by default `workdir`.
    """
    variables = launch.env if env is None else env
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    if launch.container is not None:
        program = program or "apptainer"
        image = absolute_image(launch.container, program, cwd or workdir)
        places = dict.fromkeys((run_dir, workdir, *folders))
        # Without folders inside another one, and with an explicit target, which pyxis requires.
        outer = [
            place
            for place in places
            if not any(other != place and Path(place).is_relative_to(other) for other in places)
        ]
        mounts = [item if ":" in item else f"{item}:{item}" for item in (*outer, *launch.container_mounts)]
        if program == "pyxis":
            # These keep the job's values even if the image sets them, as all do with Apptainer.
            names = ",".join(dict.fromkeys((*variables, *(["PYTHONPATH"] if python_path else []))))
            options = (
                f"--container-image={image}",
                f"--container-mounts={','.join(mounts)}",
                f"--container-workdir={workdir}",
                *((f"--container-env={names}",) if names else ()),
            )
        else:
            binds = [word for mount in mounts for word in ("--bind", mount)]
            prefix = (program, "exec", *(("--nv",) if gpus else ()), *binds, "--pwd", workdir, image)
    first, after = SRUN_DROPS_CPUS_PER_TASK
    return JobEnvironment(
        workdir=workdir,
        rank_python=(*prefix, *interpreter.argv, *interpreter.options),
        host_python=(*interpreter.host_argv, *interpreter.host_options),
        srun_options=options,
        modules=launch.modules,
        venv=interpreter.venv,
        conda=interpreter.conda,
        conda_script=interpreter.conda_script,
        env=tuple(variables.items()),
        python_path=tuple(python_path),
        setup=launch.setup,
        # True for an unknown version too: repeating the job's own value is harmless.
        sets_cpus_per_task=not slurm_version or first <= slurm_version < after,
    )


_APPTAINER_SCHEMES = ("docker://", "library://", "oras://", "shub://", "docker-archive:", "oci:")
_SQUASHED = (".sqsh", ".squashfs")
_FORBIDDEN_IN_MOUNTS = ',:"'


def container_program(launch: LaunchConfig, available: Sequence[str] = ()) -> str | None:
    """``apptainer``, its older name ``singularity``, or ``pyxis``; None if unclear, or without an image.

    `available` are the container programs of the cluster.
    """
    image = launch.container
    if image is None:
        return None
    apptainer = "singularity" if "singularity" in available and "apptainer" not in available else "apptainer"
    if launch.container_runtime != "auto":
        return apptainer if launch.container_runtime == "apptainer" else launch.container_runtime
    if image.endswith(".sif") or image.startswith(_APPTAINER_SCHEMES):
        return apptainer
    if image.endswith(_SQUASHED) or "#" in image:
        return "pyxis"
    known = [name for name in (apptainer, "pyxis") if name in available]
    return known[0] if len(known) == 1 else None


def absolute_image(image: str, program: str, cwd: str) -> str:
    """An image with an absolute path if it is a file; a URI or name is returned unchanged.

    Apptainer treats everything without a scheme as a path, pyxis only what looks like one.
    """
    if image.startswith(_APPTAINER_SCHEMES):
        return image
    if program == "pyxis" and not image.startswith(("/", ".", "~")) and not image.endswith(_SQUASHED):
        return image
    return os.path.normpath(Path(cwd, Path(image).expanduser()))


def container_problems(
    launch: LaunchConfig, folders: Sequence[str], available: Sequence[str] = (), cwd: str = "."
) -> Iterator[KeyProblem]:
    """Problems of the container settings; paths of images are relative to `cwd`."""
    image = launch.container
    if image is None:
        if launch.container_mounts:
            yield "launch.container_mounts", "is set while launch.container is null", "set launch.container"
        return
    program = container_program(launch, available)
    key, path = "launch.container", absolute_image(image, program or "", str(Path(cwd).absolute()))
    if image.startswith("-"):
        yield key, f"is {image!r}, which is an option, not an image", "give the path or URI of an image"
    elif program is None:
        message = f"is {image!r}, which apptainer and pyxis can both run"
        yield key, message, "set launch.container_runtime to apptainer or pyxis"
    elif path.startswith("/") and not Path(path).exists():
        yield key, f"is {image!r}, but {path} does not exist", "a URI needs its scheme: docker://…"
    for folder in folders:
        if any(char in _FORBIDDEN_IN_MOUNTS for char in folder):
            message = f"needs {folder!r} mounted, but a mount cannot contain any of {_FORBIDDEN_IN_MOUNTS}"
            yield "launch.container", message, "choose another folder, or use no container"
    for mount in launch.container_mounts:
        parts = mount.split(":")
        if "," in mount or '"' in mount or len(parts) > 3 or not all(parts) or not parts[0].startswith("/"):
            hint = "use SRC, SRC:DST or SRC:DST:ro with absolute paths"
            yield "launch.container_mounts", f"has {mount!r}, which is not a mount", hint
