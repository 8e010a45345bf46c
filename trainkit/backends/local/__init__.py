"""One machine as a backend: a supervisor process for each run, the queue of its GPUs, and groups of runs."""
