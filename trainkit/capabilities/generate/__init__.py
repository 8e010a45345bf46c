"""`trainkit generate`: continues a prompt with the model of a run."""
