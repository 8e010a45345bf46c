"""Implements `trainkit stacks`, which prints the Python stacks of all ranks in a running job."""
