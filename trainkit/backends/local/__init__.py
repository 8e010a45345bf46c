"""The backend for this machine: one supervisor process per run, a queue for GPUs, and groups of runs."""
