"""The only package that runs Slurm commands.

This package also parses Slurm's host lists, states, reasons and versions.
"""
