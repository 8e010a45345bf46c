"""Provides fake commands of Slurm for failures that are rare with the real ones."""

import pytest

from tests.support.fake_slurm import fake

__all__ = ["fake"]


@pytest.fixture(autouse=True)
def slurm_of_the_test(request, monkeypatch):
    """Use the commands of the test's fake Slurm or cluster."""
    for name in {"fake", "cluster", "forgetful"} & set(request.fixturenames):
        for variable, value in request.getfixturevalue(name).environ.items():
            monkeypatch.setenv(variable, value)
