"""Implements the interface for programs: `trainkit wait`, and the JSON Schemas of each `--json` output."""
