"""Implements `trainkit generate`, which uses the model of a run to continue a prompt."""
