"""Computes steps of a run again, and shows their samples."""

SAMPLES_FILE = "sample_losses.jsonl"
"""What the ranks of a replay write into its folder: the losses of the samples of each step."""
