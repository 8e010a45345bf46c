"""Fake commands of Slurm, for what the real ones do only on some clusters, and jobs of a pretended one."""

from slurm_job import run, slurm

from tests.support.fake_slurm import fake

__all__ = ["fake", "run", "slurm"]
