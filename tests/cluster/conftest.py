"""Provides fake commands of Slurm for failures that are rare with the real ones."""

import pytest

from tests.support.fake_slurm import fake

__all__ = ["fake"]


@pytest.fixture(autouse=True)
def only_fake_commands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set PATH to the fake commands of a test if it has some, for a user called me."""
    if "fake" in request.fixturenames:
        monkeypatch.setattr("getpass.getuser", lambda: "me")
        monkeypatch.setenv("PATH", request.getfixturevalue("fake").environ["PATH"])
