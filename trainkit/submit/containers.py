"""The container of the ranks: a prefix of their command (Apptainer) or options of srun (pyxis)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainkit.config.running import LaunchConfig
from trainkit.plan.facts import KeyProblem

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
