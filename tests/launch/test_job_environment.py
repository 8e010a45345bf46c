from typing import Any

import pytest

from trainkit.config.running import LaunchConfig
from trainkit.launch.environment import launch_problems


def problems(**launch: Any) -> list[tuple[str, str]]:
    return [(key, message) for key, message, _ in launch_problems(LaunchConfig(**launch))]


def test_nothing_is_wrong() -> None:
    assert problems() == []
    assert (
        problems(modules=["cuda/12.4"], env={"_a1": "two\nlines"}, setup=["a\nb"], conda="mine", venv="x y")
        == []
    )


@pytest.mark.parametrize("name", ["--force", "", " ", "a b"])
def test_names_of_modules(name: str) -> None:
    launch = LaunchConfig.model_construct(**{**dict(LaunchConfig()), "modules": (name,)})
    assert [key for key, _, _ in launch_problems(launch)] == ["launch.modules"]


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SBATCH_QOS", "TRAINKIT_JOB_NONCE"]
)
def test_variables_that_are_not_the_users(name: str) -> None:
    assert problems(env={name: "1"}) == [(f"launch.env.{name}", "is set by the job in every process")]


def test_what_nothing_can_hold() -> None:
    assert problems(conda="-n") == [("launch.conda", "is '-n', which is an option, not an environment")]
