from typing import Any

import pytest

from tests.support.said import said
from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import absolute_image, container_problems, container_program, launch_problems


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
def test_runtime(image, available, expected):
    assert container_program(LaunchConfig(container=image), available) == expected
    if image is not None:
        assert container_program(LaunchConfig(container=image, container_runtime="pyxis")) == "pyxis"


def problems(cwd: str = "/nowhere", **launch: Any) -> list[tuple[str, str]]:
    return [(key, message) for key, message, _ in container_problems(LaunchConfig(**launch), cwd)]


def test_nothing_is_wrong(tmp_path):
    image = tmp_path / "x.sif"
    image.touch()
    assert problems(container=str(image), container_mounts=["/a", "/a:/b", "/a:/b:ro"]) == []
    assert problems() == []


@pytest.mark.parametrize(
    "launch",
    [
        {"container_mounts": ["/a"]},
        {"container": "--pwn"},
        {"container": "image"},
        {"container": "gone.sif"},
        {"container": "/a/${USER}.sif"},
        {"container": "docker://x", "cwd": "/a,b"},
        *(
            {"container": "docker://x", "container_mounts": [mount]}
            for mount in ("data", "/a:", "/a:/b:ro:x", "/a,/b", ":/b")
        ),
    ],
    ids=str,
)
def test_what_is_wrong(launch):
    [(key, message)] = problems(**launch)
    said(f"{key}: {message}")


def test_an_image_that_is_gone(tmp_path):
    [(key, message)] = problems(container=f"{tmp_path}/gone.sif")
    said(f"{key}: {message}")


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
def test_image_is_the_same_wherever_the_step_runs(image, runtime, expected):
    assert absolute_image(image, runtime, "/p") == expected


def wrong(**launch: Any) -> list[tuple[str, str]]:
    return [(key, message) for key, message, _ in launch_problems(LaunchConfig(**launch))]


def test_a_good_environment():
    assert wrong() == []
    assert (
        wrong(modules=["cuda/12.4"], env={"_a1": "two\nlines"}, setup=["a\nb"], conda="mine", venv="x y")
        == []
    )


@pytest.mark.parametrize("name", ["--force", "", " ", "a b"])
def test_names_of_modules(name):
    launch = LaunchConfig.model_construct(**{**dict(LaunchConfig()), "modules": (name,)})
    assert [key for key, _, _ in launch_problems(launch)] == ["launch.modules"]


def test_variables_that_are_not_the_users():
    names = ("RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SBATCH_QOS", "TRAINKIT_JOB_NONCE")
    found = wrong(env=dict.fromkeys(names, "1"))
    assert [key for key, _ in found] == [f"launch.env.{name}" for name in names]
    [message] = {message for _, message in found}
    said(message)


def test_what_nothing_can_hold():
    [(key, message)] = wrong(conda="-n")
    assert key == "launch.conda"
    said(message)
