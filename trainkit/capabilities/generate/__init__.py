"""`trainkit generate`: the model of a run continues a prompt."""
