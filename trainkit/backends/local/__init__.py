"""The backend for this machine: a supervisor process for each run, a queue for GPUs, and groups of runs."""
