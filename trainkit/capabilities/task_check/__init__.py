"""Tries a user's task before it costs time on a cluster: `check --task-smoke`, `data validate CONFIG`."""
