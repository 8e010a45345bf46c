"""Fake commands of Slurm, for what the real ones do only on a bad day."""

import pytest

from tests.support.fake_slurm import fake

__all__ = ["fake"]


@pytest.fixture(autouse=True)
def slurm_of_the_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are those of the fake or the cluster that the test has."""
    for name in {"fake", "cluster", "forgetful"} & set(request.fixturenames):
        for variable, value in request.getfixturevalue(name).environ.items():
            monkeypatch.setenv(variable, value)
