"""The only package that runs Slurm commands; it parses Slurm's host lists, states, reasons and versions."""
