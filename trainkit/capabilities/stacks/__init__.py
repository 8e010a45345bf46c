"""`trainkit stacks`: prints the Python stacks of the ranks of a running job."""
