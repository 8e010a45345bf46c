from typing import Any

import pytest

from tests.support.said import said
from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import launch_problems


def problems(**launch: Any) -> list[tuple[str, str]]:
    return [(key, message) for key, message, _ in launch_problems(LaunchConfig(**launch))]


def test_nothing_is_wrong():
    assert problems() == []
    assert (
        problems(modules=["cuda/12.4"], env={"_a1": "two\nlines"}, setup=["a\nb"], conda="mine", venv="x y")
        == []
    )


@pytest.mark.parametrize("name", ["--force", "", " ", "a b"])
def test_names_of_modules(name):
    launch = LaunchConfig.model_construct(**{**dict(LaunchConfig()), "modules": (name,)})
    assert [key for key, _, _ in launch_problems(launch)] == ["launch.modules"]


def test_variables_that_are_not_the_users():
    names = ("RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SBATCH_QOS", "TRAINKIT_JOB_NONCE")
    found = problems(env=dict.fromkeys(names, "1"))
    assert [key for key, _ in found] == [f"launch.env.{name}" for name in names]
    [message] = {message for _, message in found}
    said(message)


def test_what_nothing_can_hold():
    [(key, message)] = problems(conda="-n")
    assert key == "launch.conda"
    said(message)
