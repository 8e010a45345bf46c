"""The backend for one machine: a supervisor process for each run, a queue of GPUs, and groups of runs."""
