"""Provides the fixtures of jobs with small scripts as workers."""

from job_tree import start_job

__all__ = ["start_job"]
