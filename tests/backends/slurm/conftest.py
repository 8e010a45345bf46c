"""Provides fake commands of Slurm for rare behaviour of the real ones, and jobs of a pretended Slurm."""

from slurm_job import run, slurm

from tests.support.fake_slurm import fake

__all__ = ["fake", "run", "slurm"]
