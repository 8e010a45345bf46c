from pathlib import Path
from typing import Any

import pytest

from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import (
    absolute_image,
    container_problems,
    container_program,
    make_job_environment,
)
from trainkit.plan.facts import Interpreter


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


PYTHON = Interpreter(("p",), ("p",), options=())


def test_apptainer() -> None:
    launch = LaunchConfig(container="/x y.sif", container_mounts=["/data", "/a:/b:ro"], env={"A": "1"})
    found = make_job_environment(
        launch, PYTHON, run_dir="/p/runs/r", workdir="/p", folders=["/p"], program="apptainer", gpus=True
    )
    assert found.srun_options == ()
    assert found.rank_python == (
        *("apptainer", "exec", "--nv"),
        *("--bind", "/p:/p", "--bind", "/data:/data", "--bind", "/a:/b:ro"),
        *("--pwd", "/p", "/x y.sif", "p"),
    )


def test_singularity_without_gpus() -> None:
    launch = LaunchConfig(container="/x.sif")
    found = make_job_environment(launch, PYTHON, run_dir="/r", workdir="/r", cwd="/p", program="singularity")
    assert found.rank_python == ("singularity", "exec", "--bind", "/r:/r", "--pwd", "/r", "/x.sif", "p")


def test_pyxis() -> None:
    image = "nvcr.io#nvidia/pytorch:26.01-py3"
    launch = LaunchConfig(container=image, container_mounts=["/data"], env={"A": "1", "PYTHONPATH": "/x"})
    found = make_job_environment(
        launch, PYTHON, run_dir="/r", workdir="/w x", python_path=["/c"], program="pyxis", gpus=True
    )
    assert found.rank_python == ("p",)
    assert found.srun_options == (
        f"--container-image={image}",
        "--container-mounts=/r:/r,/w x:/w x,/data:/data",
        "--container-workdir=/w x",
        "--container-env=A,PYTHONPATH",
    )


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
    [(_, message)] = problems(container="gone.sif")
    assert message == "is 'gone.sif', but /nowhere/gone.sif does not exist"
    [(where, message)] = problems("/a,b", container="docker://x")
    assert (where, message) == (key, "needs '/a,b' mounted, but a mount cannot contain any of ,:\"")
    for mount in ("data", "/a:", "/a:/b:ro:x", "/a,/b", ":/b"):
        assert problems(container="docker://x", container_mounts=[mount]) == [
            (f"{key}_mounts", f"has {mount!r}, which is not a mount")
        ]


def test_ranks_run_in_the_container_and_the_supervisor_does_not() -> None:
    launch = LaunchConfig(container="/x.sif", env={"A": "1"})
    around = make_job_environment(
        launch,
        Interpreter(("python3",), ("/submitting/python",), host_options=("-u", "-P")),
        run_dir="/r",
        workdir="/r/code",
        program=container_program(launch),
        folders=["/data"],
    )
    assert around.host_python == ("/submitting/python", "-u", "-P")
    assert around.rank_python == (
        *("apptainer", "exec", "--bind", "/r:/r", "--bind", "/data:/data", "--pwd", "/r/code", "/x.sif"),
        *("python3", "-u"),
    )


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
