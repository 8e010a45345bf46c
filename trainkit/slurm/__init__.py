"""The only package that runs Slurm's commands; it knows Slurm's host lists, states, reasons and versions."""
