"""Determine the environment of the ranks: the interpreter, its activation and the container."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import ClassVar

from trainkit.config.running import LaunchConfig
from trainkit.errors import KeyProblem, UsageError
from trainkit.folders import shown_path, typed_path
from trainkit.job.processes import PYTHON_OPTIONS
from trainkit.plan.facts import Interpreter
from trainkit.scheduler import RANK_VARIABLES

_VERSION = re.compile(r"python(\d+)\.(\d+)$")


def find_interpreter(
    launch: LaunchConfig, cwd: Path, environ: Mapping[str, str] = os.environ
) -> tuple[Interpreter, list[KeyProblem]]:
    """Return the Python interpreter for the section `launch`, and the problems found in the section.

    The default is the interpreter of this process. Relative folders in the section are resolved against
    `cwd`.
    """
    problems = list(_contradictions(launch))
    if no_paths := list(_no_paths(launch, cwd)):
        return find_interpreter(LaunchConfig(), cwd, environ)[0], [*problems, *no_paths]
    venv, conda, script = None, None, None
    argv: tuple[str, ...] = (sys.executable,)
    in_container = launch.container is not None
    if in_container:
        argv = ("python3",)
    if launch.venv is not None:
        venv = _absolute(launch.venv, cwd)
        if not in_container:  # a folder inside the container may not exist outside of it
            problems += _venv_problems("launch.venv", launch.venv, venv)
        argv = (f"{venv}/bin/python",)
    elif launch.uv is not None:
        # Do not use `uv run`: it adds a process per rank, and forwards signals that Slurm already sends to
        # each process in the step.
        venv, problem = _uv_environment(launch.uv, environ, cwd)
        problems += problem
        argv = (f"{venv}/bin/python",)
    elif launch.conda is not None:
        conda, script, prefix, problem = _conda_environment(launch.conda, launch, environ, cwd)
        problems += problem
        argv = ("python",) if prefix is None else (f"{prefix}/bin/python",)
    if launch.python is not None:
        # A name without a slash is searched for in the job's PATH.
        is_path = "/" in launch.python and not in_container
        argv = (_absolute(launch.python, cwd) if is_path else launch.python,)
        is_found = in_container or shutil.which(argv[0], path=environ.get("PATH", os.defpath)) is not None
        if not is_found and not launch.modules:
            message = f"is {launch.python!r}, which is not executable"
            problems.append(("launch.python", message, "specify the path of an interpreter"))
    options = ("-u",) if in_container else _options(argv[0])
    found = Interpreter(
        argv=argv,
        host_argv=(sys.executable,) if in_container else argv,
        options=options,
        host_options=PYTHON_OPTIONS if in_container else options,
        venv=None if in_container else venv,
        conda=conda,
        conda_script=script,
    )
    return found, problems


def command_python(
    launch: LaunchConfig, command: Sequence[str], cwd: Path, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the Python interpreter for a launcher such as torchrun.

    The interpreter is taken from the config or, if the config has none, from the command. If neither the
    config nor the command specifies an interpreter, the interpreter of the active environment or of this
    process is used.
    """
    if any((launch.venv, launch.conda, launch.uv, launch.container, launch.python)):
        return find_interpreter(launch, cwd, environ)[0].argv
    if "/" in command[0] and PurePath(command[0]).name.startswith("python"):
        return (os.path.normpath(typed_path(command[0], cwd)),)
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    python = None if active is None else shutil.which("python", path=environ.get("PATH", os.defpath))
    is_active = python is not None and PurePath(python).is_relative_to(str(active))
    return (str(python) if is_active else sys.executable,)


_JOB_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|TRAINKIT_JOB)_\w+")


def launch_problems(launch: LaunchConfig) -> Iterator[KeyProblem]:
    """Yield (key, message, hint) for each launch setting that is invalid on every machine."""
    for name in launch.modules:
        if name.startswith("-") or len(name.split()) != 1:
            hint = "write one module name per entry; put other `module` commands in launch.setup"
            yield "launch.modules", f"has {name!r}, which is not a module name", hint
    if launch.conda is not None and launch.conda.startswith("-"):
        yield "launch.conda", f"is {launch.conda!r}, which looks like an option, not an environment", ""
    if any("\0" in line for line in launch.setup):
        yield "launch.setup", "has a NUL character, which a script cannot contain", ""
    for name in launch.env:
        key = f"launch.env.{name}"
        if name in RANK_VARIABLES or _JOB_VARIABLE.fullmatch(name):
            yield key, "is set by the job in every process", "remove it"


def _no_paths(launch: LaunchConfig, cwd: Path) -> Iterator[KeyProblem]:
    for key in ("venv", "uv", "conda", "python"):
        try:
            typed_path(getattr(launch, key) or "", cwd)
        except UsageError as error:
            yield f"launch.{key}", error.message, error.hint or ""


