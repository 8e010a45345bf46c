"""Fake commands of Slurm, for what the real ones do only on some clusters."""

from tests.support.fake_slurm import fake

__all__ = ["fake"]
