"""The environment of ranks: the interpreter, how it is activated, its packages, and the container."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit import __version__
from trainkit.config.running import LaunchConfig
from trainkit.errors import KeyProblem
from trainkit.folders import shown_path
from trainkit.job.processes import PYTHON_OPTIONS
from trainkit.plan.facts import Interpreter
from trainkit.plan.torch_build import TorchBuild, release_problem

_VERSION = re.compile(r"python(\d+)\.(\d+)$")


def find_interpreter(
    launch: LaunchConfig, cwd: Path, environ: Mapping[str, str] = os.environ
) -> tuple[Interpreter, list[KeyProblem]]:
    """The interpreter of a launch section, by default this one, and its problems; folders are below `cwd`."""
    problems = list(_contradictions(launch))
    venv, conda, script = None, None, None
    argv: tuple[str, ...] = (sys.executable,)
    in_container = launch.container is not None
    if in_container:
        argv = ("python3",)
    if launch.venv is not None:
        venv = _absolute(launch.venv, cwd)
        problems += _venv_problems("launch.venv", launch.venv, venv, in_container)
        argv = (f"{venv}/bin/python",)
    elif launch.uv is not None:
        # Not `uv run`: it adds a process per rank, and forwards signals that Slurm already sends to every
        # process of the step.
        venv, problem = _uv_environment(launch.uv, environ, cwd)
        problems += problem
        argv = (f"{venv}/bin/python",)
    elif launch.conda is not None:
        conda, script, prefix, problem = _conda_environment(launch.conda, launch, environ, cwd)
        problems += problem
        argv = ("python",) if prefix is None else (f"{prefix}/bin/python",)
    if launch.python is not None:
        is_path = "/" in launch.python and not in_container  # the job looks a plain name up on PATH
        argv = (_absolute(launch.python, cwd) if is_path else launch.python,)
        is_found = in_container or shutil.which(argv[0], path=environ.get("PATH", os.defpath)) is not None
        if not is_found and not launch.modules:
            message = f"is {launch.python!r}, which is not an executable program"
            problems.append(("launch.python", message, "give the path of an interpreter"))
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


class NoAnswer(Exception):
    """Why an interpreter does not run, or cannot import what it is asked for."""

    def __init__(self, reason: str, *, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.is_slow = is_slow


_MARK = "trainkit-answer:"
"""Before the answer: what is imported may print, too."""
_PACKAGES = """
import importlib.util, json, platform, sys
from importlib import metadata
files, versions = {}, {}
for name in sys.argv[2:]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        files[name] = spec.origin
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if "trainkit" in files:
    versions["trainkit"] = __import__("trainkit").__version__
