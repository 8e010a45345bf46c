"""Implements `trainkit stacks`, which prints the Python stacks of the ranks of a running job."""
