"""Slurm as a backend: how its jobs are planned, submitted, supervised, continued and looked up."""
