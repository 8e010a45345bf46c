"""The only place that runs Slurm's commands and knows its host lists, states, reasons and versions."""
