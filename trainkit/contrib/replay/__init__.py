"""Computes steps of a run again, and shows their samples."""
