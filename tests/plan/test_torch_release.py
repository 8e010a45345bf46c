from __future__ import annotations

import pytest

from trainkit.plan.torch_release import release_problem


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0+cu130", "2.11.0a0+git1a2b3c", "2.13.0", "3.0", "", "git"]
)
def test_releases_that_the_trainer_supports(version: str) -> None:
    assert release_problem(version) is None


@pytest.mark.parametrize("version", ["1.13.1", "2.2.0+cu121", "2.10.0"])
def test_older_ones_are_refused_by_name(version: str) -> None:
    problem = release_problem(version)
    assert problem is not None
    assert problem[0] == f"has torch {version}, and the trainer requires torch 2.11 or newer"
    assert "pip install 'torch>=2.11'" in problem[1]
