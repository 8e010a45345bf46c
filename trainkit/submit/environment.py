"""The environment that a batch script sets up before the ranks start, as data for its template."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.config.running import LaunchConfig
from trainkit.plan.facts import Interpreter, KeyProblem

SRUN_DROPS_CPUS_PER_TASK = ((22, 5), (23, 11))
"""srun ignores the --cpus-per-task of sbatch from the first version until before the second."""
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables of a rank, which a job submitted from inside a job must not inherit."""


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

    @property
    def rank_names(self) -> tuple[str, ...]:
        return RANK_VARIABLES


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
    runtime: str | None = None,
    container_program: str = "apptainer",
    gpus: bool = False,
) -> JobEnvironment:
    """The environment for a launch section and its interpreter.

    `env` are its variables, by default those of `launch`. A container mounts `folders`
    in addition to the run folder and `workdir`; `runtime` is the result of `container_runtime`. The path of
    an image is relative to `cwd`, by default `workdir`.
    """
    variables = launch.env if env is None else env
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    if launch.container is not None:
        assert runtime is not None
        names = [*variables, *(["PYTHONPATH"] if python_path else [])]
        options, prefix = container_argv(
            launch,
            runtime,
            folders=[run_dir, workdir, *folders],
            workdir=workdir,
            cwd=cwd or workdir,
            gpus=gpus,
            program=container_program,
            variables=names,
        )
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
        sets_cpus_per_task=_sets_cpus_per_task(slurm_version),
    )


def _sets_cpus_per_task(version: tuple[int, ...]) -> bool:
    """True for an unknown version too: repeating the job's own value is harmless."""
    first, after = SRUN_DROPS_CPUS_PER_TASK
    return not version or first <= version < after


_APPTAINER_SCHEMES = ("docker://", "library://", "oras://", "shub://", "docker-archive:", "oci:")
_SQUASHED = (".sqsh", ".squashfs")
_FORBIDDEN_IN_MOUNTS = ',:"'


def container_runtime(launch: LaunchConfig, available: Sequence[str] = ()) -> str | None:
    """``apptainer`` or ``pyxis``; None if config, image and cluster do not determine it, or without an image.

    `available` are the container programs of the cluster.
    """
    image = launch.container
    if image is None:
        return None
    if launch.container_runtime != "auto":
        return launch.container_runtime
    if image.endswith(".sif") or image.startswith(_APPTAINER_SCHEMES):
        return "apptainer"
    if image.endswith(_SQUASHED) or "#" in image:
        return "pyxis"
    known = [name for name in ("apptainer", "pyxis") if name in available]
    return known[0] if len(known) == 1 else None


def container_program(launch: LaunchConfig, available: Sequence[str]) -> str | None:
    """The program that runs the image; for apptainer ``singularity`` if the cluster has only that."""
    runtime = container_runtime(launch, runtimes(available))
    older = "singularity" in available and "apptainer" not in available
    return "singularity" if runtime == "apptainer" and older else runtime


def runtimes(available: Sequence[str]) -> tuple[str, ...]:
    """The runtimes for the container programs of a cluster; singularity is the old name of apptainer."""
    return tuple(dict.fromkeys("apptainer" if name == "singularity" else name for name in available))


def absolute_image(image: str, runtime: str, cwd: str) -> str:
    """An image with an absolute path if it is a file; a URI or name is returned unchanged.

    Apptainer treats everything without a scheme as a path, pyxis only what looks like one.
    """
    if image.startswith(_APPTAINER_SCHEMES):
        return image
    if runtime == "pyxis" and not image.startswith(("/", ".", "~")) and not image.endswith(_SQUASHED):
        return image
    return os.path.normpath(Path(cwd, Path(image).expanduser()))


def container_argv(
    launch: LaunchConfig,
    runtime: str,
    *,
    folders: Sequence[str],
    workdir: str,
    cwd: str,
    gpus: bool,
    program: str = "apptainer",
    variables: Iterable[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(srun options, command prefix) that run the ranks in the container.

    `folders` (the run folder and what the job reads) are mounted at the same paths. The step runs in
    `workdir`; the path of an image is relative to `cwd`. `variables` keep the job's values even if the image
    sets them, as they always do with Apptainer. `program` is the cluster's Apptainer executable, possibly
    ``singularity``.
    """
    assert launch.container is not None
    image = absolute_image(launch.container, runtime, cwd)
    mounts = [*_own_mounts(folders), *map(_full_mount, launch.container_mounts)]
    if runtime == "pyxis":
        names = tuple(dict.fromkeys(variables))
        return (
            f"--container-image={image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={workdir}",
            *((f"--container-env={','.join(names)}",) if names else ()),
        ), ()
    options = [option for mount in mounts for option in ("--bind", mount)]
    prefix = (program, "exec", *(("--nv",) if gpus else ()), *options, "--pwd", workdir, image)
    return (), prefix


def container_problems(
    launch: LaunchConfig, folders: Sequence[str], available: Sequence[str] = (), cwd: str = "."
) -> Iterator[KeyProblem]:
    """Problems of the container settings; paths of images are relative to `cwd`."""
    image = launch.container
    if image is None:
        if launch.container_mounts:
            yield "launch.container_mounts", "is set while launch.container is null", "set launch.container"
        return
    runtime = container_runtime(launch, available)
    if image.startswith("-"):
        yield (
            "launch.container",
            f"is {image!r}, which is an option, not an image",
            "give the path or URI of an image",
        )
    elif runtime is None:
        message = f"is {image!r}, which apptainer and pyxis can both run"
        yield "launch.container", message, "set launch.container_runtime to apptainer or pyxis"
    else:
        path = absolute_image(image, runtime, str(Path(cwd).absolute()))
        if path.startswith("/") and not Path(path).exists():
            yield (
                "launch.container",
                f"is {image!r}, but {path} does not exist",
                "a URI needs its scheme: docker://…",
            )
    for folder in folders:
        if any(char in _FORBIDDEN_IN_MOUNTS for char in folder):
            message = f"needs {folder!r} mounted, but a mount cannot contain any of {_FORBIDDEN_IN_MOUNTS}"
            yield "launch.container", message, "choose another folder, or use no container"
    for mount in launch.container_mounts:
        parts = mount.split(":")
        if "," in mount or '"' in mount or len(parts) > 3 or not all(parts) or not parts[0].startswith("/"):
            hint = "use SRC, SRC:DST or SRC:DST:ro with absolute paths"
            yield "launch.container_mounts", f"has {mount!r}, which is not a mount", hint


def _own_mounts(folders: Sequence[str]) -> list[str]:
    """Mounts of the folders at the same paths, without folders inside another one."""
    unique = list(dict.fromkeys(folders))
    return [
        f"{folder}:{folder}"
        for folder in unique
        if not any(other != folder and Path(folder).is_relative_to(other) for other in unique)
    ]


def _full_mount(mount: str) -> str:
    """A mount with an explicit target, which pyxis requires."""
    return mount if ":" in mount else f"{mount}:{mount}"
