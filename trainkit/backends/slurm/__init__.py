"""The Slurm backend: plans, submits, supervises, continues and queries Slurm jobs."""
