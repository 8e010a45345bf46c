"""The only package that runs Slurm's commands; it knows their host lists, states, reasons and versions."""