def _contradictions(launch: LaunchConfig) -> Iterator[KeyProblem]:
    named = [key for key in ("venv", "conda", "uv") if getattr(launch, key) is not None]
    for key in named[1:]:
        message = f"is {getattr(launch, key)!r} while launch.{named[0]} is {getattr(launch, named[0])!r}"
        yield f"launch.{key}", message, "a job can use only one environment: set all but one to null"
    if launch.conda is not None and launch.container is not None:
        message = f"is {launch.conda!r} and launch.container is set: conda cannot be activated in a container"
        yield "launch.conda", message, "launch.python names an interpreter in the container"


def _venv_problems(key: str, given: str, folder: str) -> Iterator[KeyProblem]:
    if not os.access(f"{folder}/bin/python", os.X_OK):
        message = f"is {given!r}, but there is no {shown_path(folder)}/bin/python"
        yield key, message, f"`python3 -m venv {given}` creates a virtual environment"
    elif not Path(folder, "bin", "activate").is_file():
        message = f"is {given!r}, but there is no {shown_path(folder)}/bin/activate"
        yield key, message, "for an interpreter without an environment to activate, set launch.python"


def _uv_environment(given: str, environ: Mapping[str, str], cwd: Path) -> tuple[str, list[KeyProblem]]:
    """Return the environment folder of a uv project, and the problems found.

    In a uv workspace, the environment is in the root folder of the workspace, not in the folders of its
    members.
    """
    project = Path(_absolute(given, cwd))
    if not (project / "pyproject.toml").is_file():
        message = f"is {given!r}, but there is no {project}/pyproject.toml"
        return f"{project}/.venv", [("launch.uv", message, "specify the folder of a uv project")]
    folders = [
        parent / ".venv" for parent in (project, *project.parents) if (parent / "pyproject.toml").is_file()
    ]
    found = next((str(folder) for folder in folders if (folder / "pyvenv.cfg").is_file()), None)
    if environ.get("UV_PROJECT_ENVIRONMENT"):
        found = _absolute(environ["UV_PROJECT_ENVIRONMENT"], project)
    if found is not None:
        return found, list(_venv_problems("launch.uv", given, found))
    message = f"is {given!r}, which has no environment yet: there is no {project}/.venv"
    return f"{project}/.venv", [("launch.uv", message, f"`uv sync --project {given}` creates it")]


def _conda_environment(
    given: str, launch: LaunchConfig, environ: Mapping[str, str], cwd: Path
) -> tuple[str, str | None, str | None, list[KeyProblem]]:
    """Return (name or folder to activate, path of conda.sh, environment folder, problems).

    The environment folder is None if it cannot be determined on this host.
    """
    program = environ.get("CONDA_EXE") or shutil.which("conda", path=environ.get("PATH", os.defpath))
    # The conda executable is two levels below the base folder of Conda.
    base = Path(program).resolve().parents[1] if program and Path(program).is_file() else None
    script = None if base is None else base / "etc" / "profile.d" / "conda.sh"
    is_folder = "/" in given or given.startswith("~")
    name = _absolute(given, cwd) if is_folder else given
    folders = [Path(name)] if is_folder else [] if base is None else _conda_folders(name, base, environ)
    prefix = next((str(folder) for folder in folders if os.access(folder / "bin" / "python", os.X_OK)), None)
    problem, hint = None, "`conda env list` lists the environments and their folders"
    if is_folder and prefix is None:
        problem = f"is {given!r}, but there is no {name}/bin/python"
    elif base is None and not launch.modules:  # A module in `launch.modules` may provide conda.
        problem = f"is {given!r}, but there is no conda on PATH"
        hint = "add the module that provides conda to launch.modules, or set launch.python"
    elif prefix is None and not launch.modules:
        problem = f"is {given!r}, which is not an environment of {base}"
    found_script = str(script) if script is not None and script.is_file() else None
    return (
        name,
        found_script,
        prefix or (name if is_folder else None),
        ([] if problem is None else [("launch.conda", problem, hint)]),
    )


