"""Fake commands of Slurm, for what the real ones do only on a bad day."""

from tests.support.fake_slurm import fake

__all__ = ["fake"]
