"""Implements the interface for other programs: `trainkit wait`, and the JSON Schemas of `--json` outputs."""
