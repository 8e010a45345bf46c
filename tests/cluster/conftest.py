"""Fake commands of Slurm, for what the real ones do only on a bad day."""

import pytest

from tests.support.fake_slurm import fake

__all__ = ["fake"]


@pytest.fixture(autouse=True)
def only_fake_commands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH leads to the fake commands of a test that has some, for a user called me."""
    if "fake" in request.fixturenames:
        monkeypatch.setattr("getpass.getuser", lambda: "me")
        monkeypatch.setenv("PATH", request.getfixturevalue("fake").environ["PATH"])
