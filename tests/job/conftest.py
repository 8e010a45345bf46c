"""Provides the fixtures of jobs with small scripts as workers."""

from job_tree import start_job
from slurm_job import run, slurm

from tests.support.runs import attempt

__all__ = ["attempt", "run", "slurm", "start_job"]
