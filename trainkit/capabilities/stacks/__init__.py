"""`trainkit stacks`: where the ranks of a running job are."""
