"""Tries out a user's task on this machine, for `check --task-smoke` and `data validate CONFIG`."""
