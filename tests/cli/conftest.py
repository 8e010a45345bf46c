"""Provides the fixtures of tests that type commands."""

import pytest
from steering import desk

from trainkit.cli.main import main

__all__ = ["desk"]


@pytest.fixture
def prints(capsys):
    """Return a function that runs a command, checks its exit code, and returns its stdout and stderr."""

    def prints(args, code=0):
        capsys.readouterr()
        assert main(args) == code, capsys.readouterr().err
        return capsys.readouterr()

    return prints
