from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import (
    absolute_image,
    container_problems,
    container_program,
)


@pytest.mark.parametrize(
    ("image", "available", "expected"),
    [
        ("/images/torch.sif", (), "apptainer"),
        ("docker://pytorch/pytorch:2.13.0", ("pyxis",), "apptainer"),
        ("/images/torch.sqsh", (), "pyxis"),
        ("nvcr.io#nvidia/pytorch:26.01-py3", (), "pyxis"),
        ("pytorch/pytorch:2.13.0", (), None),
        ("pytorch/pytorch:2.13.0", ("pyxis",), "pyxis"),
        ("/images/folder", ("apptainer",), "apptainer"),
        ("/images/folder", ("apptainer", "pyxis"), None),
        (None, (), None),
    ],
)
def test_runtime(image: str | None, available: tuple[str, ...], expected: str | None) -> None:
    assert container_program(LaunchConfig(container=image), available) == expected
    if image is not None:
        assert container_program(LaunchConfig(container=image, container_runtime="pyxis")) == "pyxis"


def problems(cwd: str = "/nowhere", **launch: Any) -> list[tuple[str, str]]:
    return [(key, message) for key, message, _ in container_problems(LaunchConfig(**launch), cwd)]


def test_nothing_is_wrong(tmp_path: Path) -> None:
    image = tmp_path / "x.sif"
    image.touch()
    assert problems(container=str(image), container_mounts=["/a", "/a:/b", "/a:/b:ro"]) == []
    assert problems() == []


def test_what_is_wrong(tmp_path: Path) -> None:
    key = "launch.container"
    assert problems(container_mounts=["/a"]) == [(f"{key}_mounts", "is set while launch.container is null")]
    assert problems(container="--pwn") == [(key, "is '--pwn', which is an option, not an image")]
    assert problems(container="image") == [(key, "is 'image', which apptainer and pyxis can both run")]
    gone = f"{tmp_path}/gone.sif"
    assert problems(container=gone) == [(key, f"is {gone!r}, but {gone} does not exist")]
    no_path = "/a/${USER}.sif is not a path: trainkit does not evaluate ${…}"
    assert problems(container="/a/${USER}.sif") == [(key, no_path)]
    [(_, message)] = problems(container="gone.sif")
    said(message)
    [(where, message)] = problems("/a,b", container="docker://x")
    assert (where, message) == (key, "needs '/a,b' mounted, but a mount cannot contain any of ,:\"")
    for mount in ("data", "/a:", "/a:/b:ro:x", "/a,/b", ":/b"):
        assert problems(container="docker://x", container_mounts=[mount]) == [
            (f"{key}_mounts", f"has {mount!r}, which is not a mount")
        ]


@pytest.mark.parametrize(
    ("image", "runtime", "expected"),
    [
        ("images/x.sif", "apptainer", "/p/images/x.sif"),
        ("../x.sif", "apptainer", "/x.sif"),
        ("/x.sif", "apptainer", "/x.sif"),
        ("docker://a/b:1", "apptainer", "docker://a/b:1"),
        ("nvcr.io/nvidia/pytorch:26.01", "pyxis", "nvcr.io/nvidia/pytorch:26.01"),
        ("./image", "pyxis", "/p/image"),
        ("image.sqsh", "pyxis", "/p/image.sqsh"),
    ],
)
def test_image_is_the_same_wherever_the_step_runs(image: str, runtime: str, expected: str) -> None:
    assert absolute_image(image, runtime, "/p") == expected
