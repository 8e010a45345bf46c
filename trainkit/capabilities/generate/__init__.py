"""Implements `trainkit generate`, which continues a prompt with the model of a run."""