def _conda_folders(name: str, base: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return candidate folders for the conda environment with a given name."""
    home = Path(environ.get("HOME", "/"))
    places = filter(None, environ.get("CONDA_ENVS_PATH", "").split(os.pathsep))
    found = [folder / name for folder in (*map(Path, places), base / "envs", home / ".conda" / "envs")]
    try:
        known = (home / ".conda" / "environments.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        known = []
    return [
        *([base] if name == "base" else []),
        *found,
        *(Path(line) for line in known if Path(line).name == name),
    ]


def _absolute(folder: str, cwd: Path) -> str:
    return os.path.normpath(typed_path(folder, cwd))


def _options(program: str) -> tuple[str, ...]:
    """Return the options for an interpreter, whose version is derived from its resolved file name."""
    if program == sys.executable:
        return PYTHON_OPTIONS
    match = _VERSION.search(str(Path(program).resolve()))
    newer = match is not None and (int(match[1]), int(match[2])) >= (3, 11)
    return ("-u", "-P") if newer else ("-u",)


_APPTAINER_SCHEMES = ("docker://", "library://", "oras://", "shub://", "docker-archive:", "oci:")
_SQUASHED = (".sqsh", ".squashfs")
_FORBIDDEN_IN_MOUNTS = ',:"'


def container_program(launch: LaunchConfig, available: Sequence[str] = ()) -> str | None:
    """Return the container program: ``apptainer``, ``singularity`` (its former name) or ``pyxis``.

    Returns None if no image is set, or if the program cannot be determined. `available` contains the
    container programs on the cluster.
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
    """Return the absolute path of an image file; return a URI or image name unchanged.

    Apptainer treats every image without a URI scheme as a path; pyxis does so only if the image looks like a
    path.
    """
    if image.startswith(_APPTAINER_SCHEMES):
        return image
    if program == "pyxis" and not image.startswith(("/", ".", "~")) and not image.endswith(_SQUASHED):
        return image
    return os.path.normpath(typed_path(image, Path(cwd)))


def container_problems(launch: LaunchConfig, cwd: str, available: Sequence[str] = ()) -> Iterator[KeyProblem]:
    """Yield problems in the container settings.

    Image paths are relative to `cwd`, which the container mounts.
    """
    image = launch.container
    if image is None:
        if launch.container_mounts:
            yield "launch.container_mounts", "is set while launch.container is null", "set launch.container"
        return
    program = container_program(launch, available)
    key = "launch.container"
    try:
        path = absolute_image(image, program or "", cwd)
    except UsageError as error:
        yield key, error.message, error.hint or ""
        return
    if image.startswith("-"):
        yield (
            key,
            f"is {image!r}, which looks like an option, not an image",
            "specify the path or URI of an image",
        )
    elif program is None:
        message = f"is {image!r}, which apptainer and pyxis can both run"
        yield key, message, "set launch.container_runtime to apptainer or pyxis"
    elif path.startswith("/") and not Path(path).exists():
        yield key, f"is {image!r}, but {path} does not exist", "for a URI, add the scheme: docker://…"
    if any(char in _FORBIDDEN_IN_MOUNTS for char in cwd):
        message = f"needs {cwd!r} mounted, but a mount path cannot contain any of {_FORBIDDEN_IN_MOUNTS}"
        yield "launch.container", message, "use another folder, or set launch.container to null"
    for mount in launch.container_mounts:
        parts = mount.split(":")
        if "," in mount or '"' in mount or len(parts) > 3 or not all(parts) or not parts[0].startswith("/"):
            hint = "use SRC, SRC:DST or SRC:DST:ro with absolute paths"
            yield "launch.container_mounts", f"has {mount!r}, which is not a mount", hint


SRUN_DROPS_CPUS_PER_TASK = ((22, 5), (23, 11))
"""The range of Slurm versions (first inclusive, second exclusive) where srun ignores sbatch's
--cpus-per-task."""


@dataclass(frozen=True)
class JobEnvironment:
    """The environment of the ranks, as used by the template templates/partials/environment.sh.j2."""

    workdir: str
    """The working directory of the job: a folder in the code copy, or the working directory at submission."""
    rank_python: tuple[str, ...]
    """The beginning of a command line that runs Python in a task of the step: container, interpreter and
    options."""
    host_python: tuple[str, ...]
    """The beginning of a command line that runs Python in the batch script, outside of any container."""
    srun_options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    venv: str | None = None
    conda: str | None = None
    conda_script: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    python_path: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sets_cpus_per_task: bool = True
    """True if the script must pass --cpus-per-task to srun as well as to sbatch."""
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
    """Return the job environment for a launch section and its interpreter.

    `env` contains the environment variables, and defaults to those in `launch`. A container mounts the run
    folder, `workdir` and `folders`, each at its own path. `program` is the result of `container_program`. The
    path of an image is resolved against `cwd`, which defaults to `workdir`.
    """
    variables = launch.env if env is None else env
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    if launch.container is not None:
        program = program or "apptainer"
        image = absolute_image(launch.container, program, cwd or workdir)
        places = dict.fromkeys((run_dir, workdir, *folders))
        # Mount only the outermost folders, and specify each target explicitly, as pyxis requires.
        outer = [
            place
            for place in places
            if not any(other != place and Path(place).is_relative_to(other) for other in places)
        ]
        mounts = [item if ":" in item else f"{item}:{item}" for item in (*outer, *launch.container_mounts)]
        if program == "pyxis":
            # If the image sets a variable, pyxis uses the job's value only if the variable is listed here;
            # Apptainer always uses the job's value.
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
        # If the Slurm version is unknown, pass --cpus-per-task anyway; its value is the same as for sbatch.
        sets_cpus_per_task=not slurm_version or first <= slurm_version < after,
    )
