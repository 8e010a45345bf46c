"""The container that the ranks run in: what stands before their command, or among srun's options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainkit.config.running import LaunchConfig
from trainkit.submit.interpreters import Trouble

_APPTAINER_SCHEMES = ("docker://", "library://", "oras://", "shub://", "docker-archive:", "oci:")
_SQUASHED = (".sqsh", ".squashfs")
_NOT_IN_A_MOUNT = ',:"'


def container_runtime(launch: LaunchConfig, available: Sequence[str] = ()) -> str | None:
    """``apptainer`` or ``pyxis``; None when neither the config, the image nor the cluster tells.

    `available` is what the cluster has.
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
    """What runs the image: the runtime, by the older of its two names where the cluster has only that."""
    runtime = container_runtime(launch, runtimes(available))
    older = "singularity" in available and "apptainer" not in available
    return "singularity" if runtime == "apptainer" and older else runtime


def runtimes(available: Sequence[str]) -> tuple[str, ...]:
    """The runtimes among what a cluster has; singularity is the older name of apptainer."""
    return tuple(dict.fromkeys("apptainer" if name == "singularity" else name for name in available))


def whole_image(image: str, runtime: str, cwd: str) -> str:
    """An image as the step can name it wherever it runs: a file's path becomes whole, a name stays.

    Apptainer takes everything without a scheme for a path, pyxis only what begins like one.
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
    """(srun options, prefix of the step's command) that put the ranks into the container.

    `folders` are mounted at their own paths: the run folder and whatever the job reads. The step runs in
    `workdir`, and the path of an image is counted from `cwd`. `variables` keep the value of the job where the
    image has one of its own; Apptainer needs no list, it keeps the job's. `program` is apptainer's name on
    this cluster, which can be singularity.
    """
    assert launch.container is not None
    image = whole_image(launch.container, runtime, cwd)
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


def container_troubles(
    launch: LaunchConfig, folders: Sequence[str], available: Sequence[str] = (), cwd: str = "."
) -> Iterator[Trouble]:
    """What is wrong with the container before anything is submitted; paths of images count from `cwd`."""
    image = launch.container
    if image is None:
        if launch.container_mounts:
            yield "launch.container_mounts", "is set while launch.container is null", "name an image"
        return
    runtime = container_runtime(launch, available)
    if image.startswith("-"):
        yield "launch.container", f"is {image!r}, which is an option and no image", "name an image"
    elif runtime is None:
        message = f"is {image!r}, which apptainer and pyxis could both mean"
        yield "launch.container", message, "set launch.container_runtime to apptainer or pyxis"
    else:
        whole = whole_image(image, runtime, str(Path(cwd).absolute()))
        if whole.startswith("/") and not Path(whole).exists():
            yield (
                "launch.container",
                f"is {image!r}, and there is no {whole}",
                "write URIs in full: docker://…",
            )
    for folder in folders:
        if any(char in _NOT_IN_A_MOUNT for char in folder):
            message = (
                f"cannot have {folder!r} mounted: a mount cannot be written with one of {_NOT_IN_A_MOUNT}"
            )
            yield "launch.container", message, "choose a folder without it, or do without the container"
    for mount in launch.container_mounts:
        parts = mount.split(":")
        if "," in mount or '"' in mount or len(parts) > 3 or not all(parts) or not parts[0].startswith("/"):
            hint = "write SRC, SRC:DST or SRC:DST:ro with whole paths"
            yield "launch.container_mounts", f"has {mount!r}, which is no mount", hint


def _own_mounts(folders: Sequence[str]) -> list[str]:
    """The folders at their own paths, without those that lie in another one of them."""
    unique = list(dict.fromkeys(folders))
    return [
        f"{folder}:{folder}"
        for folder in unique
        if not any(other != folder and Path(folder).is_relative_to(other) for other in unique)
    ]


def _full_mount(mount: str) -> str:
    """pyxis wants the target too."""
    return mount if ":" in mount else f"{mount}:{mount}"
