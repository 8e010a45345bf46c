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


def problems(cwd: str = "/nowhere", **launch: Any) -> list[str]:
    return [f"{key}: {message}" for key, message, _ in container_problems(LaunchConfig(**launch), cwd)]


def test_an_image_that_is_there_and_one_that_is_gone(tmp_path):
    image = tmp_path / "x.sif"
    image.touch()
    assert problems(container=str(image), container_mounts=["/a", "/a:/b", "/a:/b:ro"]) == []
    assert problems() == []
    image.unlink()
    [problem] = problems(container=str(image))
    said(problem)


@pytest.mark.parametrize(
    "launch",
    [
        *({"container_mounts": ["/a"]}, {"container": "--pwn"}, {"container": "image"}),
        *({"container": "gone.sif"}, {"container": "/a/${USER}.sif"}),
        {"container": "docker://x", "cwd": "/a,b"},
        *(
            {"container": "docker://x", "container_mounts": [mount]}
            for mount in ("data", "/a:", "/a:/b:ro:x", "/a,/b", ":/b")
        ),
    ],
    ids=str,
)
def test_what_is_wrong(launch):
    [problem] = problems(**launch)
    said(problem)


def test_image_is_the_same_wherever_the_step_runs():
    images = ("images/x.sif", "../x.sif", "/x.sif", "docker://a/b:1")
    expected = ["/p/images/x.sif", "/x.sif", "/x.sif", "docker://a/b:1"]
    assert [absolute_image(image, "apptainer", "/p") for image in images] == expected
    images, expected = ("nvcr.io/a/b:1", "./image", "a.sqsh"), ["nvcr.io/a/b:1", "/p/image", "/p/a.sqsh"]
    assert [absolute_image(image, "pyxis", "/p") for image in images] == expected


def wrong(**launch: Any) -> list[tuple[str, str]]:
    """Return the problems of values that may be ones that the config would refuse."""
    made = LaunchConfig.model_construct(**{**dict(LaunchConfig()), **launch})
    return [(key, message) for key, message, _ in launch_problems(made)]


def test_a_good_environment():
    assert wrong() == []
    environ = {"_a1": "two\nlines"}
    assert wrong(modules=["cuda/12.4"], env=environ, setup=["a\nb"], conda="mine", venv="x y") == []


def test_names_of_modules_and_environments():
    for name in ("--force", "", " ", "a b"):
        assert [key for key, _ in wrong(modules=(name,))] == ["launch.modules"]
    [problem] = wrong(conda="-n")
    said(": ".join(problem))


def test_variables_that_are_not_the_users():
    names = ("RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SBATCH_QOS", "TRAINKIT_JOB_NONCE")
    found = wrong(env=dict.fromkeys(names, "1"))
    assert [key for key, _ in found] == [f"launch.env.{name}" for name in names]
    [message] = {message for _, message in found}
    said(message)