print(sys.argv[1], json.dumps({
    "python": platform.python_version(), "program": sys.executable, "files": files, "versions": versions,
}))
"""
TIMEOUT_S = 60.0


def ask(
    argv: Sequence[str],
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """The object that a script prints as JSON after its first argument, with an interpreter and its options.

    `env` is added to the variables of this process. Raises NoAnswer.
    """
    try:
        done = subprocess.run(
            [*argv, "-c", script, _MARK, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **env},
            cwd=cwd,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{argv[0]} took longer than {timeout_s:.0f} s", is_slow=True) from None
    except OSError as error:
        raise NoAnswer(f"{argv[0]} does not run: {error.strerror or error}") from None
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if done.returncode or line is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NoAnswer((lines or [f"{argv[0]} ended with exit code {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return found


@dataclass(frozen=True)
class Packages:
    """What an interpreter would import. A folder of a package's name, such as W&B's ``wandb/``, is none."""

    python: str
    program: str
    files: Mapping[str, str]
    """Package -> the file that is imported first."""
    versions: Mapping[str, str]

    @cached_property
    def torch(self) -> TorchBuild:
        """Its torch, as far as the version.py of that says."""
        return TorchBuild.read(self.program, self.files.get("torch"))

    def is_below(self, name: str, folder: str) -> bool:
        """Whether a package is installed in a folder or below it."""
        return name in self.files and Path(self.files[name]).is_relative_to(folder)


def find_packages(
    argv: Sequence[str],
    names: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Packages:
    """The packages among `names` that an interpreter with these options imports. Raises NoAnswer."""
    return Packages(**ask(argv, _PACKAGES, names, env, cwd, timeout_s))


def own_packages(*names: str) -> Packages:
    """The ones of this interpreter, of which it need not start another."""
    specs = ((name, find_spec(name)) for name in names)
    files = {name: spec.origin for name, spec in specs if spec is not None and spec.origin is not None}
    return Packages(platform.python_version(), sys.executable, files, {"trainkit": __version__})


def package_problem(packages: Packages, program: str) -> tuple[str, str] | None:
    """Why ranks of the built-in trainer cannot run with a `program`, and a hint; None when they can."""
    missing = [name for name in ("torch", "trainkit") if name not in packages.files]
    if missing:
        message = f"has no {' and no '.join(missing)}"
        if missing == ["torch"]:
            return message, f"`{shlex.quote(program)} -m pip install torch` installs it"
        return message, "install trainkit there too, or remove the key: then this interpreter is used"
    version = packages.versions["trainkit"]
    if version != __version__:
        message = f"has trainkit {version}, and this is trainkit {__version__}"
        return message, "install the same version there, or use the `trainkit` of that environment"
    return release_problem(packages.torch.version)


def _contradictions(launch: LaunchConfig) -> Iterator[KeyProblem]:
    named = [key for key in ("venv", "conda", "uv") if getattr(launch, key) is not None]
    for key in named[1:]:
        message = f"is {getattr(launch, key)!r} while launch.{named[0]} is {getattr(launch, named[0])!r}"
        yield f"launch.{key}", message, "a job has one environment: set all but one to null"
    if launch.conda is not None and launch.container is not None:
        message = f"is {launch.conda!r} and launch.container is set: conda cannot be activated in a container"
        yield "launch.conda", message, "launch.python names an interpreter in the container"


def _venv_problems(key: str, given: str, folder: str, in_container: bool) -> Iterator[KeyProblem]:
    if in_container:
        return  # the folder may exist only in the container
    if not os.access(f"{folder}/bin/python", os.X_OK):
        message = f"is {given!r}, and there is no {shown_path(folder)}/bin/python"
        yield key, message, f"`python3 -m venv {given}` creates a virtual environment"
    elif not Path(folder, "bin", "activate").is_file():
        message = f"is {given!r}, and there is no {shown_path(folder)}/bin/activate"
        yield key, message, "for an interpreter without an environment to activate, set launch.python"


def _uv_environment(given: str, environ: Mapping[str, str], cwd: Path) -> tuple[str, list[KeyProblem]]:
    """The environment folder of a uv project, and problems; a workspace has it above its members."""
    project = Path(_absolute(given, cwd))
    if not (project / "pyproject.toml").is_file():
        message = f"is {given!r}, and there is no {project}/pyproject.toml"
        return f"{project}/.venv", [("launch.uv", message, "give the folder of a uv project")]
    folders = [
        parent / ".venv" for parent in (project, *project.parents) if (parent / "pyproject.toml").is_file()
    ]
    found = next((str(folder) for folder in folders if (folder / "pyvenv.cfg").is_file()), None)
    if environ.get("UV_PROJECT_ENVIRONMENT"):
        found = _absolute(environ["UV_PROJECT_ENVIRONMENT"], project)
    if found is not None:
        return found, list(_venv_problems("launch.uv", given, found, in_container=False))
    message = f"is {given!r}, which has no environment yet: there is no {project}/.venv"
    return f"{project}/.venv", [("launch.uv", message, f"`uv sync --project {given}` creates it")]


def _conda_environment(
    given: str, launch: LaunchConfig, environ: Mapping[str, str], cwd: Path
) -> tuple[str, str | None, str | None, list[KeyProblem]]:
    """(name or folder to activate, conda.sh, folder of the environment if known here, problems)."""
    program = environ.get("CONDA_EXE") or shutil.which("conda", path=environ.get("PATH", os.defpath))
    # Conda is installed two folders above its executable.
    base = Path(program).resolve().parents[1] if program and Path(program).is_file() else None
    script = None if base is None else base / "etc" / "profile.d" / "conda.sh"
    is_folder = "/" in given or given.startswith("~")
    name = _absolute(given, cwd) if is_folder else given
    folders = [Path(name)] if is_folder else [] if base is None else _conda_folders(name, base, environ)
    prefix = next((str(folder) for folder in folders if os.access(folder / "bin" / "python", os.X_OK)), None)
    problem, hint = None, "`conda env list` lists the environments and their folders"
    if is_folder and prefix is None:
        problem = f"is {given!r}, and there is no {name}/bin/python"
    elif base is None and not launch.modules:  # a module may provide conda
        problem = f"is {given!r}, and there is no conda on PATH"
        hint = "add the module that provides it to launch.modules, or set launch.python"
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
    """The possible folders of an environment with this name."""
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
    return os.path.normpath(cwd / Path(folder).expanduser())


def _options(program: str) -> tuple[str, ...]:
    """The options of an interpreter; its version is read from the name of the file that it links to."""
    if program == sys.executable:
        return PYTHON_OPTIONS
    match = _VERSION.search(str(Path(program).resolve()))
    newer = match is not None and (int(match[1]), int(match[2])) >= (3, 11)
    return ("-u", "-P") if newer else ("-u",)


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


def container_problems(launch: LaunchConfig, cwd: str, available: Sequence[str] = ()) -> Iterator[KeyProblem]:
    """Problems of the container settings; images are relative to `cwd`, which is mounted."""
    image = launch.container
    if image is None:
        if launch.container_mounts:
            yield "launch.container_mounts", "is set while launch.container is null", "set launch.container"
        return
    program = container_program(launch, available)
    key, path = "launch.container", absolute_image(image, program or "", cwd)
    if image.startswith("-"):
        yield key, f"is {image!r}, which is an option, not an image", "give the path or URI of an image"
    elif program is None:
        message = f"is {image!r}, which apptainer and pyxis can both run"
        yield key, message, "set launch.container_runtime to apptainer or pyxis"
    elif path.startswith("/") and not Path(path).exists():
        yield key, f"is {image!r}, but {path} does not exist", "a URI needs its scheme: docker://…"
    if any(char in _FORBIDDEN_IN_MOUNTS for char in cwd):
        message = f"needs {cwd!r} mounted, but a mount cannot contain any of {_FORBIDDEN_IN_MOUNTS}"
        yield "launch.container", message, "choose another folder, or use no container"
    for mount in launch.container_mounts:
        parts = mount.split(":")
        if "," in mount or '"' in mount or len(parts) > 3 or not all(parts) or not parts[0].startswith("/"):
            hint = "use SRC, SRC:DST or SRC:DST:ro with absolute paths"
            yield "launch.container_mounts", f"has {mount!r}, which is not a mount", hint
